"""Cycles: reads the TPU compiler's own estimate of a program's time.

libtpu writes its estimate on each instruction that runs by itself; loops count by their number of rounds.

    >>> estimated_cycles("HloModule empty")
    0
"""

from __future__ import annotations

import re

from gshard.xla.hlo_parser import Computation, Instruction, Module, read_module, trip_count

_NOTE = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(text: str) -> int:
    """The sum over ``compiled.as_text()``; 0 where the compiler notes nothing. Of branches the longer counts."""
    module = read_module(text)
    return _of(module, module.computations[module.entry]) if module.entry else 0


def _of(module: Module, computation: Computation) -> int:
    return sum(cycles_of(module, computation, made) for made in computation.instructions.values())


def cycles_of(module: Module, computation: Computation, made: Instruction) -> int:
    """The estimate of one instruction of a computation, and of what it calls."""
    inner = [_of(module, module.computations[name]) for name in made.bodies]
    if made.opcode == "while":
        return sum(inner) * (trip_count(module, computation, made) or 1)
    if inner:
        return max(inner)
    note = _NOTE.search(made.attributes)
    return int(note[1]) if note else 0
