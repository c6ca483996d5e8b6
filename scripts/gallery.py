"""Writes docs/gallery.md: every program of examples/, what it is about, and the collectives that it has.

    python scripts/gallery.py                      # or: make gallery
    python scripts/gallery.py examples/zero.py     # runs one, and prints its section of the page

Each example runs unchanged in its own process. The page lists what gshard explains or searches for in it. If an
example explains a function as XLA compiles it, gshard's plan, and that plan as XLA compiles it, the page compares them.
"""

import ast
import contextlib
import functools
import io
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gshard
from gshard.core.program import format_bytes, format_flops

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gallery.md"
SHOWN = 4  # programs of an example
LINES = 4  # rows of a compared program
GROUPS = {
    "Kinds of parallelism": (
        "zero", "optax_fsdp", "tensor_parallel", "sequence_parallel", "pipeline", "moe_layer", "decoder_moe", "summa",
        "spatial_unet", "vocabulary",
    ),
    "Beside XLA's partitioner": ("beside_xla",),
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
device sends. [Beside XLA's partitioner](#beside-xla-s-partitioner) compares five known models.
"""


def section(path: Path) -> str:
    """Runs an example in this process, and tells of it."""
    programs: list[gshard.stages.Explanation] = []
    compiled: list[gshard.stages.CompiledExplanation] = []

    def explain(*args: Any, **kwargs: Any) -> Any:
        found: Any = real_explain(*args, **kwargs)
        (compiled if isinstance(found, gshard.stages.CompiledExplanation) else programs).append(found)
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
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(path), run_name="__main__")
    rows = list(dict.fromkeys(map(_row, programs)))
    beside = zip(compiled[::2], compiled[1::2], programs, strict=True) if compiled else ()
    pairs = [line for three in beside for line in _beside(*three)]
    table = ["| program | mesh | collectives | sent by a device |", "|---|---|---|---|", *rows[:SHOWN], ""]
    return "\n".join([
        f"### {path.name}", "", *_words(path), "", *(pairs or table),
        f"<details><summary><code>examples/{path.name}</code></summary>", "",
        f"```{{literalinclude}} ../examples/{path.name}", ":language: python", "```", "", "</details>", "",
    ])  # fmt: skip


def _row(found: gshard.stages.Explanation) -> str:
    counts: dict[str, int] = {}
    for row in found.collectives:
        counts[row.kind] = counts.get(row.kind, 0) + row.times
    told = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"
    name = found.name if found.name.isidentifier() else "a lambda"
    return f"| `{name}` | {found.mesh} | {told} | {found.total_bytes:,} bytes |"


def _beside(
    xla: gshard.stages.CompiledExplanation, ours: gshard.stages.CompiledExplanation, plan: gshard.stages.Explanation
) -> list[str]:
    """One function partitioned by XLA and by gshard: the figures of both, their largest rows, and what differs most."""
    assert (xla.name, str(xla.mesh)) == (ours.name, str(ours.mesh)), "one function on one mesh"
    data = [found.data() for found in (xla, ours)]
    sides = [
        own["totals"] | {"messages": sum(f.times_by_kind.values())} for f, own in zip((xla, ours), data, strict=True)
    ]
    figures = (
        ("sent by a device", "sent", format_bytes), ("messages", "messages", str),
        ("peak memory of a device", "peak", format_bytes), ("FLOPs of a device", "flops", format_flops),
        (f"modelled time on {data[0]['machine']['name']}", "seconds", lambda seconds: f"{1e3 * seconds:.2f} ms"),
    )  # fmt: skip
    rows = []
    for what, key, shown in figures:
        before, after = (side[key] for side in sides)
        rows.append(f"| {what} | {shown(before)} | {shown(after)} | {100 * (after - before) / before:+.1f} % |")
    changes = sorted(plan.difference(xla, machine=xla.machine).lines, key=lambda line: -abs(line.more))[:LINES]
    return [
        f"#### {xla.name}", "", f"On {xla.mesh}:", "", "| | XLA | gshard | |", "|---|--:|--:|--:|", *rows, "",
        "```text", "XLA's largest collectives", *_largest(xla.collectives), "",
        "gshard's largest collectives", *_largest(plan.collectives), "",
        "lines that differ most in bytes sent: gshard's minus XLA's",
        *(f"  {_signed(line.more):>11}  {line.place}  {line.text.strip()[:70]}" for line in changes), "```", "",
    ]  # fmt: skip


def _largest(found: Sequence[Any]) -> list[str]:
    """The rows of the collectives that send most."""
    rows = [
        (f"{row.kind} x{row.times}", format_bytes(row.bytes), f"over {row.axes}", _array(row), row.line)
        for row in found[:LINES]
    ]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, wide)).rstrip() for row in rows]


def _array(row: Any) -> str:
    return f"{row.array}  x{row.arrays}" if row.arrays > 1 else str(row.array)


def _signed(n: int) -> str:
    return f"{'-' if n < 0 else '+'}{format_bytes(abs(n))}"


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
