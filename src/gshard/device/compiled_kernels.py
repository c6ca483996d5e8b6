"""Models the kernels that a compiler merges, and that ``device.fusion_model`` counts separately.

    softmax(x)        a kernel reads a row, takes its maximum and its sum, and writes the row: x is read once
    exp(x - m)        computed again by each kernel that reads it, if reading x and m again is less than storing it
    adam(w, m, v, g)  one kernel writes all results: w, m, v and g are read once
    x.sum(1), sin(x)  one kernel that reduces, and writes another result of what it reads

Kernels stay separate, so that each has its line and its share of the time. A buffer that never reaches memory, or that
another kernel of the group reads anyway, is ``spared``. A buffer that a kernel reads or writes for others is
``carried``. A reduction whose row is split over devices is a kernel of its own, because the devices exchange its
result, and spares nothing. So the last kernel of a group carries the buffers that the whole group reads and writes.

The rules were read off programs that XLA compiled for H100 (``benchmarks/fusions.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from gshard.core.program import Constant, Value
from gshard.core.rule import REDUCE
from gshard.device.fusion_model import FUSED, REDUCTION, Kernel, Kernels, looks_up, readers_of, size
from gshard.device.machine_kinds import Compiler

# The number of kernels, or groups of them, in which a partner is searched: merged kernels are near each other.
_NEAR = 64


def as_compiled(program: Kernels, compiler: Compiler) -> Kernels:
    """The kernels, with the buffers that the compiler spares."""
    if not (compiler.fused_row or compiler.fuses_elementwise):
        return program
    buffers = _Buffers(program)
    changed: dict[Kernel, Kernel] = {}
    merged: set[Kernel] = set()
    for group in _rows(buffers, compiler.fused_row):
        merged.update(group)
        _merge(group, buffers, changed, spares_rows=True)
    if compiler.fuses_elementwise:
        for kernel in reversed(program.kernels):
            if kernel not in merged and _is_recomputed(kernel, buffers):
                _recompute(kernel, buffers, changed)
                merged.add(kernel)
        for group in _read_together(buffers, merged):
            _merge(group, buffers, changed)
    kernels = []
    for kernel in program.kernels:
        compiled = changed.get(kernel, kernel)
        bodies = tuple(as_compiled(body, compiler) for body in kernel.bodies)
        kernels.append(dataclasses.replace(compiled, bodies=bodies) if bodies else compiled)
    return dataclasses.replace(program, kernels=tuple(kernels))


class _Buffers:
    """The writers and readers of each buffer of a block, and the buffers that outlive it."""

    def __init__(self, program: Kernels):
        self.kernels, self.home = program.kernels, program.home
        self.writer = {v: k for k in program.kernels for v in k.writes}
        self.readers = readers_of(program)
        self.kept = program.results
        self.place = {k: i for i, k in enumerate(program.kernels)}

    def buffer(self, x: Value | Constant) -> Value | None:
        """The buffer of an operand; None for a constant."""
        return self.home.get(x, x) if isinstance(x, Value) else None

    def only_within(self, v: Value, group: Iterable[Kernel]) -> bool:
        """Whether only the group reads a buffer."""
        return v not in self.kept and set(self.readers.get(v, ())) <= set(group)


def _elements(kernel: Kernel) -> int:
    return math.prod(kernel.writes[0].shape) if kernel.writes else 0


def _row(kernel: Kernel) -> int:
    """The length of the rows that a kernel reduces; 0 if it does not reduce the last dimension alone."""
    e = kernel.equation
    if kernel.kind != REDUCTION or e.rule is None or len(kernel.writes) != 1:
        return 0
    reduced = [f for f, factor in enumerate(e.rule.factors) if factor.kind == REDUCE and factor.size > 1]
    last = e.rule.operands[0][-1:] if e.rule.operands else ()
    return e.rule.factors[reduced[0]].size if [list(dim) for dim in last] == [reduced] and len(reduced) == 1 else 0


def _rows(buffers: _Buffers, longest: int) -> list[tuple[Kernel, ...]]:
    """Groups of kernels that XLA merges: statistics of rows, each computed from the one before, and their readers."""
    groups, merged = [], set[Kernel]()
    for kernel in buffers.kernels:
        if kernel in merged or not 0 < _row(kernel) <= longest:
            continue
        following = _following(kernel, _row(kernel), buffers)
        preceding = [k for k in _producers(kernel, buffers) if buffers.only_within(k.writes[0], [k, *following])]
        group = [*preceding, *following]
        while group and not all(buffers.only_within(v, group) for k in group[:-1] for v in k.writes):
            group = group[:-1]
        if len(group) > 1 and not merged & set(group) and _reads_one_array(group):
            groups.append(tuple(group))
            merged.update(group)
    return groups


def _following(first: Kernel, row: int, buffers: _Buffers) -> list[Kernel]:
    """The kernels that are merged with a statistic of rows, as far as their order allows."""
    elements = row * _elements(first)
    group, written = [first], set(first.writes)
    after: set[Value] = set()  # results of other kernels that depend on the group
    since = set(first.writes)  # the last statistic, and values computed from it
    start = buffers.place[first] + 1
    for kernel in buffers.kernels[start : start + _NEAR]:
        reads = set(kernel.reads)
        joins = bool(reads & since) and not reads & after
        if joins and kernel.kind == REDUCTION and _row(kernel) == row and _elements(kernel) * row == elements:
            since = set(kernel.writes)
        elif joins and kernel.kind == FUSED and len(kernel.writes) == 1 and _elements(kernel) == elements:
            since |= set(kernel.writes)
        else:
            if reads & (written | after):
                after |= set(kernel.writes)
            continue
        group.append(kernel)
        written |= set(kernel.writes)
    return group


def _producers(first: Kernel, buffers: _Buffers) -> list[Kernel]:
    """Elementwise kernels whose results the first statistic reads, such as a conversion."""
    writers = (buffers.writer.get(v) for v in first.reads)
    return [k for k in writers if k is not None and k.kind == FUSED and len(k.writes) == 1]


def _reads_one_array(group: Sequence[Kernel]) -> bool:
    """Whether a group reads at most one large array: one operand fills the registers."""
    written = {v for k in group for v in k.writes}
    reads = {v for k in group for v in k.reads} - written
    elements = max(_elements(k) for k in group)
    return sum(math.prod(v.shape) >= elements for v in reads) <= 1


def _merge(
    group: Sequence[Kernel], buffers: _Buffers, changed: dict[Kernel, Kernel], *, spares_rows: bool = False
) -> None:
    """Merges a group: its last kernel carries the buffers that the group reads and writes."""
    *others, last = group
    results = {v for k in group for v in k.writes}
    reads: dict[Value, None] = {}
    for kernel in group:
        compiled = changed.get(kernel, kernel)
        inputs = (v for v in (*compiled.reads, *compiled.carried) if v not in results and v not in compiled.spared)
        reads.update(dict.fromkeys(inputs))
    for kernel in others:
        spared = frozenset((*kernel.reads, *kernel.writes))
        changed[kernel] = dataclasses.replace(kernel, spared=spared, spares_rows=spares_rows)
    written = (v for k in others for v in k.writes if not buffers.only_within(v, group))
    changed[last] = dataclasses.replace(
        last,
        spared=frozenset(v for v in last.reads if v not in reads),
        carried=(*(v for v in reads if v not in last.reads), *written),
    )


def _is_recomputed(kernel: Kernel, buffers: _Buffers) -> bool:
    """Whether it moves fewer bytes to compute an elementwise result in each reader than to store it."""
    if kernel.kind != FUSED or len(kernel.writes) != 1 or kernel.writes[0] in buffers.kept:
        return False
    (result,) = kernel.writes
    readers = buffers.readers.get(result, ())
    if readers and all(looks_up(k, result, buffers.home) for k in readers):
        return True
    if len(readers) < 2 or not all(k.kind in (FUSED, REDUCTION) for k in readers):
        return False
    read = sum(map(size, kernel.reads))
    return len(readers) * read <= read + (1 + len(readers)) * size(result)


def _recompute(kernel: Kernel, buffers: _Buffers, changed: dict[Kernel, Kernel]) -> None:
    compiled = changed.get(kernel, kernel)
    reads = [v for v in (*compiled.reads, *compiled.carried) if v not in compiled.spared]
    changed[kernel] = dataclasses.replace(
        compiled, spared=frozenset((*compiled.reads, *compiled.carried, *compiled.writes)), carried=()
    )
    for reader in buffers.readers[kernel.writes[0]]:
        other = changed.get(reader, reader)
        # A look-up computes only the elements that it finds.
        new_reads = (
            () if looks_up(reader, kernel.writes[0], buffers.home) else (v for v in reads if v not in other.reads)
        )
        carried = dict.fromkeys((*other.carried, *new_reads))
        changed[reader] = dataclasses.replace(other, spared=other.spared | {kernel.writes[0]}, carried=tuple(carried))


class _Group:
    """Kernels that iterate over the same elements once, and the results of other kernels that depend on them."""

    def __init__(self, kernel: Kernel):
        self.kernels = [kernel]
        self.elements, self.reduced = _space(kernel)
        self.reads, self.writes = set(kernel.reads), set(kernel.writes)
        self.after = set(kernel.writes) if self.reduced else set[Value]()  # a sum is complete after all reads

    def joins(self, other: _Group) -> bool:
        """Whether one kernel can do the work of both: one reads a result of the other, or reduces a shared array."""
        if self.elements != other.elements or (self.reduced and other.reduced and self.reduced != other.reduced):
            return False
        if self.after & other.reads or other.after & self.reads:
            return False  # another kernel must run in between
        shared = other.reads & (self.writes | self.reads if self.reduced or other.reduced else self.writes)
        return any(math.prod(v.shape) >= self.elements for v in shared)

    def add(self, other: _Group) -> None:
        """Adds the kernels of another group."""
        self.kernels += other.kernels
        self.reads |= other.reads
        self.writes |= other.writes
        self.after |= other.after
        self.reduced = self.reduced or other.reduced


def _space(kernel: Kernel) -> tuple[int, tuple[int, ...]]:
    """The number of elements over which a kernel iterates, and the dimensions that it reduces."""
    e = kernel.equation
    if kernel.kind != REDUCTION or e.rule is None or not e.rule.operands:
        return _elements(kernel), ()
    reduced = {f for f, factor in enumerate(e.rule.factors) if factor.kind == REDUCE}
    return max(math.prod(x.shape) for x in e.inputs), tuple(
        i for i, dim in enumerate(e.rule.operands[0]) if reduced & set(dim)
    )


def _read_together(buffers: _Buffers, merged: set[Kernel]) -> list[tuple[Kernel, ...]]:
    """Groups of elementwise kernels and reductions that XLA merges into one kernel with several results."""
    groups: list[_Group] = []  # groups that may still grow
    complete: list[_Group] = []
    for kernel in buffers.kernels:
        own_group = None
        if kernel.kind in (FUSED, REDUCTION) and kernel not in merged and len(kernel.writes) == 1:
            own_group = _Group(kernel)
            for group in list(groups):
                if group.joins(own_group):
                    group.add(own_group)
                    own_group = group
                    groups.remove(group)
            groups.append(own_group)
            if len(groups) > _NEAR:
                complete.append(groups.pop(0))
        for group in groups:
            if group is not own_group and not (
                group.after.isdisjoint(kernel.reads) and group.writes.isdisjoint(kernel.reads)
            ):
                group.after.update(kernel.writes)
    ordered = (sorted(group.kernels, key=buffers.place.__getitem__) for group in (*complete, *groups))
    return [tuple(group) for group in ordered if len(group) > 1]
