"""Row text: prints the rows of an explanation, with one line for equal layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gshard.core.mesh import Mesh
from gshard.core.number_text import format_seconds
from gshard.core.program import format_bytes
from gshard.explanation.rows import CollectiveRow, TensorRow


class ArrayLine(NamedTuple):
    """The parts of the line of an array."""

    key: str  # arrays with the same key, sharding and note have one line
    alike: str  # the name of several of them
    name: str  # the name of one of them
    sharding: str  # as text
    bytes: int  # of one device's part
    note: str  # the end of the line


def array_lines(title: str, arrays: Sequence[ArrayLine], most: int) -> list[str]:
    """At most so many lines, with a title; those of equal arrays as one."""
    together: dict[tuple[str, str, str], list[ArrayLine]] = {}
    for array in arrays:
        together.setdefault((array.key, array.sharding, array.note), []).append(array)
    shown = [(same[0], len(same)) for same in together.values()][:most]
    names = [f"{first.alike}  x{n}" if n > 1 else first.name for first, n in shown]
    wide, across = (max(map(len, texts), default=0) for texts in (names, [first.sharding for first, _ in shown]))
    lines = [
        f"  {name:<{wide}}  {first.sharding:<{across}}  {format_bytes(first.bytes):>10}  {first.note}"
        for name, (first, _) in zip(names, shown, strict=True)
    ]
    title = f"{title} (the largest {sum(n for _, n in shown)} of {len(arrays)}; bytes of one device's part)"
    return ["", title, *lines] if shown else []


def tensor_lines(title: str, rows: Sequence[TensorRow], most: int) -> list[str]:
    """At most so many lines; what equal layers have alike, in the same sharding for the same reason, in one.

    Of values inside the line has the number of the first, with which ``why`` finds it.
    """
    arrays = [
        ArrayLine(
            row.alike or re.sub(r"^%\d+ ", "", row.name), row.alike or row.short or row.name, row.short or row.name,
            row.sharding, row.local_bytes, row.reason,
        )
        for row in rows
    ]  # fmt: skip
    return array_lines(title, arrays, most)


def collective_lines(
    rows: Sequence[CollectiveRow], most: int, columns: tuple[int, int] = (12, 24), no_line: str = ""
) -> list[str]:
    """At most so many lines: bytes, axes, array, module, source line, reason, and where it is modelled the time."""
    shown, is_timed = rows[:most], any(row.seconds for row in rows)
    names = [f"{row.array}  x{row.arrays}" if row.arrays > 1 else row.array for row in shown]
    wide, modules = (max(map(len, texts), default=0) for texts in (names, [row.module for row in shown]))
    across, shape = columns
    lines = []
    for row, name in zip(shown, names, strict=True):
        times = f"x{'' if row.exact else '~'}{row.times}{f'/{row.sharing}' if row.sharing > 1 else ''}"
        sent = f"{row.kind:<18} {times:<5} {format_bytes(row.bytes):>10}"
        where = f"over {row.axes:<{across}} {row.shape:<{shape}}"
        taken = f"{format_seconds(row.seconds):>8}{_exposed(row):<13}  " if is_timed else ""
        module = f"{row.module:<{modules}}  " if modules else ""
        lines.append(f"  {sent}  {where} {taken}{name:<{wide}}  {module}{row.line or no_line}  ({row.why})")
    if rest := rows[most:]:
        lines.append(f"  ... and {len(rest)} more rows with {format_bytes(sum(row.bytes for row in rest))}")
    return lines


def _exposed(row: CollectiveRow) -> str:
    if not row.seconds:
        return ""
    hidden = 1 - row.exposed / row.seconds
    return f" {100 * hidden:.0f} % hidden" if hidden > 0.005 else " exposed"


def lines_of_parts(rows: Sequence[CollectiveRow], mesh: Mesh) -> list[str]:
    """What the parts of axes are that collectives are over, such as ``data.0``; one line for each axis."""
    over = {name for row in rows for name in row.axes.split(",")}
    return [
        f"  {', '.join(atoms)}: parts of axis {name}, {' x '.join(str(mesh.atom_sizes[a]) for a in atoms)} devices"
        for name, atoms in mesh.atoms_of.items()
        if len(atoms) > 1 and not over.isdisjoint(atoms)
    ]
