"""Recomputes residuals that one loop stacks for another inside that other loop.

    ys = scan(x -> f(x) stacked); ...; scan over ys(y -> g(y))
    xs = scan(x -> x stacked);    ...; scan over xs(x -> g(f(x)))

A backward loop reads the stacks of the forward loop slice by slice. It recomputes slices that are not stacked from the
constants, the slices and the carry of the forward loop, and from the remaining stacks. If it needs a carry, the forward
loop stacks that instead.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Block, Constant, Equation, Value
from gshard.device.fusion_model import REGION, Kernel, size
from gshard.language.region import with_edges
from gshard.remat.liveness import Liveness, Seconds
from gshard.remat.straight_line import without_dead_code
from gshard.rewrite.cse import common_key, is_pure


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """Stacks that one loop writes for another, with the saving and the price of recomputing them."""

    writer: Equation  # the loop that writes the stacks
    consumer: Equation  # the loop that reads them
    values: tuple[Value, ...]  # the stacks, results of the writer
    freed: int  # bytes saved, minus those of values that must be kept instead
    seconds: float  # of recomputing all slices


@dataclasses.dataclass(frozen=True, eq=False)
class _Pair:
    """Two loops, with the stacks of the first one that the second one reads."""

    writer: Kernel
    consumer: Kernel
    at: tuple[int, int]
    stacks: tuple[Value, ...]

    @functools.cached_property
    def producer(self) -> dict[Value, Equation]:
        """For each value of the writer's body, the equation that computes it."""
        return {v: e for e in self.writer.equation.blocks[0].equations for v in e.outputs}

    @functools.cached_property
    def inside(self) -> dict[Value, Value | Constant]:
        """For each stack, the value of the writer's body."""
        return {v: self.inner(v) for v in self.stacks}

    @functools.cached_property
    def shared(self) -> frozenset[Equation]:
        """Equations that both bodies run on equal inputs, such as gathers of weights: they need no second run."""
        writer, consumer = self.writer.equation, self.consumer.equation
        read = dict(_read(consumer))
        same = {inner: read[outer] for outer, inner in _read(writer) if outer in read}
        consumer_equations = {_key(e, e.inputs): e for e in consumer.blocks[0].equations}
        shared = []
        for e in writer.blocks[0].equations:
            key = _key(e, [same.get(x, x) if isinstance(x, Value) else x for x in e.inputs])
            if key is not None and key in consumer_equations:
                same.update(zip(e.outputs, consumer_equations[key].outputs, strict=True))
                shared.append(e)
        return frozenset(shared)

    def inner(self, stack: Value) -> Value | Constant:
        """The value of the writer's body that a stack contains."""
        e = self.writer.equation
        return e.blocks[0].outputs[e.outputs.index(stack)]


def _read(loop: Equation) -> Iterator[tuple[tuple[bool, Value | Constant], Value]]:
    """The constants and slices of a body: whether it is a slice and the outer array, then the value inside."""
    consts, carry = scan_counts(loop.params)
    for i, (outer, inner) in enumerate(zip(loop.inputs, loop.blocks[0].inputs, strict=True)):
        if not consts <= i < consts + carry:
            yield (i >= consts, outer), inner


def _key(e: Equation, inputs: Sequence[Value | Constant]) -> Any:
    return common_key(e.primitive, e.params, inputs, e.context) if is_pure(e) else None


def _pairs(liveness: Liveness, peak: int, elsewhere: frozenset[Value]) -> Iterator[_Pair]:
    loops = [
        (i, k) for i, k in enumerate(liveness.kernels.kernels)
        if k.kind == REGION and len(k.bodies) == 1 and k.equation.trip_count > 1 and "reverse" in k.equation.params
    ]  # fmt: skip
    for i, writer in loops:
        carry = scan_counts(writer.equation.params)[1]
        by_consumer: dict[int, list[Value]] = {}
        for v in writer.equation.outputs[carry:]:
            users = liveness.users.get(v, [])
            if len(users) == 1 and i <= peak <= users[0] and v not in liveness.ends and v not in elsewhere:
                by_consumer.setdefault(users[0], []).append(v)
        for j, consumer in loops:
            if j in by_consumer and consumer.equation.params["length"] == writer.equation.params["length"]:
                before = sum(scan_counts(consumer.equation.params))
                slices = [liveness.sliced(x) for x in consumer.equation.inputs[before:] if isinstance(x, Value)]
                fixed = [liveness.home(x) for x in consumer.equation.inputs[:before] if isinstance(x, Value)]
                stacks = [v for v in by_consumer[j] if slices.count(v) == 1 and v not in fixed]
                if stacks:
                    yield _Pair(writer, consumer, (i, j), tuple(stacks))


def stacked_over(liveness: Liveness, peak: int, seconds: Seconds, elsewhere: frozenset[Value]) -> list[Stacked]:
    """The stacks that need not be kept over a kernel: each one alone, and all of a pair of loops together."""
    offers = []
    for pair in _pairs(liveness, peak, elsewhere):
        (body,) = pair.writer.bodies
        seconds_of_kernel = {k.equation: seconds(k) for k in body.kernels}
        carries = _carries(pair.writer.equation)
        droppable = [v for v in pair.stacks if pair.inner(v) not in carries and _backward_slice(pair, {v}) is not None]
        together = _together(pair, droppable)
        groups = [(v,) for v in droppable] + ([together] if len(together) > 1 else [])
        for group in groups:
            found_slice = _backward_slice(pair, set(group))
            assert found_slice is not None, "slices that can be recomputed"
            equations, inputs = found_slice
            needed = sum(_kept_for(liveness, pair, x) for x in inputs)
            freed = sum(map(size, group)) - needed
            if freed > 0:
                trip_count = pair.writer.equation.trip_count
                extra_seconds = trip_count * sum(
                    seconds_of_kernel.get(e, 0.0) for e in equations if e not in pair.shared
                )
                offers.append(Stacked(pair.writer.equation, pair.consumer.equation, group, freed, extra_seconds))
    return offers


def _together(pair: _Pair, droppable: Sequence[Value]) -> tuple[Value, ...]:
    """Stacks that can be recomputed together. If a slice is stacked twice, one stack may need the other."""
    found: list[Value] = []
    if _backward_slice(pair, set(droppable)) is not None:
        return tuple(droppable)
    for v in droppable:
        if _backward_slice(pair, {*found, v}) is not None:
            found.append(v)
    return tuple(found)


def _carries(loop: Equation) -> set[Value]:
    consts, carry = scan_counts(loop.params)
    return set(loop.blocks[0].inputs[consts : consts + carry])


def _backward_slice(pair: _Pair, dropped: set[Value]) -> tuple[list[Equation], set[Value]] | None:
    """The equations of the writer's body that recompute dropped slices, and the inputs of the body that they read."""
    producer = pair.producer
    kept = {x for v, x in pair.inside.items() if v not in dropped}
    equations: dict[Equation, None] = {}
    inputs: set[Value] = set()
    pending = [pair.inside[v] for v in dropped]
    while pending:
        x = pending.pop()
        if isinstance(x, Constant) or x in kept:
            continue
        if x not in producer:
            inputs.add(x)
        elif producer[x] not in equations:
            if not is_pure(producer[x]):
                return None
            equations[producer[x]] = None
            pending += producer[x].inputs
    return list(equations), inputs


def _kept_for(liveness: Liveness, pair: _Pair, x: Value) -> int:
    """Bytes held from the writer to the consumer so that the consumer has an input of the writer's body."""
    e = pair.writer.equation
    consts, carry = scan_counts(e.params)
    at = e.blocks[0].inputs.index(x)
    if consts <= at < consts + carry:
        return size(x) * e.trip_count
    outer = e.inputs[at]
    if isinstance(outer, Constant):
        return 0
    v = liveness.home(outer)
    return 0 if v not in liveness.made or liveness.last[v] >= pair.at[1] else size(v)


def without_stacking(liveness: Liveness, found: Stacked, names: Iterator[int]) -> Block:
    """The block in which the consumer recomputes the stacks, slice by slice."""
    loops = {found.writer, found.consumer}
    writer, consumer = (liveness.kernels.kernels[liveness.position[e]] for e in (found.writer, found.consumer))
    at = liveness.position[found.writer], liveness.position[found.consumer]
    carry = scan_counts(found.writer.params)[1]
    slices = found.consumer.inputs[sum(scan_counts(found.consumer.params)) :]
    read = {liveness.sliced(x) for x in slices if isinstance(x, Value)}
    stacks = tuple(v for v in found.writer.outputs[carry:] if v in read and liveness.users.get(v) == [at[1]])
    pair = _Pair(writer, consumer, at, stacks)
    new_writer, new_consumer = _LoopRewriting(liveness, pair, found.values, names).loops()
    equations = []
    for e in liveness.kernels.block.equations:
        equations.append(e if e not in loops else new_writer if e is found.writer else new_consumer)
    return without_dead_code(Block(liveness.kernels.block.inputs, tuple(equations), liveness.kernels.block.outputs))


class _LoopRewriting:
    """Rewrites a pair of loops without some stacks."""

    def __init__(self, liveness: Liveness, pair: _Pair, dropped: tuple[Value, ...], names: Iterator[int]):
        self.pair, self.names, self.liveness = pair, names, liveness
        self.dropped = set(dropped)
        consumer = pair.consumer.equation
        self.counts = scan_counts(consumer.params)
        consts, carry = self.counts
        body = consumer.blocks[0]
        self.consts = list(zip(consumer.inputs[:consts], body.inputs[:consts], strict=True))
        slices = zip(consumer.inputs[consts + carry :], body.inputs[consts + carry :], strict=True)
        self.slices: list[tuple[Value | Constant, Value]] = []
        self.known: dict[Value | Constant, Value | Constant] = {}  # by value of the writer's body: the consumer's
        self.lost: dict[Value, Value | Constant] = {}  # by value of the consumer's body: the writer's
        for outer, inner in slices:
            stack = liveness.sliced(outer) if isinstance(outer, Value) else None
            if stack in self.dropped:
                self.lost[inner] = pair.inner(stack)
                continue
            self.slices.append((outer, inner))
            if stack in pair.stacks:
                self.known.setdefault(pair.inner(stack), inner)
        self.stacked: list[tuple[Value, Value]] = []  # new stacks of carries: inside and outside
        self.equations: list[Equation] = []
        self.met: dict[object, Equation] = {}
        self.producer = pair.producer

    def loops(self) -> tuple[Equation, Equation]:
        writer, consumer = self.pair.writer.equation, self.pair.consumer.equation
        body = consumer.blocks[0]
        env: dict[Value, Value | Constant] = {}

        def read(x: Value | Constant) -> Value | Constant:
            if isinstance(x, Value) and x in self.lost:
                return self._make(self.lost[x])
            return env.get(x, x) if isinstance(x, Value) else x

        for e in body.equations:
            inputs = tuple(map(read, e.inputs))
            key = _key(e, inputs)
            if key is not None and key in self.met:
                env.update(zip(e.outputs, self.met[key].outputs, strict=True))
                continue
            self.equations.append(dataclasses.replace(e, inputs=inputs))
            if key is not None:
                self.met[key] = self.equations[-1]
        outputs = tuple(map(read, body.outputs))
        consts, carry = self.counts
        carried = list(zip(consumer.inputs, body.inputs, strict=True))[consts : consts + carry]
        operands = [*self.consts, *carried, *self.slices]
        block = Block(tuple(inner for _, inner in operands), tuple(self.equations), outputs)
        params = _params(consumer, len(self.consts), carry)
        inputs = tuple(outer for outer, _ in operands)
        new_consumer = with_edges(dataclasses.replace(consumer, params=params, inputs=inputs, blocks=(block,)))
        return self._writer(writer), new_consumer

    def _writer(self, writer: Equation) -> Equation:
        body = writer.blocks[0]
        kept = [(v, x) for v, x in zip(writer.outputs, body.outputs, strict=True) if v not in self.dropped]
        kept += [(outer, inner) for inner, outer in self.stacked]
        block = without_dead_code(Block(body.inputs, body.equations, tuple(x for _, x in kept)))
        params = _params(writer, *scan_counts(writer.params))
        results = tuple(v for v, _ in kept)
        return with_edges(dataclasses.replace(writer, params=params, outputs=results, blocks=(block,)))

    def _make(self, x: Value | Constant) -> Value | Constant:
        """Computes a value of the writer's body in the consumer's body."""
        if isinstance(x, Constant):
            return x
        if x not in self.known:
            if x not in self.producer:
                self.known[x] = self._input(x)
            else:
                e = self.producer[x]
                inputs = tuple(map(self._make, e.inputs))
                key = _key(e, inputs)
                same = self.met.get(key) if key is not None else None
                if same is None:
                    outputs = tuple(Value(v.shape, v.dtype, next(self.names)) for v in e.outputs)
                    same = dataclasses.replace(e, inputs=inputs, outputs=outputs)
                    self.equations.append(same)
                    if key is not None:
                        self.met[key] = same
                self.known.update(zip(e.outputs, same.outputs, strict=True))
        return self.known[x]

    def _input(self, x: Value) -> Value:
        """An input of the writer's body in the consumer's body: a constant, a slice, or a stacked carry."""
        writer = self.pair.writer.equation
        consts, carry = scan_counts(writer.params)
        at = writer.blocks[0].inputs.index(x)
        outer = writer.inputs[at]
        table = self.consts if at < consts else self.slices
        if consts <= at < consts + carry:
            outer = Value((writer.params["length"], *x.shape), x.dtype, next(self.names))
            self.stacked.append((x, outer))
        for known, inner in table:
            if known is outer:
                return inner
        inner = Value(x.shape, x.dtype, next(self.names))
        table.append((outer, inner))
        return inner


def _params(loop: Equation, consts: int, carry: int) -> dict[str, object]:
    kept = {k: loop.params[k] for k in ("length", "reverse", "unroll")}
    return {**kept, "num_consts": consts, "num_carry": carry}
