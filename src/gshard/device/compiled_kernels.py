"""Compiled kernels: what a compiler makes one kernel of that ``device.fusion_model`` counts as several.

    softmax(x)        a kernel reads a row, takes its maximum and its sum, and writes the row: x is read once
    exp(x - m)        computed again by each kernel that reads it, if reading x and m again is less than storing it
    adam(w, m, v, g)  one kernel writes all results: w, m, v and g are read once
    x.sum(1), sin(x)  one kernel that reduces, and writes another result of what it reads

Kernels stay apart, so that each has its line and its share of the time. A buffer that never reaches memory, or that
another kernel of the group reads anyway, is ``spared``; what a kernel reads or writes for others is ``carried``. A
reduction whose row is split over devices is a kernel of its own, because the devices exchange its result: it spares
nothing then. So the last kernel of a group carries what all of them read and write.

The rules were read off programs that XLA compiled for H100 (``benchmarks/fusions.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from gshard.core.program import Constant, Value
from gshard.core.rule import REDUCE
from gshard.device.fusion_model import FUSED, REDUCTION, Kernel, Kernels, is_looked_up, readers_of, size
from gshard.device.machine_kinds import Compiler

# Kernels, or groups of them, between which one is looked for that may join: those that XLA makes one of are near.
_NEAR = 64


def as_compiled(program: Kernels, compiler: Compiler) -> Kernels:
    """The same kernels, with what the compiler spares."""
    if not (compiler.fused_row or compiler.fuses_elementwise):
        return program
    known = _Known(program)
    changed: dict[Kernel, Kernel] = {}
    taken: set[Kernel] = set()
    for group in _rows(known, compiler.fused_row):
        taken.update(group)
        _one_kernel(group, known, changed, spares_rows=True)
    if compiler.fuses_elementwise:
        for kernel in reversed(program.kernels):
            if kernel not in taken and _is_recomputed(kernel, known):
                _recompute(kernel, known, changed)
                taken.add(kernel)
        for group in _read_together(known, taken):
            _one_kernel(group, known, changed)
    kernels = []
    for kernel in program.kernels:
        made = changed.get(kernel, kernel)
        bodies = tuple(as_compiled(body, compiler) for body in kernel.bodies)
        kernels.append(dataclasses.replace(made, bodies=bodies) if bodies else made)
    return dataclasses.replace(program, kernels=tuple(kernels))


class _Known:
    """Who writes and reads each buffer of a block, and which of them outlive it."""

    def __init__(self, program: Kernels):
        self.kernels, self.home = program.kernels, program.home
        self.writer = {v: k for k in program.kernels for v in k.writes}
        self.readers = readers_of(program)
        self.kept = {program.home.get(v, v) for v in program.block.outputs if isinstance(v, Value)}
        self.place = {k: i for i, k in enumerate(program.kernels)}

    def buffer(self, x: Value | Constant) -> Value | None:
        """Where an operand lies."""
        return self.home.get(x, x) if isinstance(x, Value) else None

    def only_within(self, v: Value, group: Iterable[Kernel]) -> bool:
        """Whether nothing but the group reads a buffer."""
        return v not in self.kept and set(self.readers.get(v, ())) <= set(group)


def _elements(kernel: Kernel) -> int:
    return math.prod(kernel.writes[0].shape) if kernel.writes else 0


def _row(kernel: Kernel) -> int:
    """Elements of the rows that a kernel reduces; 0 if it does not reduce the last dimension alone."""
    e = kernel.equation
    if kernel.kind != REDUCTION or e.rule is None or len(kernel.writes) != 1:
        return 0
    reduced = [f for f, factor in enumerate(e.rule.factors) if factor.kind == REDUCE and factor.size > 1]
    last = e.rule.operands[0][-1:] if e.rule.operands else ()
    return e.rule.factors[reduced[0]].size if [list(dim) for dim in last] == [reduced] and len(reduced) == 1 else 0


def _rows(known: _Known, longest: int) -> list[tuple[Kernel, ...]]:
    """Groups of kernels that XLA makes one of: statistics of rows, each from the one before, and what they end in."""
    found, taken = [], set[Kernel]()
    for kernel in known.kernels:
        if kernel in taken or not 0 < _row(kernel) <= longest:
            continue
        grown = _grown(kernel, _row(kernel), known)
        before = [k for k in _producers(kernel, known) if known.only_within(k.writes[0], [k, *grown])]
        group = [*before, *grown]
        while group and not all(known.only_within(v, group) for k in group[:-1] for v in k.writes):
            group = group[:-1]
        if len(group) > 1 and not taken & set(group) and _reads_one_array(group):
            found.append(tuple(group))
            taken.update(group)
    return found


def _grown(first: Kernel, row: int, known: _Known) -> list[Kernel]:
    """The kernels that a statistic of rows is in one kernel with, as far as their order allows."""
    elements = row * _elements(first)
    group, own = [first], set(first.writes)
    after: set[Value] = set()  # what others make of the group's results
    since = set(first.writes)  # the last statistic, and what follows from it
    begin = known.place[first] + 1
    for kernel in known.kernels[begin : begin + _NEAR]:
        reads = set(kernel.reads)
        joins = bool(reads & since) and not reads & after
        if joins and kernel.kind == REDUCTION and _row(kernel) == row and _elements(kernel) * row == elements:
            since = set(kernel.writes)
        elif joins and kernel.kind == FUSED and len(kernel.writes) == 1 and _elements(kernel) == elements:
            since |= set(kernel.writes)
        else:
            if reads & (own | after):
                after |= set(kernel.writes)
            continue
        group.append(kernel)
        own |= set(kernel.writes)
    return group


def _producers(first: Kernel, known: _Known) -> list[Kernel]:
    """Elementwise kernels that the first statistic reads, such as a conversion."""
    writers = (known.writer.get(v) for v in first.reads)
    return [k for k in writers if k is not None and k.kind == FUSED and len(k.writes) == 1]


def _reads_one_array(group: Sequence[Kernel]) -> bool:
    """Whether all that a group reads besides one array is small: one operand fills the registers."""
    made = {v for k in group for v in k.writes}
    reads = {v for k in group for v in k.reads} - made
    elements = max(_elements(k) for k in group)
    return sum(math.prod(v.shape) >= elements for v in reads) <= 1


def _one_kernel(
    group: Sequence[Kernel], known: _Known, changed: dict[Kernel, Kernel], *, spares_rows: bool = False
) -> None:
    """Makes a group one kernel: the last one carries what all read and write."""
    *others, last = group
    made = {v for k in group for v in k.writes}
    reads: dict[Value, None] = {}
    for kernel in group:
        now = changed.get(kernel, kernel)
        reads.update(dict.fromkeys(v for v in (*now.reads, *now.carried) if v not in made and v not in now.spared))
    for kernel in others:
        spared = frozenset((*kernel.reads, *kernel.writes))
        changed[kernel] = dataclasses.replace(kernel, spared=spared, spares_rows=spares_rows)
    written = (v for k in others for v in k.writes if not known.only_within(v, group))
    changed[last] = dataclasses.replace(
        last,
        spared=frozenset(v for v in last.reads if v not in reads),
        carried=(*(v for v in reads if v not in last.reads), *written),
    )


def _is_recomputed(kernel: Kernel, known: _Known) -> bool:
    """Whether computing an elementwise result in each kernel that reads it moves fewer bytes than storing it."""
    if kernel.kind != FUSED or len(kernel.writes) != 1 or kernel.writes[0] in known.kept:
        return False
    (made,) = kernel.writes
    readers = known.readers.get(made, ())
    if readers and all(_looks_up(made, k, known) for k in readers):
        return True
    if len(readers) < 2 or not all(k.kind in (FUSED, REDUCTION) for k in readers):
        return False
    read = sum(map(size, kernel.reads))
    return len(readers) * read <= read + (1 + len(readers)) * size(made)


def _looks_up(v: Value, kernel: Kernel, known: _Known) -> bool:
    """Whether a kernel reads only some elements of a buffer, those that it finds by indices."""
    uses = [(e, i) for e in (kernel.equation, *kernel.fused) for i, x in enumerate(e.inputs) if known.buffer(x) is v]
    return bool(uses) and all(e.rule is not None and is_looked_up(e.rule, i) for e, i in uses)


def _recompute(kernel: Kernel, known: _Known, changed: dict[Kernel, Kernel]) -> None:
    now = changed.get(kernel, kernel)
    reads = [v for v in (*now.reads, *now.carried) if v not in now.spared]
    changed[kernel] = dataclasses.replace(now, spared=frozenset((*now.reads, *now.carried, *now.writes)), carried=())
    for reader in known.readers[kernel.writes[0]]:
        other = changed.get(reader, reader)
        # What a look-up computes of it needs as few elements as it finds.
        more = () if _looks_up(kernel.writes[0], reader, known) else (v for v in reads if v not in other.reads)
        carried = dict.fromkeys((*other.carried, *more))
        changed[reader] = dataclasses.replace(other, spared=other.spared | {kernel.writes[0]}, carried=tuple(carried))


class _Group:
    """Kernels that go through the same elements once, and what other kernels make of their results."""

    def __init__(self, kernel: Kernel):
        self.kernels = [kernel]
        self.elements, self.reduced = _space(kernel)
        self.reads, self.writes = set(kernel.reads), set(kernel.writes)
        self.after = set(kernel.writes) if self.reduced else set[Value]()  # a sum is known when all has been read

    def joins(self, other: _Group) -> bool:
        """Whether one kernel does the work of both: what one writes the other reads, or one reduces what both read."""
        if self.elements != other.elements or (self.reduced and other.reduced and self.reduced != other.reduced):
            return False
        if self.after & other.reads or other.after & self.reads:
            return False  # another kernel must run between them
        shared = other.reads & (self.writes | self.reads if self.reduced or other.reduced else self.writes)
        return any(math.prod(v.shape) >= self.elements for v in shared)

    def add(self, other: _Group) -> None:
        """Takes the kernels of another group."""
        self.kernels += other.kernels
        self.reads |= other.reads
        self.writes |= other.writes
        self.after |= other.after
        self.reduced = self.reduced or other.reduced


def _space(kernel: Kernel) -> tuple[int, tuple[int, ...]]:
    """Elements that a kernel goes through, and the dimensions that it reduces."""
    e = kernel.equation
    if kernel.kind != REDUCTION or e.rule is None or not e.rule.operands:
        return _elements(kernel), ()
    reduced = {f for f, factor in enumerate(e.rule.factors) if factor.kind == REDUCE}
    return max(math.prod(x.shape) for x in e.inputs), tuple(
        i for i, dim in enumerate(e.rule.operands[0]) if reduced & set(dim)
    )


def _read_together(known: _Known, taken: set[Kernel]) -> list[tuple[Kernel, ...]]:
    """Groups of elementwise kernels and reductions that XLA makes one of, which writes several results."""
    groups: list[_Group] = []  # those that may still grow
    whole: list[_Group] = []
    for kernel in known.kernels:
        own = None
        if kernel.kind in (FUSED, REDUCTION) and kernel not in taken and len(kernel.writes) == 1:
            own = _Group(kernel)
            for group in list(groups):
                if group.joins(own):
                    group.add(own)
                    own = group
                    groups.remove(group)
            groups.append(own)
            if len(groups) > _NEAR:
                whole.append(groups.pop(0))
        for group in groups:
            if group is not own and not (
                group.after.isdisjoint(kernel.reads) and group.writes.isdisjoint(kernel.reads)
            ):
                group.after.update(kernel.writes)
    ordered = (sorted(group.kernels, key=known.place.__getitem__) for group in (*whole, *groups))
    return [tuple(group) for group in ordered if len(group) > 1]
