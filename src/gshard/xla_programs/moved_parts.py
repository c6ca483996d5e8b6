"""Parts: the arrays that the collectives of a compiled program move, each with its name, its line and its reason.

The compiler combines collectives into one message; each of its arrays is a part with a name of its own. A part is
called after the argument that it is a copy or a slice of, or whose gradient it is, and else after the operator that
makes it. Its line and its module are those of the operator for which XLA's partitioner made the collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.mesh import Atoms, Mesh
from gshard.device.network import atoms_among
from gshard.naming.array_names import GRADIENT, UPDATE
from gshard.naming.short_names import ShortName, common_name
from gshard.xla.dataflow import Array
from gshard.xla.hlo_collectives import Sent, pairs_of
from gshard.xla.hlo_parser import Instruction
from gshard.xla.kernels import ArrayType, arrays_of
from gshard.xla.op_names import Origin, origin_of
from gshard.xla_programs.compiled_program import CompiledProgram

REDUCTIONS = frozenset(("all_reduce", "reduce_scatter"))
_MANY = 8  # devices of a group that are listed


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One array that a collective moves."""

    sent: Sent  # the collective
    number: int  # which of its arrays
    bytes: int  # that each device sends of it in one run
    type: ArrayType  # the operand on one device
    array: ShortName  # what it is called
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
) -> tuple[ShortName, bool]:
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
            return ShortName(before + short.text, before + short.alike), True
        named = sorted(r for r in reach.results if r < len(program.results))
        if named and origin.is_backward:
            text = program.results[named[0]]
            return ShortName(text, text), True
    made = None if operand is None else program.flow.made(program.flow.source(operand))
    operation = (origin_of(made.op_name).operation if made is not None and made.opcode != "parameter" else "") or (
        origin.operation or (made.opcode if made is not None else sent.itself.opcode)
    )
    text = f"{operation}{_phase(origin)}"
    return ShortName(text, text), False


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
