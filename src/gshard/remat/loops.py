"""Loops: recomputes residuals that one loop stacks for another inside that other loop.

    ys = scan(x -> f(x) stacked); ...; scan over ys(y -> g(y))
    xs = scan(x -> x stacked);    ...; scan over xs(x -> g(f(x)))

A backward loop reads what the forward loop stacked, slice by slice. What is not stacked is made from the constants,
the slices and the carry of the forward loop, and from what is still stacked. A carry that is needed is stacked itself.
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
    """Stacks that one loop writes for another, and what not stacking them would bring and take.

    Attributes:
        writer, consumer: the loops.
        values: the stacks, results of the writer.
        freed: bytes, less those of what must be kept in their place.
        seconds: of recomputing all slices.
    """

    writer: Equation
    consumer: Equation
    values: tuple[Value, ...]
    freed: int
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class _Pair:
    """Two loops, and what the second one reads of the first one's stacks."""

    writer: Kernel
    consumer: Kernel
    at: tuple[int, int]
    stacks: tuple[Value, ...]

    @functools.cached_property
    def producer(self) -> dict[Value, Equation]:
        """The equation that makes each value of the writer's body."""
        return {v: e for e in self.writer.equation.blocks[0].equations for v in e.outputs}

    @functools.cached_property
    def inside(self) -> dict[Value, Value | Constant]:
        """What the writer's body stacks, by stack."""
        return {v: self.inner(v) for v in self.stacks}

    @functools.cached_property
    def shared(self) -> frozenset[Equation]:
        """What both bodies compute of what both read, such as gathers of weights: it is not computed once more."""
        here, there = self.writer.equation, self.consumer.equation
        read = dict(_read(there))
        same = {inner: read[outer] for outer, inner in _read(here) if outer in read}
        met = {_key(e, e.inputs): e for e in there.blocks[0].equations}
        found = []
        for e in here.blocks[0].equations:
            key = _key(e, [same.get(x, x) if isinstance(x, Value) else x for x in e.inputs])
            if key is not None and key in met:
                same.update(zip(e.outputs, met[key].outputs, strict=True))
                found.append(e)
        return frozenset(found)

    def inner(self, stack: Value) -> Value | Constant:
        """What the writer's body stacks."""
        e = self.writer.equation
        return e.blocks[0].outputs[e.outputs.index(stack)]


def _read(loop: Equation) -> Iterator[tuple[tuple[bool, Value | Constant], Value]]:
    """What a body reads that it does not carry: an array outside, and whether in slices; and what it is inside."""
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
    """The stacks that need not be kept over a kernel: each one by itself, and all of a pair of loops together."""
    found = []
    for pair in _pairs(liveness, peak, elsewhere):
        (body,) = pair.writer.bodies
        taken = {k.equation: seconds(k) for k in body.kernels}
        carries = _carries(pair.writer.equation)
        able = [v for v in pair.stacks if pair.inner(v) not in carries and _backward_slice(pair, {v}) is not None]
        together = _together(pair, able)
        groups = [(v,) for v in able] + ([together] if len(together) > 1 else [])
        for group in groups:
            found_slice = _backward_slice(pair, set(group))
            assert found_slice is not None, "slices that can be recomputed"
            equations, inputs = found_slice
            needed = sum(_kept_for(liveness, pair, x) for x in inputs)
            freed = sum(map(size, group)) - needed
            if freed > 0:
                trip_count = pair.writer.equation.trip_count
                again = trip_count * sum(taken.get(e, 0.0) for e in equations if e not in pair.shared)
                found.append(Stacked(pair.writer.equation, pair.consumer.equation, group, freed, again))
    return found


def _together(pair: _Pair, able: Sequence[Value]) -> tuple[Value, ...]:
    """Stacks that can be recomputed at the same time: of one slice that is stacked twice, one may need the other."""
    found: list[Value] = []
    if _backward_slice(pair, set(able)) is not None:
        return tuple(able)
    for v in able:
        if _backward_slice(pair, {*found, v}) is not None:
            found.append(v)
    return tuple(found)


def _carries(loop: Equation) -> set[Value]:
    consts, carry = scan_counts(loop.params)
    return set(loop.blocks[0].inputs[consts : consts + carry])


def _backward_slice(pair: _Pair, dropped: set[Value]) -> tuple[list[Equation], set[Value]] | None:
    """The equations of the writer's body that recompute dropped slices, and the body's inputs that they read."""
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
    """Bytes that are held from the writer to the consumer so that the consumer knows an input of the writer's body."""
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
    """The block in which the consumer recomputes the stacks, slice by slice.

    Args:
        liveness: the block's.
        found: what ``stacked_over`` found.
        names: numbers for new values.
    """
    loops = {found.writer, found.consumer}
    writer, consumer = (liveness.kernels.kernels[liveness.position[e]] for e in (found.writer, found.consumer))
    at = liveness.position[found.writer], liveness.position[found.consumer]
    carry = scan_counts(found.writer.params)[1]
    slices = found.consumer.inputs[sum(scan_counts(found.consumer.params)) :]
    read = {liveness.sliced(x) for x in slices if isinstance(x, Value)}
    stacks = tuple(v for v in found.writer.outputs[carry:] if v in read and liveness.users.get(v) == [at[1]])
    pair = _Pair(writer, consumer, at, stacks)
    new_writer, new_consumer = _LoopRewriting(liveness, pair, found.values, names).loops()
    made = []
    for e in liveness.kernels.block.equations:
        made.append(e if e not in loops else new_writer if e is found.writer else new_consumer)
    return without_dead_code(Block(liveness.kernels.block.inputs, tuple(made), liveness.kernels.block.outputs))


class _LoopRewriting:
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
        self.known: dict[Value | Constant, Value | Constant] = {}  # of the writer's body, as the consumer's body has it
        self.lost: dict[Value, Value | Constant] = {}  # of the consumer's body, as the writer's body makes it
        for outer, inner in slices:
            stack = liveness.sliced(outer) if isinstance(outer, Value) else None
            if stack in self.dropped:
                self.lost[inner] = pair.inner(stack)
                continue
            self.slices.append((outer, inner))
            if stack in pair.stacks:
                self.known.setdefault(pair.inner(stack), inner)
        self.stacked: list[tuple[Value, Value]] = []  # carries that the writer stacks now: inside and outside
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
        """A value of the writer's body inside the consumer's body."""
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
        """An input of the writer's body inside the consumer's body: a constant, a slice, or a stacked carry."""
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
