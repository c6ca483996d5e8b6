"""Chooses the values that a program recomputes to fit into memory (GShard paper, section 5.1).

    program = rematerialise(spmd, 14 * 2**30, Machine.of("v3:8x8"))

While the peak exceeds the limit, gshard prices the recomputation of each value that is alive at the peak and read only
later. It drops the values with the least time for each byte. In a straight line of equations, it recomputes them behind
a barrier; a residual that one loop stacks for another, in that other loop; and a stack in a wider type than necessary
is widened after the loop, which costs nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from gshard.core.errors import GShardError
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import with_tables
from gshard.core.program import Block, Equation, Program, Value, format_bytes
from gshard.core.spmd import Recomputation, Recomputed, SpmdProgram
from gshard.device.cost import kernel_cost
from gshard.device.fusion_model import REGION, Kernel, Kernels, device_program, flops, kernels_of, size
from gshard.device.held import held_at_peak
from gshard.device.machine import Machine
from gshard.device.memory import Memory, memory_of
from gshard.language.region import with_edges
from gshard.remat.liveness import Liveness, liveness_of
from gshard.remat.loops import Stacked, stacked_over, without_stacking
from gshard.remat.low_precision_stacks import LowPrecision, low_precision_over, with_low_precision_stacks
from gshard.remat.replay import replayed
from gshard.remat.straight_line import Kept, kept_over, without_keeping

_Offer = Kept | Stacked | LowPrecision
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class MemoryLimitError(GShardError):
    """The program does not fit with any recomputation, or the limit is not a number of bytes.

    Attributes:
        needed: bytes that the compiler needs; 0 if the program was not compiled.
    """

    needed: int = 0


def bytes_of(limit: int | str) -> int:
    """A number of bytes.

    >>> bytes_of("14GiB") == 14 * 2**30, bytes_of(1000), bytes_of("1.5 MB")
    (True, 1000, 1500000)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(limit))
    if isinstance(limit, bool) or found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise MemoryLimitError(
            f"memory_limit={limit!r} is no number of bytes.", hint='Write bytes, or "14GiB", "512MiB", "16GB".'
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


@with_tables
def rematerialise(spmd: SpmdProgram, limit: int, machine: Machine, donated: Iterable[int] = ()) -> SpmdProgram:
    """Makes a per-device program fit into memory by computing some values twice."""
    before = device_program(spmd)
    lent = [len(spmd.program.captured) + i for i in donated]
    keeps_copies = machine.compiler.keeps_low_precision_copies
    first_peak = memory_of(before, lent, keeps_low_precision_copies=keeps_copies).peak
    flops_before = _flops(before)
    target = limit
    while True:
        search = _Search(before, target, machine, spmd.mesh, lent)
        try:
            block, reached = search.run()
        except _StuckError as error:
            raise _does_not_fit(error.memory, error.block, spmd.program, limit) from None
        if block is before.block:
            return spmd
        program = replayed(spmd, before, block)
        after = device_program(program)
        memory = memory_of(after, lent, keeps_low_precision_copies=keeps_copies)
        if memory.peak <= limit:
            extra_flops = max(0, _flops(after) - flops_before)
            report = Recomputed(limit, first_peak, memory.peak, flops_before, extra_flops, tuple(search.chosen))
            return dataclasses.replace(program, recomputed=report)
        target = limit - (memory.peak - reached)  # the difference is copies that replace barriers on CPU


class _StuckError(Exception):
    """The search finds no further value to drop."""

    def __init__(self, memory: Memory, block: Block):
        super().__init__()
        self.memory, self.block = memory, block


def _flops(kernels: Kernels) -> int:
    return sum(
        times * (flops(k.equation) + sum(map(flops, k.fused))) for k, times in kernels.walk() if k.kind != REGION
    )


class _Search:
    def __init__(self, program: Kernels, limit: int, machine: Machine, mesh: Mesh, donated: Sequence[int]):
        self.program, self.limit, self.machine, self.mesh, self.donated = program, limit, machine, mesh, donated
        self.names = itertools.count(1 + _largest(program.block))
        self.known: dict[Kernel, float] = {}
        self.refused: set[tuple[Value, ...]] = set()
        self.chosen: list[Recomputation] = []

    def run(self) -> tuple[Block, int]:
        """The block that fits, and its peak in bytes."""
        program = self.program
        memory = memory_of(
            program, self.donated, keeps_low_precision_copies=self.machine.compiler.keeps_low_precision_copies
        )
        while memory.peak > self.limit:
            step = self._step(program, memory)
            if step is None:
                raise _StuckError(memory, program.block)
            program, memory = step
        return program.block, memory.peak

    def _step(self, program: Kernels, memory: Memory) -> tuple[Kernels, Memory] | None:
        """Lowers the peak by values of one kind in one block; None if there are no such values."""
        offers = self._offers(program, memory)
        while offers:
            depth, liveness, batch = self._batch(offers, memory.peak - self.limit)
            while batch:
                block = self._without(liveness, memory.path[depth][1], batch)
                for (kernels, at), (below, _) in zip(
                    reversed(memory.path[:depth]), reversed(memory.path[1 : depth + 1]), strict=True
                ):
                    block = _with_body(kernels, kernels.kernels[at].equation, below.block, block)
                changed = kernels_of(block)
                after = memory_of(
                    changed, self.donated, keeps_low_precision_copies=self.machine.compiler.keeps_low_precision_copies
                )
                if _is_less(after, memory):
                    self.chosen += [_noted(item, liveness) for item in batch]
                    return changed, after
                if len(batch) == 1:
                    self.refused.add(_values(batch[0]))
                batch = batch[: len(batch) // 2]
            offers = [o for o in offers if _values(o[2]) not in self.refused]
        return None

    def _offers(self, program: Kernels, memory: Memory) -> list[tuple[int, Liveness, _Offer]]:
        """The values that need not be kept over the peak, those with the least time for each byte first."""
        offers: list[tuple[int, Liveness, _Offer]] = []
        results = frozenset(v for v in program.block.outputs if isinstance(v, Value))
        rounds = 1
        for depth, (kernels, at) in enumerate(memory.path):
            liveness = liveness_of(kernels)
            elsewhere = results if depth == 0 else frozenset()
            found: list[_Offer] = [
                *low_precision_over(liveness, at, elsewhere),
                *kept_over(liveness, at, self._seconds, elsewhere),
                *stacked_over(liveness, at, self._seconds, elsewhere),
            ]
            offers += [
                (depth, liveness, dataclasses.replace(item, seconds=item.seconds * rounds))
                for item in found
                if _values(item) not in self.refused
            ]
            rounds *= kernels.kernels[at].equation.trip_count
        excess = memory.peak - self.limit
        large = [o for o in offers if o[2].freed * 100 >= excess]  # small values only if there are no others
        return sorted(large or offers, key=lambda o: (o[2].seconds / o[2].freed, -o[2].freed))

    def _batch(self, offers: list[tuple[int, Liveness, _Offer]], excess: int) -> tuple[int, Liveness, list[_Offer]]:
        """The best offer, and the next best ones that fit to it, until enough is freed.

        A value and the values from which it is recomputed are never in one batch: dropping one changes the price of the
        other.
        """
        depth, liveness, best = offers[0]
        batch: list[_Offer] = []
        taken: set[Value] = set()
        needed: set[Value] = set()
        for at, _, item in offers:
            if at != depth or not _go_together(best, item) or not taken.isdisjoint(_values(item)):
                continue
            if isinstance(item, Kept) and (item.value in needed or not taken.isdisjoint(item.anchors)):
                continue
            if batch and item.seconds / item.freed > 2 * max(best.seconds / best.freed, 1e-18):
                break
            batch.append(item)
            taken.update(_values(item))
            needed |= item.anchors if isinstance(item, Kept) else frozenset()
            excess -= item.freed
            if excess <= 0:
                break
        return depth, liveness, batch

    def _without(self, liveness: Liveness, at: int, batch: Sequence[_Offer]) -> Block:
        values = [v for item in batch for v in _values(item)]
        first = batch[0]
        if isinstance(first, LowPrecision):
            return with_low_precision_stacks(liveness, dataclasses.replace(first, values=tuple(values)), self.names)
        if isinstance(first, Stacked):
            return without_stacking(liveness, dataclasses.replace(first, values=tuple(values)), self.names)
        return without_keeping(liveness, at, values, self.names)

    def _seconds(self, kernel: Kernel) -> float:
        if kernel not in self.known:
            if kernel.kind == REGION:
                inner = sum(self._seconds(k) for body in kernel.bodies for k in body.kernels)
                self.known[kernel] = kernel.equation.trip_count * inner
            else:
                self.known[kernel] = kernel_cost(kernel, 1, self.mesh, self.machine).seconds
        return self.known[kernel]


def _does_not_fit(memory: Memory, block: Block, program: Program, limit: int) -> MemoryLimitError:
    held = [f"{row} ({format_bytes(row.bytes)})" for row in held_at_peak(memory, block, program)[:5]]
    fixed = memory.arguments + memory.results - memory.shared
    return MemoryLimitError(
        f"the program needs {format_bytes(memory.peak)} on a device whatever is recomputed: "
        f"{format_bytes(memory.peak - limit)} more than memory_limit ({format_bytes(limit)}).",
        None,
        f"arguments and results {format_bytes(fixed)}, values inside {format_bytes(memory.temporaries)}"
        + (f": {'; '.join(held)}" if held else ""),
        "Split more (marks, a larger mesh), use a smaller batch, donate arguments, or allow more memory.",
    )


def _go_together(a: _Offer, b: _Offer) -> bool:
    """Whether one rewrite can apply both: values of one straight line, or stacks of the same loops."""
    if isinstance(a, Stacked) and isinstance(b, Stacked):
        return a.writer is b.writer and a.consumer is b.consumer
    if isinstance(a, LowPrecision) and isinstance(b, LowPrecision):
        return a.writer is b.writer
    return isinstance(a, Kept) and isinstance(b, Kept)


def _values(item: _Offer) -> tuple[Value, ...]:
    return (item.value,) if isinstance(item, Kept) else item.values


def _is_less(after: Memory, before: Memory) -> bool:
    """Whether the peak is lower, or equally high at fewer moments."""
    if after.peak != before.peak:
        return after.peak < before.peak
    return _at_peak(after) < _at_peak(before)


def _at_peak(memory: Memory) -> int:
    return sum(1 for m in memory.moments if m.bytes == memory.temporaries)


def _with_body(kernels: Kernels, region: Equation, old: Block, new: Block) -> Block:
    changed = with_edges(dataclasses.replace(region, blocks=tuple(new if b is old else b for b in region.blocks)))
    block = kernels.block
    return Block(block.inputs, tuple(changed if e is region else e for e in block.equations), block.outputs)


def _noted(item: _Offer, liveness: Liveness) -> Recomputation:
    values = _values(item)
    largest = max(values, key=size)
    producer = liveness.producer[largest]
    if not isinstance(item, Kept):
        stacked = item.writer.blocks[0].outputs[item.writer.outputs.index(largest)]
        producers = {v: e for e in item.writer.blocks[0].equations for v in e.outputs}
        if isinstance(stacked, Value) and stacked in producers:
            producer = producers[stacked]
    shape = f"{largest.dtype_name}[{','.join(map(str, largest.shape))}]"
    return Recomputation(producer.name, producer.line, shape, len(values), item.freed, item.seconds)


def _largest(block: Block) -> int:
    """The largest index of a value in a block and its bodies."""

    def values(block: Block) -> Iterator[Value]:
        yield from block.inputs
        for e in block.equations:
            yield from e.outputs
            for body in e.blocks:
                yield from values(body)

    return max((v.index for v in values(block)), default=0)
