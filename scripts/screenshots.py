"""Takes the pictures of docs/images: the explain page in light, dark and on a narrow screen.

    python scripts/screenshots.py            needs Chromium

The page is that of ``examples/explained_transformer.py``: planned for devices that need not exist.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

import explained_transformer

import chromium
import gshard

IMAGES = ROOT / "docs" / "images"
LARGEST = 300_000  # bytes of a picture
MACHINE = "h100:8x8"

# What is chosen on the page before the picture is taken: the line that sends most.
HOTTEST = """
const lines = Object.entries(D.lines).sort((a, b) => b[1][1] - a[1][1]);
choose("line", lines[0][0]); shown(lines[0][0]);
"""


# No bars for scrolling, which are the browser's.
WITHOUT_BARS = "document.documentElement.style.overflow = 'hidden';"


def explained(folder: Path) -> Path:
    """The explain page of the example."""
    step, *arguments = explained_transformer.example()
    mesh = gshard.Mesh.abstract(data=8, model=8)
    found = gshard.explain(gshard.jit(step, mesh=mesh, machine=MACHINE, donate_argnums=(0, 1)), *arguments)
    return found.html(folder / "explain.html", MACHINE)


def main() -> None:
    """Takes all pictures."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, chromium.Chromium() as browser:
        pictures = [
            (explained, "explain", "light", 1280, 1000, ""),
            (explained, "explain-dark", "dark", 1280, 1000, HOTTEST),
            (explained, "explain-narrow", "light", 400, 900, ""),
        ]
        made = functools.cache(lambda page: page(Path(name)))
        for page, title, scheme, width, height, script in pictures:
            address = made(page)
            browser.look(scheme, width, height)
            browser.open(address.as_uri())
            browser.run(WITHOUT_BARS + script)
            time.sleep(0.3)
            path = IMAGES / f"{title}.png"
            browser.picture(path)
            assert path.stat().st_size < LARGEST, f"{path} has {path.stat().st_size:,} bytes"
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
