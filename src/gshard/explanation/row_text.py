"""Row text: prints the rows of an explanation, with one line for equal layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gshard.core.mesh import Mesh
from gshard.core.program import format_bytes
from gshard.explanation.rows import CollectiveRow, TensorRow


def tensor_lines(title: str, rows: Sequence[TensorRow], most: int) -> list[str]:
    """At most so many lines; what equal layers have alike, in the same sharding for the same reason, in one.

    Of values inside the line has the number of the first, with which ``why`` finds it.
    """
    together: dict[tuple[str, str, str], int] = {}
    largest: dict[tuple[str, str, str], TensorRow] = {}
    for row in rows:
        key = row.alike or re.sub(r"^%\d+ ", "", row.name), row.sharding, row.reason
        together[key] = together.get(key, 0) + 1
        largest.setdefault(key, row)
    shown = [(row, together[key], key[0]) for key, row in largest.items()][:most]
    names = [alike if n > 1 and row.alike else row.short or row.name for row, n, alike in shown]
    texts = [f"{name}  x{n}" if n > 1 else name for name, (_, n, _) in zip(names, shown, strict=True)]
    wide = max(map(len, texts), default=0)
    across = max((len(row.sharding) for row, *_ in shown), default=0)
    lines = [
        f"  {text:<{wide}}  {row.sharding:<{across}}  {format_bytes(row.local_bytes):>10}  {row.reason}"
        for text, (row, *_) in zip(texts, shown, strict=True)
    ]
    told = sum(n for _, n, _ in shown)
    return ["", f"{title} (the largest {told} of {len(rows)}; bytes of one device's part)", *lines] if rows else []


def collective_lines(rows: Sequence[CollectiveRow], most: int) -> list[str]:
    """At most so many lines: the bytes, the array, the module, the source line, and the reason."""
    shown = rows[:most]
    names = [f"{c.array}  x{c.arrays}" if c.arrays > 1 else c.array for c in shown]
    wide = max(map(len, names), default=0)
    modules = max((len(c.module) for c in shown), default=0)
    lines = []
    for c, name in zip(shown, names, strict=True):
        sent = f"{c.kind:<18} x{c.times:<4} {format_bytes(c.bytes):>10}  over {c.axes:<12} {c.shape:<24}"
        module = f"{c.module:<{modules}}  " if modules else ""
        lines.append(f"  {sent} {name:<{wide}}  {module}{c.line}  ({c.why})")
    if rest := rows[most:]:
        lines.append(f"  ... and {len(rest)} more rows with {format_bytes(sum(r.bytes for r in rest))}")
    return lines


def lines_of_parts(rows: Sequence[CollectiveRow], mesh: Mesh) -> list[str]:
    """What the parts of axes are that collectives are over, such as ``data.0``; one line for each axis."""
    over = {name for row in rows for name in row.axes.split(",")}
    return [
        f"  {', '.join(atoms)}: parts of axis {name}, {' x '.join(str(mesh.atom_sizes[a]) for a in atoms)} devices"
        for name, atoms in mesh.atoms_of.items()
        if len(atoms) > 1 and not over.isdisjoint(atoms)
    ]
