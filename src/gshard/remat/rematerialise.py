"""Chooses the values that a program recomputes to fit into memory (GShard paper, section 3.3), also across loops."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import no_mesh_set, optimization_barrier_p, scan_counts, shapes_of
from gshard.core.jax_adapter_context import wide_enough_for
from gshard.core.jax_adapter_retracing import with_mapping
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import with_tables
from gshard.core.program import Block, Constant, Equation, Program, Value, format_bytes, itemsize, type_text
from gshard.core.spmd import RECOMPUTED, Collective, Recomputation, Recomputed, SpmdProgram
from gshard.core.xla_workarounds import opaque_identity
from gshard.device.cost import emitted_as, kernel_cost, sent_by
from gshard.device.fusion_model import (
    COLLECTIVE,
    FUSED,
    REGION,
    Kernel,
    Kernels,
    device_program,
    flops,
    kernels_of,
    kind_of,
)
from gshard.device.machine import Machine
from gshard.device.memory import Memory, held_at_peak, memory_of
from gshard.emit.compile import Executable, compile_spmd
from gshard.language.region import Interpreter, with_edges
from gshard.language.registry import Call, rule_of
from gshard.remat.straight_line import (
    Liveness,
    Offer,
    Seconds,
    kept_over,
)
from gshard.rewrite.equation_graph import common_key, is_pure, with_others, without_dead_code

# Recomputes residuals that one loop stacks for another inside that other loop.


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
        """For each result of the writer, the value of its body that it contains."""
        e = self.writer.equation
        return dict(zip(e.outputs, e.blocks[0].outputs, strict=True))


def _key(e: Equation, inputs: Sequence[Value | Constant]) -> Any:
    return common_key(e.primitive, e.params, inputs, e.context) if is_pure(e) else None


def _pairs(liveness: Liveness, peak: int, elsewhere: frozenset[Value]) -> Iterator[_Pair]:
    loops = [
        (i, k) for i, k in enumerate(liveness.kernels)
        if k.kind == REGION and len(k.bodies) == 1 and k.equation.trip_count > 1 and "reverse" in k.equation.params
    ]  # fmt: skip
    for i, writer in loops:
        carry = scan_counts(writer.equation.params)[1]
        by_consumer: dict[int, list[Value]] = {}
        for v in writer.equation.outputs[carry:]:
            users = liveness.users.get(v, [])
            if len(users) == 1 and i <= peak <= users[0] and v not in liveness.kept and v not in elsewhere:
                by_consumer.setdefault(users[0], []).append(v)
        for j, consumer in loops:
            if j in by_consumer and consumer.equation.params["length"] == writer.equation.params["length"]:
                before = sum(scan_counts(consumer.equation.params))
                slices = [liveness.sliced(x) for x in consumer.equation.inputs[before:] if isinstance(x, Value)]
                fixed = [liveness.buffer(x) for x in consumer.equation.inputs[:before] if isinstance(x, Value)]
                stacks = [v for v in by_consumer[j] if slices.count(v) == 1 and v not in fixed]
                if stacks:
                    yield _Pair(writer, consumer, (i, j), tuple(stacks))


def stacked_over(liveness: Liveness, peak: int, seconds: Seconds, elsewhere: frozenset[Value]) -> list[Offer]:
    """The stacks that need not be kept over a kernel: each one alone, and all of a pair of loops together."""
    offers = []
    for pair in _pairs(liveness, peak, elsewhere):
        (body,) = pair.writer.bodies
        seconds_of_kernel = {k.equation: seconds(k) for k in body.kernels}
        consts, carry = scan_counts(pair.writer.equation.params)
        carries = set(pair.writer.equation.blocks[0].inputs[consts : consts + carry])
        droppable = [v for v in pair.stacks if pair.inside[v] not in carries and _backward_slice(pair, {v}) is not None]
        together = _together(pair, droppable)
        groups = [(v,) for v in droppable] + ([together] if len(together) > 1 else [])
        for group in groups:
            found_slice = _backward_slice(pair, set(group))
            assert found_slice is not None, "slices that can be recomputed"
            equations, inputs = found_slice
            needed = sum(_kept_for(liveness, pair, x) for x in inputs)
            freed = sum(v.bytes for v in group) - needed
            if freed > 0:
                trip_count = pair.writer.equation.trip_count
                extra_seconds = trip_count * sum(seconds_of_kernel.get(e, 0.0) for e in equations)
                without = functools.partial(without_stacking, liveness, pair)
                offers.append(Offer(group, freed, extra_seconds, without, pair))
    return offers


def _together(pair: _Pair, droppable: Sequence[Value]) -> tuple[Value, ...]:
    """Stacks that can be recomputed together. If a slice is stacked twice, one stack may need the other."""
    found: list[Value] = []
    for v in droppable:
        if _backward_slice(pair, {*found, v}) is not None:
            found.append(v)
    return tuple(found)


def _backward_slice(pair: _Pair, dropped: set[Value]) -> tuple[list[Equation], set[Value]] | None:
    """The equations of the writer's body that recompute dropped slices, and the inputs of the body that they read."""
    producer = pair.producer
    kept = {pair.inside[v] for v in pair.stacks if v not in dropped}
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
        return x.bytes * e.trip_count
    outer = e.inputs[at]
    if isinstance(outer, Constant):
        return 0
    v = liveness.buffer(outer)
    return 0 if v not in liveness.made or liveness.last[v] >= pair.at[1] else v.bytes


def without_stacking(liveness: Liveness, pair: _Pair, dropped: Sequence[Value], names: Iterator[int]) -> Block:
    """The block in which the second loop recomputes stacks of the first one, slice by slice."""
    writer, consumer = pair.writer.equation, pair.consumer.equation
    new_writer, new_consumer = _LoopRewriting(liveness, pair, dropped, names).loops()
    return with_others(liveness.block, {writer: (new_writer,), consumer: (new_consumer,)}.get, clean=True)


class _LoopRewriting:
    """Rewrites a pair of loops without some stacks."""

    def __init__(self, liveness: Liveness, pair: _Pair, dropped: Sequence[Value], names: Iterator[int]):
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
                self.lost[inner] = pair.inside[stack]
                continue
            self.slices.append((outer, inner))
            if stack in pair.stacks:
                self.known.setdefault(pair.inside[stack], inner)
        self.stacked: list[tuple[Value, Value]] = []  # new stacks of carries: inside and outside
        self.equations: list[Equation] = []
        self.met: dict[object, Equation] = {}

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
        new_consumer = with_edges(consumer, params=params, inputs=inputs, blocks=(block,))
        return self._writer(writer), new_consumer

    def _writer(self, writer: Equation) -> Equation:
        body = writer.blocks[0]
        kept = [(v, x) for v, x in zip(writer.outputs, body.outputs, strict=True) if v not in self.dropped]
        kept += [(outer, inner) for inner, outer in self.stacked]
        outputs = tuple(x for _, x in kept)
        block = Block(body.inputs, tuple(without_dead_code(body.equations, outputs)), outputs)
        params = _params(writer, *scan_counts(writer.params))
        results = tuple(v for v, _ in kept)
        return with_edges(writer, params=params, outputs=results, blocks=(block,))

    def _make(self, x: Value | Constant) -> Value | Constant:
        """Computes a value of the writer's body in the consumer's body."""
        if isinstance(x, Constant):
            return x
        if x not in self.known:
            if x not in self.pair.producer:
                self.known[x] = self._input(x)
            else:
                e = self.pair.producer[x]
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


# Stacks the values before a loop's final widening conversion, and widens the stack after the loop.


def low_precision_over(liveness: Liveness, peak: int, elsewhere: frozenset[Value]) -> list[Offer]:
    """The stacks that are alive at a kernel, or written by it, and can have lower precision: nothing is recomputed."""
    found = []
    for i, kernel in enumerate(liveness.kernels[: peak + 1]):
        e = kernel.equation
        if e.name != "scan" or e.trip_count < 2:
            continue
        for k, widening in _widenings(e).items():
            v, source = e.outputs[k], widening.inputs[0]
            is_held = v not in liveness.kept and v not in elsewhere and i <= peak <= liveness.last.get(v, -1)
            users = {liveness.kernels[j].kind for j in liveness.users.get(v, ())}
            if k >= scan_counts(e.params)[1] and is_held and REGION not in users:
                freed = v.bytes - v.bytes * itemsize(source.dtype) // itemsize(v.dtype)
                found.append(Offer((v,), freed, 0.0, functools.partial(with_low_precision_stacks, liveness, e), e))
    return found


def _widenings(loop: Equation) -> dict[int, Equation]:
    """The equations that widen results of a loop's body, by the number of the result."""
    producer = {v: e for e in loop.blocks[0].equations for v in e.outputs}
    ends = {i: producer[x] for i, x in enumerate(loop.blocks[0].outputs) if isinstance(x, Value) and x in producer}
    return {i: e for i, e in ends.items() if _is_widening(e)}


def _is_widening(e: Equation) -> bool:
    """Whether an equation only widens the elements of its operand."""
    if len(e.inputs) != 1 or isinstance(e.inputs[0], Constant) or kind_of(e) != FUSED:
        return False
    (x,), (y,), rule = e.inputs, e.outputs, e.operator_rule
    return rule.operands[0] == rule.results[0] and x.shape == y.shape and itemsize(x.dtype) < itemsize(y.dtype)


def with_low_precision_stacks(
    liveness: Liveness, writer: Equation, stacks: Sequence[Value], names: Iterator[int]
) -> Block:
    """The block with stacks of a loop widened after the loop."""
    body = writer.blocks[0]
    outputs, body_outputs, widenings = list(writer.outputs), list(body.outputs), []
    for i, e in _widenings(writer).items():
        if (v := writer.outputs[i]) in stacks:
            source, stack = e.inputs[0], Value(v.shape, e.inputs[0].dtype, next(names))
            outputs[i], body_outputs[i] = stack, source
            call = Call(e.name, e.params, (v.shape,), (v.shape,), (source.dtype,), e.primitive)
            widenings.append(dataclasses.replace(e, inputs=(stack,), outputs=(v,), rule=rule_of(call, e.source_info)))
    loop = Block(body.inputs, tuple(without_dead_code(body.equations, body_outputs)), tuple(body_outputs))
    changed = with_edges(writer, outputs=tuple(outputs), blocks=(loop,))
    return with_others(liveness.block, {writer: (changed, *widenings)}.get)


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
    first_peak = memory_of(before, lent, machine.compiler).peak
    flops_before = _flops(before)
    target = limit
    while True:
        search = _Search(before, target, machine, spmd.mesh, lent)
        block, reached = search.run()
        if reached.peak > target:
            raise _does_not_fit(reached, block, spmd.program, limit)
        if block is before.block:
            return spmd
        program = replayed(spmd, before, block)
        after = device_program(program)
        memory = memory_of(after, lent, machine.compiler)
        if memory.peak <= limit:
            extra_flops = max(0, _flops(after) - flops_before)
            report = Recomputed(limit, first_peak, memory.peak, flops_before, extra_flops, tuple(search.chosen))
            return dataclasses.replace(program, recomputed=report)
        target = limit - (memory.peak - reached.peak)  # the difference is copies that replace barriers on CPU


def _flops(kernels: Kernels) -> int:
    return sum(
        times * (flops(k.equation) + sum(map(flops, k.fused))) for k, times in kernels.walk() if k.kind != REGION
    )


class _Search:
    def __init__(self, program: Kernels, limit: int, machine: Machine, mesh: Mesh, donated: Sequence[int]):
        self.program, self.limit, self.machine, self.mesh, self.donated = program, limit, machine, mesh, donated
        self.names = itertools.count(1 + max((v.index for v in program.block.values()), default=0))
        self.known: dict[Kernel, float] = {}
        self.refused: set[tuple[Value, ...]] = set()
        self.chosen: list[Recomputation] = []

    def run(self) -> tuple[Block, Memory]:
        """The block that fits, or the best one that was found, and its memory."""
        program, memory = self.program, memory_of(self.program, self.donated, self.machine.compiler)
        while memory.peak > self.limit and (step := self._step(program, memory)) is not None:
            program, memory = step
        return program.block, memory

    def _step(self, program: Kernels, memory: Memory) -> tuple[Kernels, Memory] | None:
        """Lowers the peak by values of one kind in one block; None if there are no such values."""
        offers = self._offers(program, memory)
        while offers:
            depth, liveness, batch = self._batch(offers, memory.peak - self.limit)
            while batch:
                values = [v for item in batch for v in item.values]
                block = batch[0].without(values, self.names)
                for (kernels, at), (below, _) in zip(
                    reversed(memory.path[:depth]), reversed(memory.path[1 : depth + 1]), strict=True
                ):
                    region = kernels.kernels[at].equation
                    bodies = tuple(block if body is below.block else body for body in region.blocks)
                    block = with_others(kernels.block, {region: (with_edges(region, blocks=bodies),)}.get)
                changed = kernels_of(block)
                after = memory_of(changed, self.donated, self.machine.compiler)
                if _rank(after) < _rank(memory):
                    self.chosen += [_noted(item, liveness) for item in batch]
                    return changed, after
                if len(batch) == 1:
                    self.refused.add(batch[0].values)
                batch = batch[: len(batch) // 2]
            offers = [o for o in offers if o[2].values not in self.refused]
        return None

    def _offers(self, program: Kernels, memory: Memory) -> list[tuple[int, Liveness, Offer]]:
        """The values that need not be kept over the peak, those with the least time for each byte first."""
        offers: list[tuple[int, Liveness, Offer]] = []
        results = frozenset(v for v in program.block.outputs if isinstance(v, Value))
        rounds = 1
        for depth, (kernels, at) in enumerate(memory.path):
            liveness = Liveness(kernels)
            elsewhere = results if depth == 0 else frozenset()
            found: list[Offer] = [
                *low_precision_over(liveness, at, elsewhere),
                *kept_over(liveness, at, self._seconds, elsewhere),
                *stacked_over(liveness, at, self._seconds, elsewhere),
            ]
            offers += [
                (depth, liveness, dataclasses.replace(item, seconds=item.seconds * rounds))
                for item in found
                if item.values not in self.refused
            ]
            rounds *= kernels.kernels[at].equation.trip_count
        excess = memory.peak - self.limit
        large = [o for o in offers if o[2].freed * 100 >= excess]  # small values only if there are no others
        return sorted(large or offers, key=lambda o: (o[2].seconds / o[2].freed, -o[2].freed))

    def _batch(self, offers: list[tuple[int, Liveness, Offer]], excess: int) -> tuple[int, Liveness, list[Offer]]:
        """The best offer, and the next best ones that fit to it, until enough is freed.

        A value and the values from which it is recomputed are never in one batch: dropping one changes the price of the
        other.
        """
        depth, liveness, best = offers[0]
        batch: list[Offer] = []
        taken: set[Value] = set()
        needed: set[Value] = set()
        for at, _, item in offers:
            if at != depth or item.rewrite != best.rewrite or not taken.isdisjoint((*item.values, *item.anchors)):
                continue
            if not needed.isdisjoint(item.values):
                continue
            if batch and item.seconds / item.freed > 2 * max(best.seconds / best.freed, 1e-18):
                break
            batch.append(item)
            taken.update(item.values)
            needed |= item.anchors
            excess -= item.freed
            if excess <= 0:
                break
        return depth, liveness, batch

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
    return MemoryLimitError(
        f"the program needs {format_bytes(memory.peak)} on a device whatever is recomputed: "
        f"{format_bytes(memory.peak - limit)} more than memory_limit ({format_bytes(limit)}).",
        None,
        f"arguments and results {format_bytes(memory.fixed)}, values inside {format_bytes(memory.temporaries)}"
        + (f": {'; '.join(held)}" if held else ""),
        "Split more (marks, a larger mesh), use a smaller batch, donate arguments, or allow more memory.",
    )


def _rank(memory: Memory) -> tuple[int, int]:
    """Orders memories, the better first: by the peak, then by the number of moments that are as high."""
    return memory.peak, sum(1 for m in memory.moments if m.bytes == memory.temporaries)


def _noted(item: Offer, liveness: Liveness) -> Recomputation:
    largest = max(item.values, key=lambda v: v.bytes)
    producer = liveness.producer[largest]
    for body in producer.blocks:  # of a loop, what it stacks
        stacked = body.outputs[producer.outputs.index(largest)]
        producer = next((e for e in body.equations if stacked in e.outputs), producer)
    shape = f"{largest.dtype_name}[{','.join(map(str, largest.shape))}]"
    return Recomputation(producer.name, producer.line, shape, len(item.values), item.freed)


# Traces a changed block of a per-device program into a per-device program again.


@no_mesh_set()
def replayed(spmd: SpmdProgram, before: Kernels, block: Block) -> SpmdProgram:
    """The program with another block of equations."""
    devices = spmd.mesh.devices
    on_cpu = devices is not None and devices[0].platform == "cpu"
    interpreter = _WithOpaqueBarriers(frozenset(before.block.walk()) if on_cpu else None)
    (mapping,) = spmd.jaxpr.jaxpr.eqns
    mapped = jax.shard_map(
        lambda *arrays: interpreter.run(block, arrays),
        mesh=spmd.mesh.jax_mesh,
        in_specs=tuple(mapping.params["in_specs"]),
        out_specs=list(mapping.params["out_specs"]),
        check_vma=False,
    )

    def program(*arrays: Any) -> list[Any]:
        return with_mapping(spmd.jaxpr.jaxpr, mapped, (*spmd.jaxpr.consts, *arrays))

    wide = wide_enough_for(v.dtype for v in block.values())
    with jax.sharding.use_abstract_mesh(spmd.mesh.abstract_jax_mesh), wide:
        jaxpr = jax.make_jaxpr(program)(*shapes_of(spmd.jaxpr.in_avals))
    return dataclasses.replace(spmd, jaxpr=jaxpr, collectives=tuple(_collectives_of(block, spmd)))


@dataclasses.dataclass(frozen=True)
class _WithOpaqueBarriers(Interpreter):
    """Runs blocks on one device's parts unchanged. Barriers outside of ``own_equations`` become opaque identities."""

    own_equations: frozenset[Equation] | None

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs an equation."""
        if self.own_equations is not None and e.primitive is optimization_barrier_p and e not in self.own_equations:
            return [*opaque_identity(inputs[:-1], inputs[-1]), inputs[-1]]
        return super().equation(e, inputs)


def _collectives_of(block: Block, spmd: SpmdProgram) -> Iterator[Collective]:
    """The collectives of a changed block: those of the program that remain, and new ones."""
    sends = [(k.equation, times) for k, times in kernels_of(block).walk() if k.kind == COLLECTIVE]
    for (e, times), known in zip(sends, emitted_as(spmd, [e for e, _ in sends]), strict=True):
        if known is not None:
            yield dataclasses.replace(known, times=times)
            continue
        kind, atoms, _, sent = sent_by(e, spmd.mesh)
        yield Collective(kind, atoms, sent, times, type_text(e.inputs[0]), e.line, RECOMPUTED, cause=e, emitted=e)


# Compiles a program within a memory limit by the compiler's own figures.

_ATTEMPTS = 6


@with_tables
def compiled_within(
    program: SpmdProgram,
    spmd: SpmdProgram,
    limit: int,
    machine: Machine,
    donated: frozenset[int],
    compiled: Callable[..., Executable] = compile_spmd,
) -> Executable:
    """Compiles a program that recomputes as many values as the limit requires."""
    target, planned = limit, ""
    for _ in range(_ATTEMPTS):
        executable = compiled(program, donated)
        try:
            peak = peak_of(executable.compiled)
            planned = f"the compiler needs {format_bytes(peak)}"
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            peak, planned = limit + limit // 10, str(error).splitlines()[0]
        if peak <= limit:
            return executable
        expected = program.recomputed.after if program.recomputed is not None else target
        target = min(target, expected) - (peak - limit)
        try:
            program = rematerialise(spmd, target, machine, donated)
        except MemoryLimitError:
            break  # the model cannot go lower
    failed = MemoryLimitError(
        f"the compiled program does not fit in memory_limit ({format_bytes(limit)}), whatever is recomputed.",
        None,
        planned,
        "Split more (marks, a larger mesh), use a smaller batch, donate arguments, or allow more memory.",
    )
    failed.needed = peak
    raise failed


def peak_of(compiled: Any) -> int:
    """Bytes that a device holds, by the compiler: arguments, results outside of their memory, temporaries.

    The TPU compiler also counts the memory of results and of donated arguments as temporaries, if it is used until the
    result is computed. Its own figure for the peak counts each buffer once. (The figures of other compilers for the
    peak omit temporaries.)
    """
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    is_for_tpus = any(device.platform == "tpu" for sharding in shardings[:1] for device in sharding.device_set)
    reported_peak = getattr(memory, "peak_memory_in_bytes", 0) if is_for_tpus else 0
    return int(reported_peak or total - memory.alias_size_in_bytes)
