"""Held: lists the arrays that a device holds at its memory peak, with the names of reports."""

from __future__ import annotations

import dataclasses

from gshard.core.program import Block, Equation, Program, Value
from gshard.device.fusion_model import size
from gshard.device.memory import Memory
from gshard.naming.array_names import ArrayNames


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Arrays of one type and name that one line makes.

    Attributes:
        type: one device's part, such as ``f32[64,128]``.
        name: the argument whose part, cast or gradient they are, or the operation that makes them.
        equation: makes the first of them.
        bytes: of all of them.
        count: how many there are.
    """

    type: str
    name: str
    equation: Equation
    bytes: int
    count: int

    def __str__(self) -> str:
        many = f" x{self.count}" if self.count > 1 else ""
        return f"{self.type}{many} {self.name} at {self.equation.line}"


def held_at_peak(memory: Memory, block: Block, program: Program, names: ArrayNames | None = None) -> tuple[Held, ...]:
    """What makes the peak, largest first.

    Args:
        memory: of a per-device program.
        block: that program.
        program: the program that it runs.
        names: of the arrays of ``program``, where they are known.
    """
    called = ArrayNames.of_devices(block, program, names)
    found: dict[tuple[str, str, str], Held] = {}
    for v, e in memory.alive:
        name = called.array(v)
        row = Held(_type(v), name.text or e.name, e, size(v), 1)
        key = row.type, name.alike or e.name, e.line
        if key in found:  # of equal layers: the name that they have in common
            before = found[key]
            row = Held(row.type, key[1], before.equation, before.bytes + row.bytes, before.count + 1)
        found[key] = row
    return tuple(sorted(found.values(), key=lambda row: -row.bytes))


def _type(v: Value) -> str:
    return f"{v.dtype_name}[{','.join(map(str, v.shape))}]"
