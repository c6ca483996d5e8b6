"""Loops: values that one loop stacks up for another, made again inside the other.

    ys = scan(x -> f(x) stacked); ...; scan over ys(y -> g(y))
    xs = scan(x -> x stacked);    ...; scan over xs(x -> g(f(x)))

A backward loop reads what the forward loop stacked, slice by slice. What is not stacked is made from the constants,
the slices and the carry of the forward loop, and from what is still stacked. A carry that is needed is stacked itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Block, Constant, Equation, Value
from gshard.passes.device_program import REGION, Kernel, size
from gshard.remat.lives import Lives, Seconds
from gshard.remat.straight import without_dead_code
from gshard.rules.region import with_edges
from gshard.rules.subexpression import common_key, is_repeatable


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """Stacks that one loop writes for another, and what not stacking them would bring and take.

    Attributes:
        writer, reader: the loops.
        values: the stacks, results of the writer.
        freed: bytes, less those of what must be kept in their place.
        seconds: of making all slices again.
    """

    writer: Equation
    reader: Equation
    values: tuple[Value, ...]
    freed: int
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class _Pair:
    """Two loops, and what the second one reads of the first one's stacks."""

    writer: Kernel
    reader: Kernel
    at: tuple[int, int]
    stacks: tuple[Value, ...]

    @functools.cached_property
    def maker(self) -> dict[Value, Equation]:
        """The equation that makes each value of the writer's body."""
        return {v: e for e in self.writer.equation.blocks[0].equations for v in e.outputs}

    @functools.cached_property
    def inside(self) -> dict[Value, Value | Constant]:
        """What the writer's body stacks, by stack."""
        return {v: self.inner(v) for v in self.stacks}

    def inner(self, stack: Value) -> Value | Constant:
        """What the writer's body stacks."""
        e = self.writer.equation
        return e.blocks[0].outputs[e.outputs.index(stack)]


def _pairs(lives: Lives, peak: int, elsewhere: frozenset[Value]) -> Iterator[_Pair]:
    loops = [
        (i, k) for i, k in enumerate(lives.kernels.kernels)
        if k.kind == REGION and len(k.bodies) == 1 and k.equation.trips > 1 and "reverse" in k.equation.params
    ]  # fmt: skip
    for i, writer in loops:
        carry = scan_counts(writer.equation.params)[1]
        by_reader: dict[int, list[Value]] = {}
        for v in writer.equation.outputs[carry:]:
            readers = lives.readers.get(v, [])
            if len(readers) == 1 and i <= peak <= readers[0] and v not in lives.ends and v not in elsewhere:
                by_reader.setdefault(readers[0], []).append(v)
        for j, reader in loops:
            if j in by_reader and reader.equation.params["length"] == writer.equation.params["length"]:
                before = sum(scan_counts(reader.equation.params))
                slices = [lives.sliced(x) for x in reader.equation.inputs[before:] if isinstance(x, Value)]
                fixed = [lives.home(x) for x in reader.equation.inputs[:before] if isinstance(x, Value)]
                stacks = [v for v in by_reader[j] if slices.count(v) == 1 and v not in fixed]
                if stacks:
                    yield _Pair(writer, reader, (i, j), tuple(stacks))


def stacked_over(lives: Lives, peak: int, seconds: Seconds, elsewhere: frozenset[Value]) -> list[Stacked]:
    """The stacks that need not be kept over a kernel: each one by itself, and all of a pair of loops together."""
    found = []
    for pair in _pairs(lives, peak, elsewhere):
        (body,) = pair.writer.bodies
        taken = {k.equation: seconds(k) for k in body.kernels}
        carries = _carries(pair.writer.equation)
        able = [v for v in pair.stacks if pair.inner(v) not in carries and _cone(pair, {v}) is not None]
        groups = [(v,) for v in able] + ([tuple(able)] if len(able) > 1 else [])
        for group in groups:
            cone = _cone(pair, set(group))
            assert cone is not None, "a union of cones that can be made again"
            equations, inputs = cone
            needed = sum(_kept_for(lives, pair, x) for x in inputs)
            freed = sum(map(size, group)) - needed
            if freed > 0:
                trips = pair.writer.equation.trips
                again = trips * sum(taken.get(e, 0.0) for e in equations)
                found.append(Stacked(pair.writer.equation, pair.reader.equation, group, freed, again))
    return found


def _carries(loop: Equation) -> set[Value]:
    consts, carry = scan_counts(loop.params)
    return set(loop.blocks[0].inputs[consts : consts + carry])


def _cone(pair: _Pair, dropped: set[Value]) -> tuple[list[Equation], set[Value]] | None:
    """The equations of the writer's body that make dropped slices again, and the body's inputs that they read."""
    maker = pair.maker
    kept = {x for v, x in pair.inside.items() if v not in dropped}
    equations: dict[Equation, None] = {}
    inputs: set[Value] = set()
    pending = [pair.inside[v] for v in dropped]
    while pending:
        x = pending.pop()
        if isinstance(x, Constant) or x in kept:
            continue
        if x not in maker:
            inputs.add(x)
        elif maker[x] not in equations:
            if not is_repeatable(maker[x]):
                return None
            equations[maker[x]] = None
            pending += maker[x].inputs
    return list(equations), inputs


def _kept_for(lives: Lives, pair: _Pair, x: Value) -> int:
    """Bytes that are held from the writer to the reader so that the reader knows an input of the writer's body."""
    e = pair.writer.equation
    consts, carry = scan_counts(e.params)
    at = e.blocks[0].inputs.index(x)
    if consts <= at < consts + carry:
        return size(x) * e.trips
    outer = e.inputs[at]
    if isinstance(outer, Constant):
        return 0
    v = lives.home(outer)
    return 0 if v not in lives.made or lives.last[v] >= pair.at[1] else size(v)


def without_stacking(lives: Lives, found: Stacked, names: Iterator[int]) -> Block:
    """The block in which the reader makes the stacks again, slice by slice.

    Args:
        lives: the block's.
        found: what ``stacked_over`` found.
        names: numbers for new values.
    """
    loops = {found.writer, found.reader}
    writer, reader = (lives.kernels.kernels[lives.position[e]] for e in (found.writer, found.reader))
    at = lives.position[found.writer], lives.position[found.reader]
    carry = scan_counts(found.writer.params)[1]
    slices = found.reader.inputs[sum(scan_counts(found.reader.params)) :]
    read = {lives.sliced(x) for x in slices if isinstance(x, Value)}
    stacks = tuple(v for v in found.writer.outputs[carry:] if v in read and lives.readers.get(v) == [at[1]])
    pair = _Pair(writer, reader, at, stacks)
    new_writer, new_reader = _Rewriting(lives, pair, found.values, names).loops()
    made = []
    for e in lives.kernels.block.equations:
        made.append(e if e not in loops else new_writer if e is found.writer else new_reader)
    return without_dead_code(Block(lives.kernels.block.inputs, tuple(made), lives.kernels.block.outputs))


class _Rewriting:
    def __init__(self, lives: Lives, pair: _Pair, dropped: tuple[Value, ...], names: Iterator[int]):
        self.pair, self.names, self.lives = pair, names, lives
        self.dropped = set(dropped)
        reader = pair.reader.equation
        self.counts = scan_counts(reader.params)
        consts, carry = self.counts
        body = reader.blocks[0]
        self.consts = list(zip(reader.inputs[:consts], body.inputs[:consts], strict=True))
        slices = zip(reader.inputs[consts + carry :], body.inputs[consts + carry :], strict=True)
        self.slices: list[tuple[Value | Constant, Value]] = []
        self.known: dict[Value | Constant, Value | Constant] = {}  # of the writer's body, as the reader's body has it
        self.lost: dict[Value, Value | Constant] = {}  # of the reader's body, as the writer's body makes it
        for outer, inner in slices:
            stack = lives.sliced(outer) if isinstance(outer, Value) else None
            if stack in self.dropped:
                self.lost[inner] = pair.inner(stack)
                continue
            self.slices.append((outer, inner))
            if stack in pair.stacks:
                self.known.setdefault(pair.inner(stack), inner)
        self.stacked: list[tuple[Value, Value]] = []  # carries that the writer stacks now: inside and outside
        self.equations: list[Equation] = []
        self.met: dict[object, Equation] = {}
        self.maker = pair.maker

    def loops(self) -> tuple[Equation, Equation]:
        writer, reader = self.pair.writer.equation, self.pair.reader.equation
        body = reader.blocks[0]
        env: dict[Value, Value | Constant] = {}

        def read(x: Value | Constant) -> Value | Constant:
            if isinstance(x, Value) and x in self.lost:
                return self._make(self.lost[x])
            return env.get(x, x) if isinstance(x, Value) else x

        for e in body.equations:
            inputs = tuple(map(read, e.inputs))
            key = common_key(e.primitive, e.params, inputs) if is_repeatable(e) else None
            if key is not None and key in self.met:
                env.update(zip(e.outputs, self.met[key].outputs, strict=True))
                continue
            self.equations.append(dataclasses.replace(e, inputs=inputs))
            if key is not None:
                self.met[key] = self.equations[-1]
        outputs = tuple(map(read, body.outputs))
        consts, carry = self.counts
        carried = list(zip(reader.inputs, body.inputs, strict=True))[consts : consts + carry]
        operands = [*self.consts, *carried, *self.slices]
        block = Block(tuple(inner for _, inner in operands), tuple(self.equations), outputs)
        params = _params(reader, len(self.consts), carry)
        inputs = tuple(outer for outer, _ in operands)
        new_reader = with_edges(dataclasses.replace(reader, params=params, inputs=inputs, blocks=(block,)))
        return self._writer(writer), new_reader

    def _writer(self, writer: Equation) -> Equation:
        body = writer.blocks[0]
        kept = [(v, x) for v, x in zip(writer.outputs, body.outputs, strict=True) if v not in self.dropped]
        kept += [(outer, inner) for inner, outer in self.stacked]
        block = without_dead_code(Block(body.inputs, body.equations, tuple(x for _, x in kept)))
        params = _params(writer, *scan_counts(writer.params))
        results = tuple(v for v, _ in kept)
        return with_edges(dataclasses.replace(writer, params=params, outputs=results, blocks=(block,)))

    def _make(self, x: Value | Constant) -> Value | Constant:
        """A value of the writer's body inside the reader's body."""
        if isinstance(x, Constant):
            return x
        if x not in self.known:
            if x not in self.maker:
                self.known[x] = self._input(x)
            else:
                e = self.maker[x]
                inputs = tuple(map(self._make, e.inputs))
                key = common_key(e.primitive, e.params, inputs)
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
        """An input of the writer's body inside the reader's body: a constant, a slice, or a stacked carry."""
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
