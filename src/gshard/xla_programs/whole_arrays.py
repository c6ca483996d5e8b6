"""Whole arrays: what every device of a compiled program holds whole, and what is gathered only to be cut again.

XLA replicates an array that no sharding splits, and it gathers one that it cannot bring from one sharding to another in
a better way (it warns of an "involuntary full rematerialization"). Both cost the most, and both are silent in a trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.xla.dataflow import Array
from gshard.xla.hlo_parser import Computation, Instruction
from gshard.xla.kernels import arrays_of
from gshard.xla_programs.compiled_program import CompiledArgument, CompiledProgram
from gshard.xla_programs.moved_parts import Part

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
