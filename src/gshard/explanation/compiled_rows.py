"""Compiled rows: what the collectives of a compiled program move, and what devices hold whole."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import format_bytes
from gshard.device.network import atoms_among
from gshard.explanation.compiled_program import CompiledArgument, CompiledProgram
from gshard.explanation.places import Place
from gshard.explanation.rows import Listed, Moved
from gshard.naming.argument_names import ArrayName, Path, common_name, equal_layers
from gshard.naming.array_names import GRADIENT, UPDATE
from gshard.xla.dataflow import Array
from gshard.xla.hlo_collectives import Sent, pairs_of
from gshard.xla.hlo_parser import ArrayType, Computation, Instruction, Origin, arrays_of, origin_of

# The arrays that the collectives of a compiled program move, each with its name, its line and its reason.

REDUCTIONS = frozenset(("all_reduce", "reduce_scatter"))
_MANY = 8  # devices of a group that are listed


def moved_by(program: CompiledProgram) -> tuple[Moved, ...]:
    """The arrays that collectives move, in the order of the program."""
    noted = [_where(program, sent, i) for sent, i in _numbered(program)]
    # With the operator inside, so that a scope with a number that holds no other scope may be a layer, too.
    paths = {(*origin.module.split("/"), origin.operation): None for origin, _ in noted if origin.module}
    folded = {path[:-1]: alike[:-1] for path, alike in equal_layers(paths, same_inside=False).items()}
    pairs = zip(_numbered(program), noted, strict=True)
    return tuple(_moved(program, sent, i, *where, folded) for (sent, i), where in pairs)


def _numbered(program: CompiledProgram) -> list[tuple[Sent, int]]:
    """The collectives with the numbers of the arrays that they move."""
    return [(sent, i) for sent in program.sent for i in range(max(1, len(sent.itself.operands)))]


def _moved(
    program: CompiledProgram, sent: Sent, i: int, origin: Origin, place: Place | None, folded: Mapping[Path, Path]
) -> Moved:
    computation, collective = program.module.computations[sent.inside], sent.collective
    operands = [computation.instructions[o] for o in sent.itself.operands if o in computation.instructions]
    types = [arrays_of(o.type) for o in operands] or [arrays_of(sent.itself.literal or sent.itself.type)]
    until = [0, *itertools.accumulate(sum(a.bytes for a in own) for own in types)]
    begin, end = (round(collective.total_bytes * n / until[-1]) if until[-1] else 0 for n in until[i : i + 2])
    operand, result = _operand(sent, i), _result(sent, i)
    path, why = tuple(origin.module.split("/")), _why(program, sent, origin, operand, result)
    return Moved(
        kind=collective.kind, axes=axes_text(program, sent), times=collective.executions, bytes=end - begin,
        shape=str(types[i][0] if types[i] else ArrayType("token", (), 0, False)),
        line="" if place is None else f"{place.path.rpartition('/')[2]}:{place.line}", cause=place,
        array=_name(program, sent, origin, operand, result),
        module=ArrayName(origin.module, "/".join(folded.get(path, path))), why=ArrayName(why, why),
        exact=collective.exact, source=sent, key=id(sent.itself),
    )  # fmt: skip


def _operand(sent: Sent, i: int) -> Array | None:
    return Array(sent.inside, sent.itself.operands[i]) if sent.itself.operands else None


def _result(sent: Sent, i: int) -> Array:
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


def _where(program: CompiledProgram, sent: Sent, i: int) -> tuple[Origin, Place | None]:
    """The operator for which an array is moved: as the collective notes, else what makes it, else what reads it."""
    notes, operand = _notes(program, sent, i), _operand(sent, i)
    made = None if operand is None else program.flow.made(program.flow.source(operand))
    notes += [made] if made is not None and made.opcode != "parameter" else []
    if not any(map(program.place_of, notes)):
        reader = next(program.flow.readers(_result(sent, i)), None)
        notes += [] if reader is None else [reader[1]]
    named = next((n for n in notes if "/" in n.op_name or n.op_name.startswith("jit(")), None)
    place = next(filter(None, map(program.place_of, notes)), None)
    return Origin() if named is None else origin_of(named.op_name), place


def _name(program: CompiledProgram, sent: Sent, origin: Origin, operand: Array | None, result: Array) -> ArrayName:
    numbers = () if operand is None else program.flow.arguments(operand)
    if numbers and max(numbers) < len(program.arguments):
        return common_name([program.arguments[n].short for n in numbers])
    if origin.is_backward or sent.collective.kind in REDUCTIONS or not program.updates:
        reach = program.flow.reach(result)
        changed = {program.updates[r] for r in reach.results if r in program.updates} | reach.beside
        known = sorted(n for n in changed if n < len(program.arguments))
        read = program.weights, program.differentiated
        weights = next(filter(None, ([n for n in known if n in numbers] for numbers in read)), known)
        if weights and (reach.results or origin.is_backward):
            before = GRADIENT if origin.is_backward else UPDATE
            short = common_name([program.arguments[n].short for n in weights])
            return ArrayName(before + short.text, before + short.alike)
        named = sorted(r for r in reach.results if r < len(program.results))
        if named and origin.is_backward:
            text = program.results[named[0]]
            return ArrayName(text, text)
    made = None if operand is None else program.flow.made(program.flow.source(operand))
    operation = (origin_of(made.op_name).operation if made is not None and made.opcode != "parameter" else "") or (
        origin.operation or (made.opcode if made is not None else sent.itself.opcode)
    )
    text = f"{operation}{_phase(origin)}"
    return ArrayName(text, text)


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


# Whole arrays: what every device of a compiled program holds whole, and what is gathered only to be cut again.

LARGE = 1 << 20  # bytes of an array that is worth a line
_SHARE = 0.01  # or of all arguments of a device: what is less than that is not worth one
_FORMS = frozenset(
    ("bitcast", "copy", "convert", "transpose", "reshape", "copy-start", "copy-done", "get-tuple-element")
)
_MOST = 200  # instructions that an index is followed back


def whole_arguments(program: CompiledProgram) -> list[CompiledArgument]:
    """The large arguments that every device holds whole, largest first."""
    least = max(LARGE, _SHARE * sum(a.local_bytes for a in program.arguments))
    found = [a for a in program.arguments if a.is_whole and a.local_bytes >= least]
    return sorted(found, key=lambda a: -a.local_bytes) if program.mesh.size > 1 else []


def regathered_lines(program: CompiledProgram, moved: Sequence[Moved]) -> tuple[str, ...]:
    """The gathers whose result each device keeps only in part, most bytes first."""
    lines = []
    for one, (sent, i) in sorted(zip(moved, _numbered(program), strict=True), key=lambda pair: -pair[0].bytes):
        if one.kind == "all_gather" and (kept := _kept(program, sent, i)):
            where = "  ".join(word for word in (one.module.text, one.line) if word)
            lines.append(f"{format_bytes(one.bytes)}  {one.array.text}  {one.shape} gathered, {kept} kept  {where}")
    return tuple(lines)


def _kept(program: CompiledProgram, sent: Sent, i: int) -> str:
    """What is cut from a gathered array, if everything that reads it cuts the device's own part from it."""
    if sent.made is not sent.itself:
        return ""
    waiting = [_result(sent, i)]
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


def whole_arguments_listed(rows: Sequence[CompiledArgument]) -> Listed:
    """Arguments that every device holds whole, those of equal layers in one line."""
    counts = Counter((row.short.alike, row.type, row.local_bytes) for row in rows)
    lines = tuple(
        f"{format_bytes(size * n)}  {name}{f'  x{n}' if n > 1 else ''}  {kind}"
        for (name, kind, size), n in counts.items()
    )
    total = format_bytes(sum(row.local_bytes for row in rows))
    return Listed("whole", f"arguments that every device holds whole, {total} on each", lines)
