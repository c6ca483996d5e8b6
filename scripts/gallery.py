"""Writes docs/gallery.md: every program of examples/, what it is about, and the collectives that it has.

    python scripts/gallery.py                      # or: make gallery
    python scripts/gallery.py examples/zero.py     # runs one, and prints its section of the page

An example runs as it is, in a process of its own; what it asks gshard to explain, or to search for, is listed.
"""

import ast
import contextlib
import functools
import io
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import gshard

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gallery.md"
SHOWN = 4  # programs of an example
GROUPS = {
    "Kinds of parallelism": (
        "zero", "optax_fsdp", "tensor_parallel", "sequence_parallel", "pipeline", "moe_layer", "decoder_moe", "summa",
        "spatial_unet", "vocabulary",
    ),
    "Frameworks": ("flax_nnx", "equinox_modules", "haiku_batch_norm", "orbax_restore"),
    "Ways to say it": (
        "annotated_for_jax", "layout_transformer", "search_training", "local_gather", "device_order", "unreduced",
        "new_operator", "explained_transformer",
    ),
}  # fmt: skip

HEAD = """# Gallery

<!-- Written by `make gallery` from examples/: change those, not this. -->

Each of these is a program of a page that runs on a laptop, compares its numbers with one device, and asserts what it
sends. The tables are what `gshard.explain` says of the programs in it: collectives of one call, and the bytes that each
device sends.
"""


def section(path: Path) -> str:
    """Runs an example in this process, and tells of it."""
    programs: list[gshard.Explanation] = []

    def explain(*args: Any, **kwargs: Any) -> gshard.Explanation:
        programs.append(real_explain(*args, **kwargs))
        return programs[-1]

    def search(*args: Any, **kwargs: Any) -> gshard.SearchResult:
        found = real_search(*args, **kwargs)
        programs.append(found.explain())
        return found

    real_explain, real_search = gshard.explain, gshard.search
    gshard.explain, gshard.search = (  # type: ignore[assignment]
        functools.wraps(real)(ours) for real, ours in ((real_explain, explain), (real_search, search))
    )
    sys.argv = [str(path)]  # some examples take arguments
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(path), run_name="__main__")
    rows = list(dict.fromkeys(map(_row, programs)))
    return "\n".join([
        f"### {path.name}", "", *_words(path), "",
        "| program | mesh | collectives | sent by a device |", "|---|---|---|---|", *rows[:SHOWN], "",
        f"<details><summary><code>examples/{path.name}</code></summary>", "",
        f"```{{literalinclude}} ../examples/{path.name}", ":language: python", "```", "", "</details>", "",
    ])  # fmt: skip


def _row(found: gshard.Explanation) -> str:
    counts: dict[str, int] = {}
    for row in found.collectives:
        counts[row.kind] = counts.get(row.kind, 0) + row.times
    told = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"
    name = found.name if found.name.isidentifier() else "a lambda"
    return f"| `{name}` | {found.mesh} | {told} | {found.total_bytes:,} bytes |"


def _words(path: Path) -> list[str]:
    """The module's docstring in Markdown, without the command line in it."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    kept = [line for line in text.splitlines() if line.strip() != f"python examples/{path.name}"]
    return "\n".join(kept).replace("``", "`").strip().splitlines()


def page(sections: dict[str, str]) -> str:
    """The text of the page, from the section of each example."""
    lines = [HEAD]
    rest = tuple(sections.keys() - {name for names in GROUPS.values() for name in names})
    for title, names in [*GROUPS.items(), *([("Others", sorted(rest))] if rest else [])]:
        lines += [f"## {title}", "", *(sections[name] for name in names)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Runs one example, or all."""
    if len(sys.argv) > 1:
        print(section(Path(sys.argv[1]).resolve()))
        return
    sections = {}
    for name in sorted(path.stem for path in (ROOT / "examples").glob("*.py")):
        print(name, flush=True)
        command = [sys.executable, __file__, str(ROOT / "examples" / f"{name}.py")]
        sections[name] = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    PAGE.write_text(page(sections), "utf-8")


if __name__ == "__main__":
    main()
