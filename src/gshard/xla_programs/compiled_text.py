"""Compiled text: prints the rows of a compiled explanation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gshard.core.program import format_bytes
from gshard.explanation.row_text import ArrayLine, array_lines, collective_lines
from gshard.xla.op_names import origin_of
from gshard.xla_programs.compiled_program import CompiledArgument, CompiledProgram
from gshard.xla_programs.compiled_rows import CompiledRow
from gshard.xla_programs.whole_arrays import Regathered


def described(program: CompiledProgram, computation: str, name: str) -> str:
    """What makes an array: the operator, its module and its line; the instruction if nothing else is known."""
    made = program.module.computations[computation].instructions[name]
    origin, line = origin_of(made.op_name), program.module.line_of(made)
    words = [origin.operation, origin.module, line]
    return "  ".join(word for word in words if word) or made.opcode


def argument_lines(rows: Sequence[CompiledArgument], most: int) -> list[str]:
    """The largest arguments: name, sharding, bytes of one device's part; equal layers in one line."""
    arrays = [ArrayLine(a.short.alike, a.short.alike, a.short.text, a.sharding, a.local_bytes, a.type) for a in rows]
    return array_lines("arguments", arrays, most)


def collective_lines_of(rows: Sequence[CompiledRow], most: int) -> list[str]:
    """At most so many collectives: bytes, axes, array, module, line, reason, and with a machine the time."""
    across = max((len(row.axes) for row in rows[:most]), default=0)
    return collective_lines(rows, most, (across + 1, 20), "(no line)")


def whole_lines(rows: Sequence[CompiledArgument]) -> list[str]:
    """The arguments that every device holds whole."""
    if not rows:
        return []
    total = format_bytes(sum(row.local_bytes for row in rows))
    counts: Counter[tuple[str, str, int]] = Counter((row.short.alike, row.type, row.local_bytes) for row in rows)
    lines = [
        f"  {format_bytes(size * n):>10}  {name}{f'  x{n}' if n > 1 else ''}  {kind}"
        for (name, kind, size), n in counts.items()
    ]
    return ["", f"arguments that every device holds whole, {total} on each", *lines]


def regathered_lines(rows: Sequence[Regathered]) -> list[str]:
    """The arrays that are gathered although each device keeps a part only."""
    if not rows:
        return []
    lines = []
    for row in rows:
        part = row.part
        sent = format_bytes(part.bytes * part.sent.collective.executions)
        where = "  ".join(word for word in (part.origin.module, part.line) if word)
        lines.append(f"  {sent:>10}  {part.array.text}  {part.type} gathered, {row.kept} kept  {where}")
    return ["", "gathered on every device, which then keeps a part only: sharding constraints disagree here", *lines]


def memory_lines(program: CompiledProgram, most: int) -> list[str]:
    """The peak of a device, and the arrays that make it, largest first."""
    by = "as the compiler reports" if program.memory is not None else "as read from the schedule"
    lines = [
        "",
        f"memory of a device, {by}: {format_bytes(program.peak)} at the peak, "
        f"temporaries {format_bytes(program.totals.temporaries)}",
    ]
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for held in program.held.alive:
        key = described(program, held.array.computation, held.array.name), held.type
        sizes[key] += held.bytes
        counts[key] += 1
    for key, size in sizes.most_common(most):
        what, kind = key
        n = counts[key]
        lines.append(f"  {format_bytes(size):>10}  {kind}{f' x{n}' if n > 1 else ''}  {what}")
    return lines
