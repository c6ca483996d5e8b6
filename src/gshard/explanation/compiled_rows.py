"""Compiled rows: what the collectives of a compiled program move, what devices hold whole, and their text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import format_bytes
from gshard.device.network import atoms_among
from gshard.explanation.compiled_program import CompiledArgument, CompiledProgram
from gshard.explanation.rows import ArrayLine, CollectiveRow, array_lines, collective_lines
from gshard.naming.argument_names import ArrayName, common_name, equal_layers
from gshard.naming.array_names import GRADIENT, UPDATE
from gshard.xla.dataflow import Array
from gshard.xla.hlo_collectives import Sent, pairs_of
from gshard.xla.hlo_parser import ArrayType, Computation, Instruction, Origin, arrays_of, origin_of

# Parts: the arrays that the collectives of a compiled program move, each with its name, its line and its reason.

REDUCTIONS = frozenset(("all_reduce", "reduce_scatter"))
_MANY = 8  # devices of a group that are listed


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One array that a collective moves."""

    sent: Sent  # the collective
    number: int  # which of its arrays
    bytes: int  # that each device sends of it in one run
    type: ArrayType  # the operand on one device
    array: ArrayName  # what it is called
    is_named: bool  # whether it is called after an argument
    origin: Origin  # the operator for which it is moved;
    line: str  # its line, ``train.py:9``;
    place: str  # with the whole path of the file; both empty if nothing tells
    why: str  # which operator reads or makes it


def parts_of(program: CompiledProgram) -> tuple[Part, ...]:
    """The arrays that collectives move, in the order of the program."""
    return tuple(_part(program, sent, i) for sent in program.sent for i in range(max(1, len(sent.itself.operands))))


def _part(program: CompiledProgram, sent: Sent, i: int) -> Part:
    computation = program.module.computations[sent.inside]
    operands = [computation.instructions[o] for o in sent.itself.operands if o in computation.instructions]
    types = [arrays_of(o.type) for o in operands] or [arrays_of(sent.itself.literal or sent.itself.type)]
    sizes = [sum(a.bytes for a in own) for own in types]
    share = sizes[i] / sum(sizes) if sum(sizes) else 0.0
    operand = Array(sent.inside, sent.itself.operands[i]) if sent.itself.operands else None
    result = _result(program, sent, i)
    own = _notes(program, sent, i)
    origin, line, place = _where(program, own, operand, result)
    array, is_named = _name(program, sent, origin, operand, result)
    why = _why(program, sent, origin, operand, result)
    first = types[i][0] if types[i] else ArrayType("token", (), 0, False)
    return Part(sent, i, round(sent.collective.bytes_moved * share), first, array, is_named, origin, line, place, why)


def _result(program: CompiledProgram, sent: Sent, i: int) -> Array:
    """What a part of a collective becomes."""
    several = len(sent.itself.operands) > 1
    if sent.made is sent.itself:
        return Array(sent.computation, sent.ends.name, i if several else None)
    if sent.is_asynchronous:
        return Array(sent.computation, sent.ends.name)
    return Array(sent.inside, sent.itself.name, i if several else None)


def _notes(program: CompiledProgram, sent: Sent, i: int) -> list[Instruction]:
    """The instructions whose metadata tell of a part: of a combined collective the one that takes its element."""
    several = len(sent.itself.operands) > 1
    taken = [
        made
        for made in program.flow.users(sent.computation, sent.ends.name)
        if several and made.opcode == "get-tuple-element" and made.number == i
    ]
    return [*taken, sent.itself, sent.ends, sent.made]


def _where(
    program: CompiledProgram, own: Sequence[Instruction], operand: Array | None, result: Array
) -> tuple[Origin, str, str]:
    """The operator for which a part is moved: as the collective notes, else what makes it, else what reads it."""
    notes = list(own)
    made = None if operand is None else program.flow.made(program.flow.source(operand))
    notes += [made] if made is not None and made.opcode != "parameter" else []
    if not any(map(program.module.place_of, notes)):
        reader = next(program.flow.readers(result), None)
        notes += [] if reader is None else [reader[1]]
    named = next((n for n in notes if "/" in n.op_name or n.op_name.startswith("jit(")), None)
    place = next(filter(None, map(program.module.place_of, notes)), "")
    origin = Origin() if named is None else origin_of(named.op_name)
    return origin, place.rpartition("/")[2], place


def _name(
    program: CompiledProgram, sent: Sent, origin: Origin, operand: Array | None, result: Array
) -> tuple[ArrayName, bool]:
    numbers = () if operand is None else program.flow.arguments(operand)
    if numbers and max(numbers) < len(program.arguments):
        return common_name([program.arguments[n].short for n in numbers]), True
    if origin.is_backward or sent.collective.kind in REDUCTIONS or not program.updates:
        reach = program.flow.reach(result)
        changed = {program.updates[r] for r in reach.results if r in program.updates} | reach.beside
        known = sorted(n for n in changed if n < len(program.arguments))
        read = program.weights, program.differentiated
        weights = next(filter(None, ([n for n in known if n in numbers] for numbers in read)), known)
        if weights and (reach.results or origin.is_backward):
            before = GRADIENT if origin.is_backward else UPDATE
            short = common_name([program.arguments[n].short for n in weights])
            return ArrayName(before + short.text, before + short.alike), True
        named = sorted(r for r in reach.results if r < len(program.results))
        if named and origin.is_backward:
            text = program.results[named[0]]
            return ArrayName(text, text), True
    made = None if operand is None else program.flow.made(program.flow.source(operand))
    operation = (origin_of(made.op_name).operation if made is not None and made.opcode != "parameter" else "") or (
        origin.operation or (made.opcode if made is not None else sent.itself.opcode)
    )
    text = f"{operation}{_phase(origin)}"
    return ArrayName(text, text), False


def _phase(origin: Origin) -> str:
    """In which phase of a training step an operator runs, as the end of its name."""
    if origin.is_recomputed:
        return ", recomputed"
    return ", backward" if origin.is_backward else ""


def _why(program: CompiledProgram, sent: Sent, origin: Origin, operand: Array | None, result: Array) -> str:
    if sent.collective.kind in REDUCTIONS:
        made = None if operand is None else program.flow.made(program.flow.source(operand))
        own = origin_of(made.op_name).operation if made is not None and made.opcode != "parameter" else ""
        why = f"result of {own or origin.operation or 'an operator'}"
    else:
        reader = next(program.flow.readers(result), None)
        if reader is None or (reader[1].opcode == "tuple" and reader[0] == program.module.entry):
            why = "a result of the program"
        else:
            own = origin_of(reader[1].op_name).operation or origin.operation or reader[1].opcode
            why = f"operand of {own}"
    return why + _phase(origin)


def atoms_of(program: CompiledProgram, sent: Sent) -> Atoms | None:
    """The atoms of the mesh that a collective runs over; None if its groups are along no axes."""
    mesh = program.mesh
    if sent.collective.kind == "collective_permute":
        return _apart(mesh, pairs_of(sent.itself))
    return atoms_among(mesh, sent.collective.groups)


def _apart(mesh: Mesh, pairs: Sequence[tuple[int, int]]) -> Atoms:
    """The atoms along which the ends of some pair are apart."""
    stride, found = mesh.size, []
    for atom, size in mesh.atom_sizes.items():
        stride //= size
        if any(a // stride % size != b // stride % size for a, b in pairs):
            found.append(atom)
    return tuple(found)


def axes_text(program: CompiledProgram, sent: Sent) -> str:
    """What a collective runs over, as text: axes of the mesh, or the group of device 0."""
    atoms = atoms_of(program, sent)
    if atoms is not None:
        return program.mesh.format_atoms(atoms)
    group = sent.collective.group
    listed = ",".join(map(str, group[:_MANY])) + (",…" if len(group) > _MANY else "")
    return f"{{{listed}}}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRow(CollectiveRow):
    """Collectives of one kind over the same devices for the same line."""

    place: str  # the line with the whole path of its file
    parts: tuple[Part, ...] = dataclasses.field(default=(), repr=False)  # what it was made of


def compiled_rows(
    program: CompiledProgram, parts: Sequence[Part], taken: Mapping[int, tuple[float, float]] | None = None
) -> tuple[CompiledRow, ...]:
    """The collectives of a program, most bytes first."""
    # With the operator inside, so that a scope with a number that holds no other scope may be a layer, too.
    paths = {(*p.origin.module.split("/"), p.origin.operation): None for p in parts if p.origin.module}
    folded = {path[:-1]: alike[:-1] for path, alike in equal_layers(paths, same_inside=False).items()}
    rows: dict[Hashable, list[Part]] = {}
    for part in parts:
        path = tuple(part.origin.module.split("/"))
        module = "/".join(folded.get(path, path))
        read = part.sent.collective
        key = (read.kind, axes_text(program, part.sent), part.line, str(part.type), part.array.alike, module, part.why)
        rows.setdefault(key, []).append(part)
    sharing = Counter(sent for same in rows.values() for sent in {id(part.sent) for part in same})
    made = [
        dataclasses.replace(
            _row(program, same, folded, taken or {}), sharing=max(sharing[id(part.sent)] for part in same)
        )
        for same in rows.values()
    ]
    return tuple(sorted(made, key=lambda row: (-row.bytes, -row.seconds)))


def _row(
    program: CompiledProgram,
    same: Sequence[Part],
    folded: Mapping[tuple[str, ...], tuple[str, ...]],
    taken: Mapping[int, tuple[float, float]],
) -> CompiledRow:
    first = same[0]
    modules = {part.origin.module for part in same}
    path = tuple(first.origin.module.split("/"))
    module = first.origin.module if len(modules) == 1 else "/".join(folded.get(path, path))
    names = {part.array.text for part in same}
    times = {part.sent: part.sent.collective.executions for part in same}
    sent = sum(part.bytes * part.sent.collective.executions for part in same)
    # What one message takes is shared by its arrays as its bytes are.
    shares = [
        (part.bytes / part.sent.collective.bytes_moved * part.sent.collective.executions, id(part.sent.itself))
        for part in same
        if part.sent.collective.bytes_moved
    ]
    seconds, exposed = (sum(share * taken.get(which, (0.0, 0.0))[k] for share, which in shares) for k in (0, 1))
    return CompiledRow(
        kind=first.sent.collective.kind, axes=axes_text(program, first.sent), times=sum(times.values()), bytes=sent,
        shape=str(first.type), line=first.line, why=first.why, module=module, place=first.place, seconds=seconds,
        array=first.array.text if len(names) == 1 else first.array.alike, exposed=exposed, parts=tuple(same),
        arrays=len(names) if first.is_named else len(modules),
        exact=all(part.sent.collective.exact for part in same),
    )  # fmt: skip


# Whole arrays: what every device of a compiled program holds whole, and what is gathered only to be cut again.

LARGE = 1 << 20  # bytes of an array that is worth a line
_SHARE = 0.01  # or of all arguments of a device: what is less than that is not worth one
_FORMS = frozenset(
    ("bitcast", "copy", "convert", "transpose", "reshape", "copy-start", "copy-done", "get-tuple-element")
)
_MOST = 200  # instructions that an index is followed back


@dataclasses.dataclass(frozen=True, slots=True)
class Regathered:
    """An array that every device of a group gathers, though it keeps only a part of the array."""

    part: Part  # the gather
    kept: str  # the part that a device keeps, as text


def whole_arguments(program: CompiledProgram) -> tuple[CompiledArgument, ...]:
    """The large arguments that every device holds whole, largest first."""
    if program.mesh.size == 1:
        return ()
    total = sum(a.local_bytes for a in program.arguments)
    found = [a for a in program.arguments if a.is_whole and a.local_bytes >= max(LARGE, _SHARE * total)]
    return tuple(sorted(found, key=lambda a: -a.local_bytes))


def regathered(program: CompiledProgram, parts: Sequence[Part]) -> tuple[Regathered, ...]:
    """The gathers whose result each device keeps only in part, most bytes first."""
    found = []
    for part in parts:
        if part.sent.collective.kind == "all_gather" and (kept := _kept(program, part)):
            found.append(Regathered(part, kept))
    return tuple(sorted(found, key=lambda r: -r.part.bytes * r.part.sent.collective.executions))


def _kept(program: CompiledProgram, part: Part) -> str:
    """What is cut from a gathered array, if everything that reads it cuts the device's own part from it."""
    several = len(part.sent.itself.operands) > 1
    if part.sent.made is not part.sent.itself:
        return ""
    waiting = [Array(part.sent.computation, part.sent.ends.name, part.number if several else None)]
    cuts: list[Instruction] = []
    while waiting:
        at = waiting.pop()
        computation = program.module.computations[at.computation]
        readers = program.flow.users(at.computation, at.name)
        if not readers or at.name == computation.root:
            return ""
        for reader in readers:
            if reader.opcode == "get-tuple-element" and at.element not in (None, reader.number):
                continue
            if reader.opcode in _FORMS:
                waiting.append(Array(at.computation, reader.name))
            elif reader.opcode in ("fusion", "fusion-start"):
                inner = program.module.computations[reader.called("calls")[0]]
                numbers = [i for i, operand in enumerate(reader.operands) if operand == at.name]
                waiting += [
                    Array(reader.called("calls")[0], p.name)
                    for p in inner.instructions.values()
                    if p.opcode == "parameter" and p.number in numbers
                ]
            elif (
                reader.opcode == "dynamic-slice"
                and reader.operands[0] == at.name
                and _is_of_device(program, at.computation, computation, reader)
            ):
                cuts.append(reader)
            else:
                return ""
    return str(arrays_of(cuts[0].type)[0]) if cuts else ""


def _is_of_device(program: CompiledProgram, name: str, computation: Computation, cut: Instruction) -> bool:
    """Whether the place of a slice follows from the position of the device."""
    waiting, seen = [Array(name, operand) for operand in cut.operands[1:]], set[Array]()
    while waiting and len(seen) < _MOST:
        array = waiting.pop()
        if array in seen:
            continue
        seen.add(array)
        source = program.flow.source(array)
        made = program.flow.made(source)
        if made is None:
            continue
        if made.opcode in ("partition-id", "replica-id"):
            return True
        waiting += [Array(source.computation, operand) for operand in made.operands]
    return False


# Compiled text: prints the rows of a compiled explanation.


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
