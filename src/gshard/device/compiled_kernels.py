"""Models what a compiler does with kernels and collectives: it merges, copies, stacks and combines them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gshard.comm.collectives import KINDS
from gshard.comm.steps import is_strided, is_turned
from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Constant, Value, short_dtype
from gshard.core.rule import REDUCE
from gshard.device.fusion_model import (
    COLLECTIVE,
    FUSED,
    OPERATOR,
    PRODUCT,
    REDUCTION,
    Kernel,
    Kernels,
    StackSlice,
    is_update,
    looks_up,
    readers_of,
)
from gshard.device.machine import Compiler

# The number of kernels, or groups of them, in which a partner is searched: merged kernels are near each other.
_NEAR = 64


def as_compiled(program: Kernels, compiler: Compiler) -> Kernels:
    """The kernels, with the buffers that the compiler spares, arrays that it copies, and messages that it joins."""
    changes: dict[Kernel, dict[str, Any]] = {}
    _note_stacks(program, compiler, changes)
    _note_layouts(program, compiler, changes)
    _note_messages(program, compiler, changes)
    return _changed(program, compiler, changes)


def _changed(program: Kernels, compiler: Compiler, changes: Mapping[Kernel, dict[str, Any]]) -> Kernels:
    merged = _merged(program, compiler)
    kernels = []
    for kernel in program.kernels:
        bodies = tuple(_changed(body, compiler, changes) for body in kernel.bodies)
        compiled = merged.get(kernel, kernel)
        kernels.append(dataclasses.replace(compiled, bodies=bodies, **changes.get(kernel, {})))
    return dataclasses.replace(program, kernels=tuple(kernels))


def _merged(program: Kernels, compiler: Compiler) -> dict[Kernel, Kernel]:
    """The kernels of a block that share buffers with others, by the kernels as they were."""
    buffers = _Buffers(program)
    changed: dict[Kernel, Kernel] = {}
    merged: set[Kernel] = set()
    for group in _rows(buffers, compiler.fused_row):
        merged.update(group)
        _merge(group, group[-1], buffers, changed, spares_rows=True)
    if compiler.fuses_epilogues:
        _merge_epilogues(buffers, changed)
    if compiler.fuses_elementwise:
        for kernel in reversed(program.kernels):
            if kernel not in merged and _is_recomputed(kernel, buffers):
                _recompute(kernel, buffers, changed)
                merged.add(kernel)
        for group in _read_together(buffers, merged):
            _merge(group, group[-1], buffers, changed)
    return changed


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

    def only_reader(self, kernel: Kernel) -> Kernel | None:
        """The only reader of the only result of a kernel, if there is one."""
        readers = self.readers.get(kernel.writes[0], []) if len(kernel.writes) == 1 else []
        return readers[0] if len(readers) == 1 and kernel.writes[0] not in self.kept else None

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
    group: Sequence[Kernel], carrier: Kernel, buffers: _Buffers, changed: dict[Kernel, Kernel], *,
    spares_rows: bool = False,
) -> None:  # fmt: skip
    """Merges a group: one of its kernels carries the buffers that the group reads and writes."""
    others = [kernel for kernel in group if kernel is not carrier]
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
    inside = (v for v in carrier.writes if carrier is not group[-1] and buffers.only_within(v, group))
    changed[carrier] = dataclasses.replace(
        carrier,
        spared=frozenset((*(v for v in carrier.reads if v not in reads), *inside)),
        carried=(*(v for v in reads if v not in carrier.reads), *written),
        spares_rows=spares_rows and carrier is not group[-1],
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
    read = sum(v.bytes for v in kernel.reads)
    return len(readers) * read <= read + (1 + len(readers)) * result.bytes


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


# Finds epilogues: elementwise work on the result of a product that the compiler fuses into the product.


def _merge_epilogues(buffers: _Buffers, changed: dict[Kernel, Kernel]) -> None:
    """Merges products with the elementwise kernels after them, and with updates that write their results elsewhere."""
    for product in buffers.kernels:
        group = [product]
        while product.kind == PRODUCT and (reader := buffers.only_reader(group[-1])) is not None:
            if reader in changed:  # a sum of two products is the epilogue of one of them
                break
            if reader.kind != FUSED or _elements(reader) != _elements(product):
                if _updates(reader, group[-1].writes[0], buffers):
                    changed[reader] = dataclasses.replace(reader, spared=frozenset((*reader.reads, *reader.writes)))
                break
            group.append(reader)
        if len(group) > 1:
            _merge(group, product, buffers, changed, spares_rows=True)


def _updates(kernel: Kernel, value: Value, buffers: _Buffers) -> bool:
    """Whether a kernel overwrites a window of an array with ``value``."""
    e = kernel.equation
    return kernel.kind == OPERATOR and is_update(e) and not kernel.fused and buffers.buffer(e.inputs[1]) is value


# Models the stacks of loops: the slices that XLA copies out of them and into them, and the zeros that it fills in.


def _note_stacks(program: Kernels, compiler: Compiler, changes: dict[Kernel, dict[str, Any]]) -> None:
    """Notes the slices that the loops of a block copy or fill, one of each stack, those of inner loops included."""
    for kernel in program.kernels:
        for body in kernel.bodies:
            _note_stacks(body, compiler, changes)
        if kernel.equation.name == "scan" and kernel.bodies:  # a loop whose iterations are split is an operator
            for inner, piece in _slices_of_loop(kernel, kernel.bodies[0], compiler):
                noted = changes.setdefault(inner, {})
                noted["slices"] = (*noted.get("slices", ()), piece)


def _slices_of_loop(loop: Kernel, body: Kernels, compiler: Compiler) -> Iterator[tuple[Kernel, StackSlice]]:
    """The slices that one iteration copies or fills, each with the kernel of the body that reads or writes it."""
    consts, carry = scan_counts(loop.equation.params)
    readers, writers = readers_of(body), {v: k for k in body.kernels for v in k.writes}
    for v in body.block.inputs[consts + carry :]:
        kernels = [k for k in readers.get(v, ()) if not looks_up(k, v, body.home)]
        copying = [k for k in kernels if k.kind not in (FUSED, REDUCTION)]
        if compiler.products_slice_stacks and len(copying) == 1 and copying[0].kind == PRODUCT:
            continue
        if copying:
            yield copying[0], StackSlice(v, copied=True, filled=False)
    filled = compiler.fills_forward_stacks or bool(loop.equation.params["reverse"])
    for output in body.block.outputs[carry:]:
        if not isinstance(output, Value):
            continue
        v = body.home.get(output, output)
        kernel = writers.get(v) or next(iter(readers.get(v, body.kernels)), None)
        if kernel is not None:
            copied = not _writes_in_place(writers.get(v), readers.get(v, ()), compiler)
            if copied or filled:
                yield kernel, StackSlice(v, copied, filled)


def _writes_in_place(writer: Kernel | None, readers: Sequence[Kernel], compiler: Compiler) -> bool:
    """Whether a kernel writes its result into a stack, and not into an array that is copied there."""
    if writer is None:  # the slice is an array from before the iteration
        return False
    if compiler.products_slice_stacks:
        return writer.kind in (FUSED, REDUCTION, PRODUCT)
    return writer.kind == FUSED and not readers


# Models layout copies: the arrays that XLA copies into another memory layout before or after a collective.

_ALONG = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}


def _note_layouts(program: Kernels, compiler: Compiler, changes: dict[Kernel, dict[str, Any]]) -> None:
    """Notes for each collective the bytes of the arrays that are copied into another layout."""
    writers = {v: k for k in program.kernels for v in k.writes}
    readers = readers_of(program)
    results = program.results
    for kernel in program.kernels:
        for body in kernel.bodies:
            _note_layouts(body, compiler, changes)
        if kernel.kind != COLLECTIVE:
            continue
        operand, (result,) = kernel.equation.inputs[0], kernel.writes[:1]
        assert isinstance(operand, Value)
        before, after = _layouts(kernel, operand, result, compiler)
        home = program.home.get(operand, operand)
        writer = writers.get(home)
        any_layout = compiler.products_take_layouts
        writing_kinds = {FUSED, REDUCTION, PRODUCT} if any_layout else {FUSED, REDUCTION}
        reading_kinds = writing_kinds if any_layout else {FUSED}
        is_free = writer is not None and writer.kind in writing_kinds and readers[home] == [kernel]
        arrays = [operand.bytes] if before and not is_free else []
        users = readers.get(result, [])
        shares_layout = len(users) == 1 or any_layout
        if after and (
            result in results or not users or not shares_layout or any(k.kind not in reading_kinds for k in users)
        ):
            arrays.append(result.bytes)
        if arrays:
            changes.setdefault(kernel, {})["copied"] = tuple(arrays)


def _layouts(kernel: Kernel, operand: Value, result: Value, compiler: Compiler) -> tuple[bool, bool]:
    """Whether a collective needs its operand, and makes its result, in a layout of its own."""
    params: Mapping[str, Any] = kernel.equation.params
    kind = KINDS[kernel.equation.name]
    if "split_axis" in params:
        cut, joined = params["split_axis"], params["concat_axis"]
        part = tuple(min(a, b) for a, b in zip(operand.shape, result.shape, strict=True))
        return False, math.prod(operand.shape) > 0 and is_turned(part, cut, joined)
    if kind not in _ALONG or not compiler.copies_for_collectives:
        return False, False
    needs_own_layout = is_strided(operand.shape, params[_ALONG[kind]])
    return needs_own_layout, needs_own_layout


# Models the combiner: the collectives that XLA sends in one message.


class Messages:
    """Assigns collectives to messages. Call ``send`` in the order in which they run."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._bytes: list[int] = []
        self._latest: dict[object, int] = {}

    def send(self, key: object, operand_bytes: int, needed: frozenset[int]) -> tuple[int, int]:
        """Adds a collective to a message."""
        message = self._latest.get(key)
        # If the collective depends on a later message, the two messages would depend on each other.
        if (
            message is None
            or self._bytes[message] + operand_bytes > self._largest
            or max(needed, default=-1) >= message
        ):
            message = self._latest[key] = len(self._bytes)
            self._bytes.append(0)
        before = self._bytes[message]
        self._bytes[message] += operand_bytes
        return message, before


def _note_messages(program: Kernels, compiler: Compiler, changes: dict[Kernel, dict[str, Any]]) -> None:
    """Notes for each collective that joins a message the bytes of one device's operands in it so far."""
    messages = Messages(compiler.combined_bytes)
    needs: dict[Value, frozenset[int]] = {}  # for each value, the messages on which it depends
    for kernel in program.kernels:
        for body in kernel.bodies:
            _note_messages(body, compiler, changes)
        needed = frozenset[int]().union(*(needs.get(program.home.get(v, v), frozenset()) for v in kernel.reads))
        if kernel.kind == COLLECTIVE and KINDS[kernel.equation.name] in compiler.combines:
            e = kernel.equation
            operand_bytes = sum(v.bytes for v in e.inputs if isinstance(v, Value))
            among = str(e.params.get("axes", e.params.get("axis_name")))
            message, sent_before = messages.send(
                (e.name, among, short_dtype(kernel.writes[0].dtype)), operand_bytes, needed
            )
            if sent_before:
                changes.setdefault(kernel, {})["joined"] = sent_before
            needed |= {message}
        needs.update((program.home.get(v, v), needed) for v in kernel.writes)
