"""Compiled rows: what the collectives of a compiled program move, and what devices hold whole."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from gshard.core.errors import counted
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import format_bytes
from gshard.device.network import atoms_among
from gshard.explanation.compiled_program import CompiledArgument, CompiledProgram
from gshard.explanation.places import Place
from gshard.explanation.rows import Listed, Moved
from gshard.naming.argument_names import ArrayName, common_name, equal_modules, module_of
from gshard.naming.array_names import GRADIENT, UPDATE
from gshard.xla.dataflow import Array
from gshard.xla.hlo_collectives import CompiledCollective, pairs_of
from gshard.xla.hlo_parser import ArrayType, Instruction, Origin, arrays_of, origin_of, type_bytes

# The arrays that the collectives of a compiled program move, each with its name, its line and its reason.

REDUCTIONS = frozenset(("all_reduce", "reduce_scatter"))


def moved_by(program: CompiledProgram) -> tuple[Moved, ...]:
    """The arrays that collectives move, in the order of the program."""
    parts = [_Part(program, sent, i, type_) for sent in program.sent for i, type_ in sent.arrays]
    folded = equal_modules((part.origin.module, part.origin.operation) for part in parts)
    return tuple(_moved(part, folded) for part in parts)


@dataclasses.dataclass(frozen=True)
class _Part:
    """One array that a collective moves."""

    program: CompiledProgram
    sent: CompiledCollective
    number: int
    type: str

    @property
    def operand(self) -> Array | None:
        """The array before it is moved."""
        operands = self.sent.itself.operands
        return Array(self.sent.inside, operands[self.number]) if operands else None

    @property
    def result(self) -> Array:
        """What it becomes."""
        sent, element = self.sent, self.number if len(self.sent.itself.operands) > 1 else None
        if sent.made is sent.itself:
            return Array(sent.computation, sent.ends.name, element)
        if sent.is_asynchronous:
            return Array(sent.computation, sent.ends.name)
        return Array(sent.inside, sent.itself.name, element)

    @functools.cached_property
    def made(self) -> Instruction | None:
        """What computes the operand; None for an argument."""
        made = None if self.operand is None else self.program.flow.made(self.program.flow.source(self.operand))
        return None if made is None or made.opcode == "parameter" else made

    @functools.cached_property
    def reader(self) -> tuple[str, Instruction] | None:
        """What computes with the result first, with its computation."""
        return next(self.program.flow.readers(self.result), None)

    @functools.cached_property
    def _notes(self) -> list[Instruction]:
        """The instructions whose metadata tell of it: those of the collective, else what makes it, else what reads it.

        Of a combined collective first the instruction that takes its element.
        """
        sent, users = self.sent, self.program.flow.users(self.sent.computation, self.sent.ends.name)
        notes = [made for made in users if made.opcode == "get-tuple-element" and made.number == self.result.element]
        notes += [sent.itself, sent.ends, sent.made, *([] if self.made is None else [self.made])]
        if not any(map(self.program.place_of, notes)) and self.reader is not None:
            notes.append(self.reader[1])
        return notes

    @functools.cached_property
    def origin(self) -> Origin:
        """The operator for which it is moved."""
        names = (made.op_name for made in self._notes)
        return origin_of(next((name for name in names if "/" in name or name.startswith("jit(")), ""))

    @property
    def place(self) -> Place | None:
        """The user's line of that operator."""
        return next(filter(None, map(self.program.place_of, self._notes)), None)

    @property
    def name(self) -> ArrayName:
        """What it is called: a weight by its path, or ``gradient of`` one; empty for another array."""
        program, origin, flow = self.program, self.origin, self.program.flow
        numbers = () if self.operand is None else flow.arguments(self.operand)
        if numbers and max(numbers) < len(program.arguments):
            return common_name([program.arguments[n].short for n in numbers])
        if origin.is_backward or self.sent.kind in REDUCTIONS or not program.updates:
            reach = flow.reach(self.result)
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
                return ArrayName(program.results[named[0]], program.results[named[0]])
        return ArrayName()

    @property
    def operation(self) -> str:
        """The operation that makes it."""
        made = self.sent.itself if self.made is None else self.made
        operation = "" if self.made is None else origin_of(made.op_name).operation
        return (operation or self.origin.operation or made.opcode) + _phase(self.origin)

    @property
    def beside(self) -> Iterator[ArrayName]:
        """The arguments that are operands of what makes a reduced array, or of what reads another one."""
        program, flow, at = self.program, self.program.flow, self.reader
        if self.sent.kind in REDUCTIONS and self.operand is not None and self.made is not None:
            at = flow.source(self.operand).computation, self.made
        numbers = [flow.arguments(Array(at[0], operand)) for operand in at[1].operands] if at is not None else []
        return (program.arguments[n].short for some in numbers for n in some if n < len(program.arguments))

    @property
    def why(self) -> str:
        """What needs it moved."""
        operation = self.origin.operation
        if self.sent.kind in REDUCTIONS:
            own = "" if self.made is None else origin_of(self.made.op_name).operation
            return f"result of {own or operation or 'an operator'}{_phase(self.origin)}"
        if self.reader is None or (self.reader[1].opcode == "tuple" and self.reader[0] == self.program.module.entry):
            return "a result of the program" + _phase(self.origin)
        reader = self.reader[1]
        return f"operand of {origin_of(reader.op_name).operation or operation or reader.opcode}{_phase(self.origin)}"


def _moved(part: _Part, folded: Mapping[str, str]) -> Moved:
    program, sent, place, why, scopes = part.program, part.sent, part.place, part.why, part.origin.module
    name, module = part.name, ArrayName(scopes, folded.get(scopes, scopes))
    if not name.text:
        name = ArrayName(part.operation, part.operation)
        module = module_of(module, part.beside)
    i = [number for number, _ in sent.arrays].index(part.number)
    until = [0, *itertools.accumulate(type_bytes(text) for _, text in sent.arrays)]
    begin, end = (round(sent.total_bytes * n / until[-1]) if until[-1] else 0 for n in until[i : i + 2])
    moved = arrays_of(part.type)
    return Moved(
        kind=sent.kind, axes=axes_text(program, sent), times=sent.executions, bytes=end - begin,
        shape=str(moved[0] if moved else ArrayType("token", (), 0, False)),
        line="" if place is None else place.text, cause=place, array=name, module=module, why=ArrayName(why, why),
        exact=sent.exact, source=sent, key=sent.key,
    )  # fmt: skip


def _phase(origin: Origin) -> str:
    """In which phase of a training step an operator runs, as the end of its name."""
    if origin.is_recomputed:
        return ", recomputed"
    return ", backward" if origin.is_backward else ""


def atoms_of(program: CompiledProgram, sent: CompiledCollective) -> Atoms | None:
    """The atoms of the mesh that a collective runs over; None if its groups are along no axes."""
    mesh = program.mesh
    if sent.kind == "collective_permute":
        return atoms_apart(mesh, pairs_of(sent.itself))
    return atoms_among(mesh, sent.groups)


def atoms_apart(mesh: Mesh, pairs: Sequence[tuple[int, int]]) -> Atoms:
    """The atoms along which the ends of some pair are apart."""
    digits = np.unravel_index(np.asarray(pairs, int).reshape(-1, 2), (1, *mesh.atom_sizes.values()))[1:]
    return tuple(a for a, ends in zip(mesh.atom_sizes, digits, strict=True) if (ends[:, 0] != ends[:, 1]).any())


def axes_text(program: CompiledProgram, sent: CompiledCollective) -> str:
    """What a collective runs over, as text: axes of the mesh, or the group of device 0."""
    atoms = atoms_of(program, sent)
    if atoms is not None:
        return program.mesh.format_atoms(atoms)
    group = sent.group
    listed = ",".join(map(str, group[:8])) + (",…" if len(group) > 8 else "")
    return f"{{{listed}}}"


# Lists: how collectives of a program for CPU are counted, and what every device holds whole.


def counted_listed(program: CompiledProgram, instead: Sequence[str]) -> Listed:
    """How collectives are counted that are not counted as they are in a program for CPU, and further lines."""
    here = {id(one.itself): one for one in program.sent_here}
    narrow = sum(one.executions for one in program.sent if not {*one.arrays} <= {*here[id(one.itself)].arrays})
    cut = sum(one.executions for one in program.sent if one.kind != here[id(one.itself)].kind)
    before, after = (
        sum(one.executions * len(one.arrays) for one in all_) for all_ in (program.sent_here, program.sent)
    )
    if not (narrow or cut or before - after or instead):
        return Listed("counted", "", ())
    lines = [
        f"{counted(narrow, 'collective')} in the program's narrower dtype, which XLA for CPU widens" if narrow else "",
        f"{counted(cut, 'all-reduce')} as reduce_scatter: each device reads a slice of its own" if cut else "",
        f"{counted(before - after, 'all-reduce')} left out: sums that are only added" if before - after else "",
        f"XLA for CPU itself sends {format_bytes(sum(one.total_bytes for one in program.sent_here))}",
    ]
    return Listed("counted", "compiled for CPU, counted as XLA sends it on GPUs", (*filter(None, lines), *instead))


def whole_arguments(program: CompiledProgram) -> list[CompiledArgument]:
    """The arguments that every device holds whole, of a MiB and of a hundredth of all or more, largest first."""
    least = max(1 << 20, 0.01 * sum(a.local_bytes for a in program.arguments))
    found = [a for a in program.arguments if a.is_whole and a.local_bytes >= least]
    return sorted(found, key=lambda a: -a.local_bytes) if program.mesh.size > 1 else []


def whole_arguments_listed(rows: Sequence[CompiledArgument]) -> Listed:
    """Arguments that every device holds whole, those of equal layers in one line."""
    counts = Counter((row.short.alike, row.type, row.local_bytes) for row in rows)
    lines = tuple(
        f"{format_bytes(size * n)}  {name}{f'  x{n}' if n > 1 else ''}  {kind}"
        for (name, kind, size), n in counts.items()
    )
    total = format_bytes(sum(row.local_bytes for row in rows))
    return Listed("whole", f"arguments that every device holds whole, {total} on each", lines)
