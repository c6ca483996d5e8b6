"""Reads which computation overlaps with the collectives of a compiled TPU program.

A computation's instructions stand in the order in which they run. Between the start of an asynchronous collective and
its end others run; one that does not come in two halves stops everything. Some all-gathers become a chain of fusions
that carry it on while they multiply.

    >>> schedule("HloModule empty")
    ()
"""

from __future__ import annotations

import dataclasses
import re

from gshard.xla.hlo_collectives import computations_run, sent_in
from gshard.xla.hlo_parser import Computation, Instruction, Module, read_module, trip_count


@dataclasses.dataclass(frozen=True, slots=True)
class Scheduled:
    """One collective of a compiled program.

    Attributes:
        kind: as of ``hlo_collectives.CompiledCollective``.
        sent: bytes that each device sends in one execution.
        times: how often it runs in one call.
        asynchronous: whether it comes in two halves.
        beside: cycles of what runs between them, by the compiler's estimate, in one execution.
        products: how many of the kernels between them multiply.
        group: the devices that device 0 runs it with; none for permutations.
    """

    kind: str
    sent: int
    times: int
    asynchronous: bool
    beside: int = 0
    products: int = 0
    group: tuple[int, ...] = ()

    @property
    def total_sent(self) -> int:
        """Bytes in one call."""
        return self.sent * self.times


def schedule(text: str) -> tuple[Scheduled, ...]:
    """The collectives of ``compiled.as_text()``, in the order in which they end."""
    module = read_module(text)
    return tuple(found for name, times, _ in computations_run(module) for found in _of_computation(module, name, times))


def _of_computation(module: Module, name: str, times: int) -> list[Scheduled]:
    computation = module.computations[name]
    order = {made.name: i for i, made in enumerate(computation.instructions.values())}
    cycles = [cycles_of(module, computation, made) for made in computation.instructions.values()]
    products = [_multiplies(module, made) for made in computation.instructions.values()]
    rows = []
    for sent in sent_in(module, name):
        read, start, end = sent, order[sent.made.name], order[sent.ends.name]
        # A fusion that carries a collective on computes besides, the last one too; what only waits for it does not.
        until = end if sent.ends.opcode.endswith("-done") else end + 1
        beside = range(start + 1, until) if sent.is_asynchronous else range(0)
        found = Scheduled(
            read.kind, read.bytes_moved, times, sent.is_asynchronous, sum(cycles[i] for i in beside),
            sum(products[i] for i in beside), read.group,
        )  # fmt: skip
        rows.append((end, found))
    return [found for _, found in sorted(rows, key=lambda row: row[0])]


def _multiplies(module: Module, made: Instruction) -> bool:
    names = made.called("calls") if made.opcode == "fusion" else ()
    inner = [x.opcode for name in names for x in module.computations[name].instructions.values()]
    return bool({"convolution", "dot"} & {made.opcode, *inner})


# Cycles: reads the TPU compiler's own estimate of a program's time.

_NOTE = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(program: str | Module) -> int:
    """The sum over a compiled program; 0 where the compiler notes nothing. Of branches the longer counts."""
    module = read_module(program) if isinstance(program, str) else program
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
