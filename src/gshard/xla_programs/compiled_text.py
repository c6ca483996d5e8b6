"""Compiled text: prints the rows of a compiled explanation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gshard.core.program import format_bytes
from gshard.explanation.bounds import format_seconds
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
    together: dict[tuple[str, str, str], list[CompiledArgument]] = {}
    for row in rows:
        together.setdefault((row.short.alike, row.sharding, row.type), []).append(row)
    shown = list(together.values())[:most]
    if not shown:
        return []
    names = [f"{same[0].short.alike}  x{len(same)}" if len(same) > 1 else same[0].short.text for same in shown]
    wide, across = max(map(len, names)), max(len(same[0].sharding) for same in shown)
    told = sum(map(len, shown))
    return [
        "",
        f"arguments (the largest {told} of {len(rows)}; bytes of one device's part)",
        *(
            f"  {name:<{wide}}  {same[0].sharding:<{across}}  {format_bytes(same[0].local_bytes):>10}  {same[0].type}"
            for name, same in zip(names, shown, strict=True)
        ),
    ]


def collective_lines_of(rows: Sequence[CompiledRow], most: int) -> list[str]:
    """At most so many collectives: bytes, axes, array, module, line, reason, and with a machine the time."""
    shown = rows[:most]
    names = [f"{row.array}  x{row.arrays}" if row.arrays > 1 else row.array for row in shown]
    wide, modules = max(map(len, names), default=0), max((len(row.module) for row in shown), default=0)
    across = max((len(row.axes) for row in shown), default=0)
    is_timed = any(row.seconds for row in rows)
    lines = []
    for row, name in zip(shown, names, strict=True):
        times = f"x{'' if row.exact else '~'}{row.times}"
        sent = f"{row.kind:<18} {times:<5} {format_bytes(row.bytes):>10}  over {row.axes:<{across}}  {row.shape:<20}"
        taken = f"{format_seconds(row.seconds):>8}{_exposed(row):<13}  " if is_timed else ""
        module = f"{row.module:<{modules}}  " if modules else ""
        lines.append(f"  {sent} {taken}{name:<{wide}}  {module}{row.line or '(no line)'}  ({row.why})")
    if rest := rows[most:]:
        lines.append(f"  ... and {len(rest)} more rows with {format_bytes(sum(row.bytes for row in rest))}")
    return lines


def _exposed(row: CompiledRow) -> str:
    if not row.seconds:
        return ""
    hidden = 1 - row.exposed / row.seconds
    return f" {100 * hidden:.0f} % hidden" if hidden > 0.005 else " exposed"


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
