"""Lists the arrays that a device holds at its memory peak, with the names of reports."""

from __future__ import annotations

import dataclasses

from gshard.core.program import Block, Equation, Program, Value
from gshard.device.fusion_model import size
from gshard.device.memory import Memory
from gshard.naming.array_names import ArrayNames


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Arrays of one type and name that one line computes."""

    type: str  # the type of one device's part, such as ``f32[64,128]``
    name: str  # the argument whose part, cast or gradient they are, or the operation that computes them
    equation: Equation  # the equation that computes the first of them
    bytes: int  # the bytes of all of them
    count: int  # the number of arrays

    def __str__(self) -> str:
        many = f" x{self.count}" if self.count > 1 else ""
        return f"{self.type}{many} {self.name} at {self.equation.line}"


def held_at_peak(memory: Memory, block: Block, program: Program, names: ArrayNames | None = None) -> tuple[Held, ...]:
    """The arrays at the peak, largest first."""
    array_names = ArrayNames.of_devices(block, program, names)
    rows: dict[tuple[str, str, str], Held] = {}
    for v, e in memory.alive:
        name = array_names.array(v)
        row = Held(_type(v), name.text or e.name, e, size(v), 1)
        key = row.type, name.alike or e.name, e.line
        if key in rows:  # arrays of equal layers: keep the name that they share
            earlier = rows[key]
            row = Held(row.type, key[1], earlier.equation, earlier.bytes + row.bytes, earlier.count + 1)
        rows[key] = row
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes))


def _type(v: Value) -> str:
    return f"{v.dtype_name}[{','.join(map(str, v.shape))}]"
