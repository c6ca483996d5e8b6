"""Writes docs/gallery.md: every program of examples/, what it is about, and the collectives that it has.

    python scripts/gallery.py                      # or: make gallery
    python scripts/gallery.py examples/summa.py    # runs one, and prints its section of the page

Each example runs unchanged in its own process. The page lists what gshard explains or searches for in it. If an
example explains functions as XLA compiles them, with XLA's plan and with gshard's, the page compares the figures.
"""

import ast
import contextlib
import functools
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import gshard
from gshard.core.program import format_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gallery.md"
SHOWN = 2  # programs of an example
GROUPS = {
    "Training and serving": (
        "train_gpt",
        "decoder_moe",
        "search_training",
        "explained_transformer",
        "serve_exported",
    ),
    "Kinds of parallelism": ("sequence_parallel", "pipeline", "moe_layer", "summa", "spatial_unet", "vocabulary"),
    "Beside XLA's partitioner": ("beside_xla",),
    "Frameworks": ("equinox_modules", "haiku_batch_norm", "annotated_for_jax"),
    "Marks and rules": ("layout_transformer", "local_gather", "device_order", "unreduced", "new_operator"),
}

HEAD = """# Gallery

<!-- Written by `make gallery` from examples/: change those, not this. -->

Each program runs on a laptop, compares its numbers with one device, and asserts what it sends. Below each are the
collectives of one call, and the bytes that each device sends.
"""


def section(path: Path) -> str:
    """Runs an example in this process, and tells of it."""
    programs: list[gshard.stages.Explanation] = []
    compiled: list[gshard.stages.Explanation] = []

    def explain(*args: Any, **kwargs: Any) -> Any:
        found: Any = real_explain(*args, **kwargs)
        (compiled if found.is_compiled else programs).append(found)
        return found

    def search(*args: Any, **kwargs: Any) -> gshard.stages.SearchResult:
        found = real_search(*args, **kwargs)
        programs.append(found.explain())
        return found

    real_explain, real_search = gshard.explain, gshard.search
    gshard.explain, gshard.search = (  # type: ignore[assignment]
        functools.wraps(real)(ours) for real, ours in ((real_explain, explain), (real_search, search))
    )
    sys.argv = [str(path)]  # some examples take arguments
    with contextlib.redirect_stdout(sys.stderr):  # tests compare what a page shows of it
        runpy.run_path(str(path), run_name="__main__")
    rows = list(dict.fromkeys(map(_row, programs)))
    pairs = _beside(list(zip(compiled[::2], compiled[1::2], strict=True))) if compiled else []
    table = [*rows[:SHOWN], ""]
    return "\n".join([
        f"### {path.name}", "", *_words(path, whole=bool(pairs)), "", *(pairs or table),
        f"<details><summary><code>examples/{path.name}</code></summary>", "",
        f"```{{literalinclude}} ../examples/{path.name}", "```", "", "</details>", "",
    ])  # fmt: skip


def _row(found: gshard.stages.Explanation) -> str:
    count = sum(row.times for row in found.collectives)
    name = found.name if found.name.isidentifier() else "a lambda"
    return f"- `{name}` on {found.mesh}: {count} collectives, {found.total_bytes:,} bytes"


def _beside(pairs: list[tuple[gshard.stages.Explanation, gshard.stages.Explanation]]) -> list[str]:
    """A table of functions, each partitioned by XLA and by gshard."""
    columns = {"sent by a device": "sent", "messages": "messages", "peak memory": "peak", "modelled time": "seconds"}
    shown = {"seconds": lambda seconds: f"{1e3 * seconds:.2f} ms", "messages": str}
    rows = []
    for pair in pairs:
        xla, ours = pair
        assert (xla.name, str(xla.mesh)) == (ours.name, str(ours.mesh)), "one function on one mesh"
        sides = [found.data()["totals"] | {"messages": sum(found.times_by_kind.values())} for found in pair]
        figures = [" → ".join(shown.get(key, format_bytes)(side[key]) for side in sides) for key in columns.values()]
        rows.append(f"| `{xla.name}` | {xla.mesh} | {' | '.join(figures)} |")
    machine = pairs[0][0].data()["machine"]["name"]
    return [f"| XLA → gshard | mesh | {' | '.join(columns)} on {machine} |", "|---|---|--:|--:|--:|--:|", *rows, ""]


def _words(path: Path, whole: bool) -> list[str]:
    """The first paragraph of the module's docstring in Markdown, or the whole without the command line in it."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    kept = [part for part in text.replace("``", "`").split("\n\n") if f"python examples/{path.name}" not in part]
    return "\n\n".join(kept if whole else kept[:1]).splitlines()


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
