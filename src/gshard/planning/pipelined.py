"""Runs scans over marked stacks of layers as pipelines (``gshard.pipeline``).

A scan is a pipeline if it reads a marked stack, or one that a pipeline made, and hands a carry on. So the loop of the
derivative is a pipeline in the other direction. Loops that only add go to ``rewrite.shard_scan``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from gshard.core.errors import GShardError, ShardingError
from gshard.core.jax_adapter import closed, jaxpr_without_dead_code, no_mesh_set, scan_counts, user_line
from gshard.core.mark import Mark, Schedule, atoms_of_partitions
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import RUN_AS_PIPELINE, Block, Constant, Equation, Fired, Program, Value
from gshard.language.kernel_loops import FunctionLoops, NotProven, Part, Shard, loops_of, on_shards
from gshard.language.mark_primitive import bind_mark
from gshard.language.region import Interpreter, value_of, with_edges
from gshard.planning.layer_stacks import all_schedules, entering, hands_on, layers_handed_on, schedules_of
from gshard.rewrite.driver import recorded
from gshard.rewrite.equation_graph import Array, common_key, is_pure, substituted, without_dead_code, written
from gshard.rewrite.shard_scan import only_added_to, shard_scan
from gshard.tracing.builder import Builder
from gshard.tracing.permitted import permitted

_RESHAPE = "new_sizes"  # the parameter of a reshape


def pipelined(program: Program, mesh: Mesh) -> Program:
    """The program with its loops over marked stacks as pipelines; the same object if there are none."""
    if any(fired.rewrite == RUN_AS_PIPELINE for fired in program.fired):
        return program
    if not any(mesh.count(atoms_of_partitions(s.over, mesh)) > 1 for s in all_schedules(program)):
        return program
    key = program.block, RUN_AS_PIPELINE, mesh, tuple(schedules_of(program).items())
    block, fired = program.decomposed.get(key, lambda: _pipelined(program, mesh))
    return dataclasses.replace(program, block=block, fired=fired) if fired != program.fired else program


@no_mesh_set()
def _pipelined(program: Program, mesh: Mesh) -> tuple[Block, tuple[Fired, ...]]:
    walk = _Walk(mesh, Builder.after(program.block))
    first = len(program.captured)
    arguments = {program.block.inputs[first + i]: _Stack(s) for i, s in schedules_of(program).items()}
    block = walk.block(program.block, arguments)
    if not walk.scans and not any(fired.rewrite == shard_scan.name for fired in program.fired):
        lines = (e.line for e in program.block.walk() if e.mark is not None and e.mark.schedule is not None)
        raise ShardingError(
            "no loop scans over the stack of layers that is marked here.",
            next(lines, ""),
            str(next(all_schedules(program))),
            "Scan over the marked stack itself, as in jax.lax.scan(layer, x, stacked), or mark it with gshard.split.",
        )
    return permitted(block, finite=program.finite), (*program.fired, *walk.fired)


@dataclasses.dataclass(frozen=True, slots=True)
class _Stack:
    """A stack of layers."""

    schedule: Schedule  # the schedule of loops that read it
    dim: int = 0  # the dimension of layers
    by_turn: Value | None = None  # the same values by turns, if a pipeline made them
    rows: Rows | None = None  # the batch dimension of a slice of it


class _Walk:
    """Replaces the loops of a program."""

    def __init__(self, mesh: Mesh, builder: Builder):
        self.fired: list[Fired] = []  # a record for each replaced loop
        self.scans = False  # whether a loop scans over a marked stack
        self._mesh, self._builder = mesh, builder

    def block(self, block: Block, stacks: Mapping[Value, _Stack]) -> Block:
        """The block with pipelines in place of its loops."""
        known, equations, is_changed = dict(stacks), list[Equation](), False
        pending = list(reversed(block.equations))
        while pending:
            e = pending.pop()
            if e.name == "scan" and (schedule := self._schedule_of(e, known)) is not None:
                try:
                    equations += self._pipeline(e, schedule, known)
                except Mixed as mixed:
                    parts = _without_tables(e, self._builder)
                    if parts is None:
                        raise _refusal(e, schedule, mixed) from None
                    pending += reversed(parts)
                is_changed = True
                continue
            new = self._with_bodies(e, known)
            is_changed |= new is not e
            equations.append(new)
            known |= _handed_on(new, known)
        if not is_changed:
            return block
        equations, outputs = self._cleaned(equations, block.outputs)
        return Block(block.inputs, tuple(without_dead_code(equations, outputs)), outputs)

    def _cleaned(
        self, equations: Sequence[Equation], outputs: Sequence[Array]
    ) -> tuple[list[Equation], tuple[Array, ...]]:
        """The equations with one in place of several equal ones, and of several reshapes in a row.

        The loop of a derivative reads the weights that the forward loop reads. Both arrange them by stages, which moves
        a stack in several rounds: once, not twice. A stack ``[rounds, layers of a round, ...]`` that is split along its
        second dimension cannot be split as ``[length, ...]``. So marks of stacks in several rounds, which leave them
        open, are dropped, and reshapes between this form and that of a pipeline are one.
        """
        names, known, reshaped, kept = dict[Any, Any](), dict[Any, Equation](), dict[Any, Any](), list[Equation]()
        for e in equations:
            new = substituted(e, names)
            inputs = new.inputs
            key = None if new.blocks else common_key(new.primitive, new.params, inputs, new.context)
            if new.mark is not None:
                key = new.mark, inputs
            first = new if key is None else known.setdefault(key, new)
            if first is not new:
                names |= zip(new.outputs, (names.get(v, v) for v in first.outputs), strict=True)
            elif new.mark is not None and new.mark.schedule is not None and new.mark.schedule.rounds > 1:
                names[new.outputs[0]] = inputs[0]
            elif _RESHAPE in new.params and new.params.get("dimensions") is None:
                (v,) = new.outputs
                reshaped[v] = x = reshaped.get(inputs[0], inputs[0])
                if x is inputs[0]:
                    kept.append(new)
                else:
                    kept += written(self._builder, functools.partial(jnp.reshape, shape=v.shape), [x], [v], new)
            else:
                kept.append(new)
        return kept, tuple(names.get(v, v) for v in outputs)

    def _with_bodies(self, e: Equation, known: Mapping[Value, _Stack]) -> Equation:
        if not e.blocks:
            return e
        inner = {v: known[x] for v, x in entering(e, known).items()}
        bodies = tuple(self.block(body, {v: s for v, s in inner.items() if v in body.inputs}) for body in e.blocks)
        return e if bodies == e.blocks else with_edges(e, blocks=bodies)

    def _schedule_of(self, e: Equation, known: Mapping[Value, _Stack]) -> Schedule | None:
        """The schedule of a loop; None if it is no pipeline."""
        operands = e.inputs[sum(scan_counts(e.params)) :]
        stacks = [known[x] for x in operands if isinstance(x, Value) and x in known and not known[x].dim]
        self.scans |= bool(stacks)
        if not stacks or self._stages(stacks[0].schedule) == 1:
            return None
        return stacks[0].schedule if hands_on(e) else None

    def _stages(self, schedule: Schedule) -> int:
        return self._mesh.count(atoms_of_partitions(schedule.over, self._mesh))

    def _pipeline(self, e: Equation, schedule: Schedule, known: dict[Value, _Stack]) -> list[Equation]:
        """The pipeline of a loop. Its results are added to ``known``."""
        stages, (consts, carry) = self._stages(schedule), scan_counts(e.params)
        _check_layers(e, schedule, stages)
        layout = StageLayout(schedule, stages, int(e.params["length"]) // (stages * schedule.rounds))
        first = consts + carry
        found = [known.get(x) if isinstance(x, Value) else None for x in e.inputs[first:]]
        stacks = [s if s is not None and s.schedule == schedule and not s.dim else None for s in found]
        by_turn = [None if s is None else s.by_turn for s in stacks]
        rows = tuple(None if s is None or s.by_turn is None else s.rows for s in stacks)
        run = _loop(e, layout, rows)
        of_results = list(enumerate(run.body.outputs[carry:]))
        avals = run.body.jaxpr.out_avals[carry:]
        turns = schedule.turns(stages), stages, layout.layers
        made = {i: self._builder.fresh((*turns, *avals[i].shape), avals[i].dtype) for i, has in of_results if has}
        known |= {e.outputs[carry + i]: _Stack(schedule, 0, made.get(i), has) for i, has in of_results}
        operands = [*e.inputs[:first], *(v or x for v, x in zip(by_turn, e.inputs[first:], strict=True))]
        try:
            equations = written(self._builder, run, operands, [*e.outputs, *made.values()], e)
        except NotImplementedError as error:
            raise ShardingError(
                f"an operation of a layer cannot run in all stages at once: {error}.",
                e.line,
                str(schedule),
                "gshard maps a layer over the stages by jax.vmap, so each of its operations needs a batching rule.",
            ) from error
        self.fired.append(recorded(RUN_AS_PIPELINE, {e: equations}, _note(e, schedule, stages, run.body.rows)))
        return equations


def _loop(e: Equation, layout: StageLayout, rows: Sequence[Rows | None]) -> PipelinedLoop:
    """The pipeline of a loop."""
    counts = scan_counts(e.params)
    inputs = e.blocks[0].inputs
    known = {sum(counts) + i: own for i, own in enumerate(rows) if own is not None}
    body = micro_body(e, layout.schedule.micro_batches, known)
    added = tuple(is_added and body.sums[i] for i, is_added in enumerate(only_added_to(e)))
    by_turn, shapes = tuple(own is not None for own in rows), tuple(v.shape for v in inputs[sum(counts) :])
    return PipelinedLoop(layout, bool(e.params["reverse"]), counts, body, added, by_turn, shapes)


def _handed_on(e: Equation, known: Mapping[Value, _Stack]) -> Iterator[tuple[Value, _Stack]]:
    """The results of an equation that are stacks of the same layers as an operand."""
    if e.mark is not None and e.mark.schedule is not None:
        ndim = len(e.outputs[0].shape) - len(e.mark.batch_dims)
        dims = e.mark.place([d == 0 for d in range(ndim)], False)
        yield e.outputs[0], _Stack(e.mark.schedule, dims.index(True))
        return
    for x, v, d in layers_handed_on(e, {x: stack.dim for x, stack in known.items()}):
        yield v, _Stack(known[x].schedule, d)


def _note(e: Equation, schedule: Schedule, stages: int, rows: int) -> str:
    rounds = f" in {schedule.rounds} rounds" if schedule.rounds > 1 else ""
    layers = int(e.params["length"])
    return (
        f"{layers} layers in {stages} stages{rounds}, {schedule.micro_batches} micro-batches of {rows} rows: "
        f"{schedule.turns(stages)} turns, bubble {stages - 1}/{schedule.turns(stages)} = {schedule.bubble(stages):.1%}"
        f"{', last layer first' if e.params['reverse'] else ''}{f' at {e.line}' if e.line else ''}"
    )


def _check_layers(e: Equation, schedule: Schedule, stages: int) -> None:
    """Checks that stages have equal numbers of layers."""
    layers, parts = int(e.params["length"]), stages * schedule.rounds
    if layers % parts:
        raise ShardingError(
            f"a loop over {layers} layers cannot be cut into {parts} equal parts.",
            e.line,
            f"{schedule}: {stages} stages{f' x {schedule.rounds} rounds' if schedule.rounds > 1 else ''}",
            "Give a number of layers that stages x rounds divide, or fewer stages or rounds.",
        )
    if schedule.rounds > 1 and schedule.micro_batches < stages:
        raise ShardingError(
            f"{schedule.micro_batches} micro-batches cannot pass {stages} stages in several rounds.",
            e.line,
            str(schedule),
            f"Give at least {stages} micro-batches: a stage begins a round when the last stage has its results.",
        )


def _without_tables(e: Equation, builder: Builder) -> list[Equation] | None:
    """A scan whose body reads tables, arrays that depend on nothing, instead of making them; None if it makes none.

    A table of positions along the batch, such as the counters of random bits, has other elements in each micro-batch.
    """
    (body,) = e.blocks
    made, tables = set[Value](), list[Equation]()
    for q in body.equations:
        if (
            q.rule is not None
            and is_pure(q)
            and q.mark is None
            and all(isinstance(x, Constant) or x in made for x in q.inputs)
        ):
            tables.append(q)
            made.update(q.outputs)
    others = [q for q in body.equations if q not in tables]
    read = {x for q in others for x in q.inputs} | {*body.outputs}
    if not any(v.shape for v in made & read):
        return None
    consts, carry = scan_counts(e.params)

    def loop(*operands: Any) -> list[Any]:
        shared = dict(zip(body.inputs[:consts], operands, strict=False))
        Interpreter().evaluate(tables, shared)

        def step(carried: Any, own: Any) -> Any:
            env = shared | dict(zip(body.inputs[consts:], (*carried, *own), strict=True))
            Interpreter().evaluate(others, env)
            out = [value_of(v, env) for v in body.outputs]
            return out[:carry], out[carry:]

        start, stacks = operands[consts : consts + carry], operands[consts + carry :]
        params = {name: e.params[name] for name in ("length", "reverse", "unroll")}
        end, stacked = lax.scan(step, list(start), list(stacks), **params)
        return [*end, *stacked]

    return written(builder, loop, e.inputs, e.outputs, e)


def _refusal(e: Equation, schedule: Schedule, mixed: Mixed) -> ShardingError:
    """The error for a loop whose batch cannot be cut into micro-batches."""
    if mixed.rows:
        return ShardingError(
            f"a batch of {mixed.rows} rows cannot be cut into {schedule.micro_batches} micro-batches.",
            e.line,
            str(schedule),
            f"Give a number of micro-batches that divides {mixed.rows}.",
        )
    eqn = mixed.equation
    line = user_line(eqn.source_info) if eqn is not None else ""
    what = "the batch of this loop cannot be cut into micro-batches."
    if eqn is not None:
        what = f"{eqn.primitive.name} in a layer mixes the rows of the batch, or needs their positions."
    return ShardingError(
        what,
        line or e.line,
        f"{schedule}{f', loop at {e.line}' if e.line and line else ''}",
        "A layer must compute each row of the batch alone. Compute what needs all rows before the loop, and pass it as "
        "an operand; or scan over the stack before it is marked.",
    )


# The loop of a pipeline: a function of the operands of the scan, which JAX traces. A scan over turns runs all stages at
# once, each on another micro-batch, as a vmap over the stages. After each turn a shift along the dimension of stages
# hands the results on.


@dataclasses.dataclass(frozen=True, slots=True)
class StageLayout:
    """The stages of a pipeline: cuts stacks and batches into stages, rounds and micro-batches, and joins them.

    A stack of layers ``[length, ...]`` is ``[rounds, stages, layers, ...]``. Micro-batch ``m`` has the rows ``m, m +
    micro_batches, ...``, so a batch that other mesh axes split stays where it is. A stack by turns ``[turns, stages,
    layers, ...]`` has the slices for one micro-batch as a pipeline makes and reads them.
    """

    schedule: Schedule  # micro-batches and rounds
    stages: int  # the number of stages
    layers: int  # the number of layers of a stage in one round

    @property
    def items(self) -> int:
        """The number of micro-batches that each stage processes, counted in each round."""
        return self.schedule.micro_batches * self.schedule.rounds

    def parted(self, x: Any, rows: Rows | None) -> Any:
        """The micro-batches of an array: a new leading dimension."""
        if rows is None:
            return x
        d, count = rows.dim, self.schedule.micro_batches
        parts = x.reshape(*x.shape[:d], x.shape[d] // rows.inner // count, count, rows.inner, *x.shape[d + 1 :])
        parts = jnp.moveaxis(parts, d + 1, 0)
        return parts.reshape(count, *x.shape[:d], x.shape[d] // count, *x.shape[d + 1 :])

    def joined(self, x: Any, rows: Rows) -> Any:
        """The array of some micro-batches."""
        d, count = rows.dim, self.schedule.micro_batches
        parts = x.reshape(count, *x.shape[1 : d + 1], x.shape[d + 1] // rows.inner, rows.inner, *x.shape[d + 2 :])
        return jnp.moveaxis(parts, 0, d + 1).reshape(*x.shape[1 : d + 1], x.shape[d + 1] * count, *x.shape[d + 2 :])

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading dimensions of a stack by stages: stages, rounds if there are several, and layers."""
        return (self.stages, *((self.schedule.rounds,) if self.schedule.rounds > 1 else ()), self.layers)

    def by_stage(self, x: Any, slice_shape: Sequence[int]) -> Any:
        """A stack by stages."""
        if self.schedule.rounds == 1:
            return x.reshape(*self.leading, *slice_shape)
        return jnp.swapaxes(x.reshape(self.schedule.rounds, self.stages, self.layers, *slice_shape), 0, 1)

    def by_layer(self, x: Any) -> Any:
        """The stack ``[length, ...]`` of a stack by stages."""
        x = x if self.schedule.rounds == 1 else jnp.swapaxes(x, 0, 1)
        return x.reshape(-1, *x.shape[len(self.leading) :])

    def by_item(self, x: Any, rows: Rows) -> Any:
        """A stack by stages as ``[stages, items, layers, ...]``, each item with its micro-batch."""
        parts = self.parted(x, Rows(rows.dim + len(self.leading), rows.inner))
        parts = jnp.moveaxis(parts, 0, len(self.leading) - 1)  # micro-batches before layers
        return parts.reshape(self.stages, self.items, *parts.shape[len(self.leading) :])

    def from_turns(self, x: Any, rows: Rows) -> Any:
        """The stack by stages of a stack by turns."""
        turns = jnp.arange(self.stages, dtype=jnp.int32)  # stage ``s`` has item ``n`` in turn ``n + s``
        items = jax.vmap(lambda own, t: lax.dynamic_slice_in_dim(own, t, self.items), (1, 0))(x, turns)
        *outer, layers = self.leading
        parts = items.reshape(*outer, self.schedule.micro_batches, layers, *items.shape[3:])
        parts = jnp.moveaxis(parts, len(outer), 0)
        return self.joined(parts, Rows(rows.dim + len(self.leading), rows.inner))

    def pinned(self, x: Any, dim: int) -> Any:
        """The array with its dimension of stages split over the mesh; the other dimensions stay open."""
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        spec[dim] = self.schedule.over
        return bind_mark(x, Mark(spec=tuple(spec), source_text=str(self.schedule)))


@dataclasses.dataclass(frozen=True, slots=True)
class PipelinedLoop:
    """A scan that runs as a pipeline.

        turn     0    1    2    3    4                           2 stages, 4 micro-batches
        stage 0  m0   m1   m2   m3   (m3)
        stage 1  (m0) m0   m1   m2   m3                          (m): repeated, and not used

    In turn ``t`` stage ``s`` has the item ``n = t - s``: micro-batch ``n % micro_batches`` in round ``n //
    micro_batches``. With several rounds, the last stage hands micro-batches back to the first one, which keeps them
    until their next round begins. A loop over the layers in reverse, as a derivative has it, runs the turns in reverse,
    so the same numbers hold. Therefore a stack that one loop writes turn by turn is what another loop reads turn by
    turn: residuals of the forward loop are neither moved nor copied.
    """

    layout: StageLayout  # the stages
    reverse: bool  # whether the scan begins with the last layer
    counts: tuple[int, int]  # the numbers of constants and of carried values of the scan
    body: MicroBody  # the body on one micro-batch
    added: tuple[bool, ...]  # for each carried value whether iterations only add to it
    by_turn: tuple[bool, ...]  # for each stacked operand whether it is a stack by turns, which another pipeline made
    shapes: tuple[tuple[int, ...], ...]  # for each stacked operand the shape of the array of one layer

    def __call__(self, *operands: Any) -> list[Any]:
        """The results of the scan, followed by the stacks by turns."""
        consts, carry = self.counts
        stacks = operands[consts + carry :]
        constants = [self.layout.parted(x, rows) for x, rows in zip(operands, self.body.inputs[:consts], strict=False)]
        start = [self._entering(i, operands[consts + i]) for i in self._flowing]
        by_item, fixed, by_turn = dict[int, Any](), dict[int, Any](), dict[int, Any]()
        for i, (x, rows, shape) in enumerate(zip(stacks, self.body.inputs[consts + carry :], self.shapes, strict=True)):
            if self.by_turn[i]:
                by_turn[i] = self.layout.pinned(x, 1)
                continue
            fixed[i] = self.layout.pinned(self.layout.by_stage(x, shape), 0)
            if rows is not None:
                by_item[i] = self.layout.pinned(self.layout.by_item(fixed.pop(i), rows), 0)
        left, sums, made = self._run(constants, start, by_item, fixed, by_turn)
        flow = dict(zip(self._flowing, left, strict=True))
        results = [self._leaving(i, operands[consts + i], flow, sums) for i in range(carry)]
        stacked = iter(made)
        for i, (rows, aval) in enumerate(zip(self.body.outputs[carry:], self._out_avals[carry:], strict=True)):
            by_stage = sums[carry + i] if rows is None else self.layout.from_turns(next(stacked), rows)
            results.append(self.layout.by_layer(by_stage.astype(aval.dtype)))  # what moves between stages is narrow
        return [*results, *made]

    @property
    def _flowing(self) -> list[int]:
        """The carried values that go from stage to stage."""
        return [i for i, added in enumerate(self.added) if not added]

    @property
    def _entry(self) -> int:
        """The stage that a micro-batch enters first."""
        return self.layout.stages - 1 if self.reverse else 0

    @property
    def _out_avals(self) -> list[Any]:
        return list(self.body.jaxpr.out_avals)

    def _run(
        self,
        constants: Sequence[Any],
        start: Sequence[Any],
        by_item: dict[int, Any],
        fixed: dict[int, Any],
        by_turn: dict[int, Any],
    ) -> tuple[list[Any], dict[int, Any], list[Any]]:
        """Runs all turns."""
        rounds, entry, turns = self.layout.schedule.rounds, self._entry, self.layout.schedule.turns(self.layout.stages)
        numbers = np.arange(self.layout.stages, dtype=np.int32)
        state = [self.layout.pinned(jnp.broadcast_to(x[0], (self.layout.stages, *x.shape[1:])), 0) for x in start]
        waiting = (
            [self.layout.pinned(jnp.broadcast_to(x, (self.layout.stages, *x.shape)), 0) for x in start]
            if rounds > 1
            else []
        )

        def turn(carried: Any, now: Any) -> Any:
            (state, waiting, sums), (t, slices) = carried, now
            item = t - numbers
            is_used = (item >= 0) & (item < self.layout.items)
            item = jnp.clip(item, 0, self.layout.items - 1)
            first = jnp.clip(t - entry, 0, self.layout.items - 1) % self.layout.schedule.micro_batches
            if rounds > 1:
                waiting, state = self._handed_round(state, waiting, t, first)
            else:
                state = [self._handed_on(x, lax.dynamic_index_in_dim(new, first, 0)) for x, new in zip(state, start)]
            state = [self.layout.pinned(x, 0) for x in state]

            def stage(*own: Any) -> Any:
                return self._stage(constants, *own)

            state, sums, made = jax.vmap(stage)(item, is_used, state, slices, by_item, fixed, sums)
            state = [self.layout.pinned(x, 0) for x in state]
            return (state, waiting, sums), (state if rounds == 1 else [], made)

        begin = state, waiting, self._zeros()
        clock = jnp.arange(turns, dtype=jnp.int32)
        (state, waiting, sums), (left, made) = lax.scan(turn, begin, (clock, by_turn), reverse=self.reverse)
        last = 0 if self.reverse else self.layout.stages - 1
        if rounds > 1:
            waiting, _ = self._handed_round(state, waiting, jnp.int32(-1 if self.reverse else turns), jnp.int32(0))
            return [x[entry] for x in waiting], sums, made
        window = slice(last, last + self.layout.items)  # the turns in which the last stage has items
        return [x[window, last] for x in left], sums, made

    def _handed_on(self, x: Any, new: Any) -> Any:
        """The values of all stages after they are handed on; ``new`` enters the first one."""
        return jnp.concatenate([x[1:], new] if self.reverse else [new, x[:-1]])

    def _handed_round(
        self, state: Sequence[Any], waiting: Sequence[Any], t: Any, first: Any
    ) -> tuple[list[Any], list[Any]]:
        """Hands on in a ring. The first stage keeps what it gets, and takes the micro-batch ``first``."""
        got = t + 1 if self.reverse else t - self.layout.stages  # the item that the last stage had in the turn before
        is_got = (got >= 0) & (got < self.layout.items)
        place = jnp.clip(got, 0, self.layout.items - 1) % self.layout.schedule.micro_batches
        is_entry = np.arange(self.layout.stages) == self._entry
        kept, handed = list[Any](), list[Any]()
        for x, held in zip(state, waiting, strict=True):
            ring = self._handed_on(x, x[:1] if self.reverse else x[-1:])
            before = lax.dynamic_index_in_dim(held, place, 1, keepdims=False)
            held = lax.dynamic_update_index_in_dim(held, jnp.where(is_got, ring, before), place, 1)
            new = lax.dynamic_index_in_dim(held, first, 1, keepdims=False)
            kept.append(held)
            handed.append(jnp.where(is_entry.reshape(-1, *[1] * (ring.ndim - 1)), new, ring))
        return kept, handed

    def _stage(
        self,
        constants: Sequence[Any],
        item: Any,
        is_used: Any,
        state: Sequence[Any],
        by_turn: dict[int, Any],
        by_item: dict[int, Any],
        fixed: dict[int, Any],
        sums: dict[int, Any],
    ) -> tuple[list[Any], dict[int, Any], list[Any]]:
        """One turn of one stage: its layers on one micro-batch."""
        consts, carry = self.counts
        micro_batch, in_round = item % self.layout.schedule.micro_batches, item // self.layout.schedule.micro_batches
        several = self.layout.schedule.rounds > 1

        def of(x: Any, i: Any) -> Any:
            return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)

        now = [x if rows is None else of(x, micro_batch) for x, rows in zip(constants, self.body.inputs, strict=False)]
        slices = by_turn | {i: of(x, item) for i, x in by_item.items()}
        slices |= {i: of(x, in_round) if several else x for i, x in fixed.items()}
        flowing = iter(state)
        begin = [
            jnp.zeros(v.shape, v.dtype) if added else next(flowing)
            for v, added in zip(self.body.jaxpr.in_avals[1 + consts :], self.added, strict=False)
        ]

        def layer(carried: Sequence[Any], own: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            out = jaxpr_as_fun(self.body.jaxpr)(micro_batch == 0, *now, *carried, *own)
            return out[:carry], out[carry:]

        xs = [slices[i] for i in sorted(slices)]
        if self.layout.layers == 1:
            end, ys = layer(begin, [x[0] for x in xs])
            ys = [y[None] for y in ys]
        else:
            end, ys = lax.scan(layer, begin, xs, length=self.layout.layers, reverse=self.reverse)
        new = dict(sums)
        for i, y in enumerate([*end, *ys]):
            if i not in sums:
                continue
            by_round = several and i >= carry
            before = of(sums[i], in_round) if by_round else sums[i]
            y = y.astype(before.dtype)
            if self.body.sums[i]:
                after = before + jnp.where(is_used, y, jnp.zeros_like(y))
            else:  # equal for all micro-batches
                after = jnp.where(is_used & (micro_batch == 0), y, before)
            new[i] = lax.dynamic_update_index_in_dim(sums[i], after, in_round, 0) if by_round else after
        made = [y for y, rows in zip(ys, self.body.outputs[carry:], strict=True) if rows is not None]
        return [end[i] for i in self._flowing], new, made

    def _zeros(self) -> dict[int, Any]:
        """The initial sums, for each stage: of carried values that are only added to, and of stacks without a batch."""
        _, carry = self.counts
        zeros = dict[int, Any]()
        for i, (aval, rows) in enumerate(zip(self._out_avals, self.body.outputs, strict=True)):
            leading = self.layout.leading if i >= carry else (self.layout.stages,)
            if rows is None and (i >= carry or self.added[i]):
                adds_floats = self.body.sums[i] and jnp.issubdtype(aval.dtype, jnp.floating)
                dtype = jnp.promote_types(aval.dtype, jnp.float32) if adds_floats else aval.dtype
                zeros[i] = self.layout.pinned(jnp.zeros((*leading, *aval.shape), dtype), 0)
        return zeros

    def _entering(self, i: int, x: Any) -> Any:
        """Carried value ``i`` before the first layer, for each micro-batch."""
        consts, _ = self.counts
        rows, count = self.body.inputs[consts + i], self.layout.schedule.micro_batches
        if rows is not None:
            return self.layout.parted(x, rows)
        copies = jnp.broadcast_to(x, (count, *jnp.shape(x)))
        if not self.body.start_as_sums[consts + i]:
            return copies
        is_first = (np.arange(count) == 0).reshape(-1, *[1] * jnp.ndim(x))
        return jnp.where(is_first, copies, jnp.zeros_like(copies))

    def _leaving(self, i: int, start: Any, flow: dict[int, Any], sums: dict[int, Any]) -> Any:
        """Carried value ``i`` after the last layer."""
        consts, _ = self.counts
        rows, dtype = self.body.inputs[consts + i], self._out_avals[i].dtype
        if self.added[i]:
            return (start + sums[i].sum(0)).astype(dtype)
        if rows is not None:
            return self.layout.joined(flow[i], rows)
        if self.body.start_as_sums[consts + i]:
            return flow[i].sum(0).astype(dtype)
        return flow[i][0]


# Micro-batches: the batch dimensions of a loop, and its body on one micro-batch. If rows of a batch are one parallel
# loop from carry to carry (language.kernel_loops), the body runs on some rows without communication. Sums over the
# batch add up over micro-batches, and must be finite.


_AXIS = "micro"


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """The batch dimension of an array."""

    dim: int  # the dimension
    inner: int = 1  # the number of elements of the dimension for each row, if it is merged with other dimensions


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBody:
    """The body of a scan on one micro-batch."""

    rows: int  # the number of rows of a micro-batch
    # the body, a closed jaxpr. Its first argument is whether this is the first micro-batch: values that are equal for
    # all micro-batches are added to a sum only there.
    jaxpr: Any
    # the batch dimension of each input of the body; None for one without a batch dimension
    inputs: tuple[Rows | None, ...]
    outputs: tuple[Rows | None, ...]  # the same for the outputs
    # for each output whether it is a sum over the batch. The sum over all micro-batches is the output then.
    sums: tuple[bool, ...]
    # for each input whether it is a carry that is a sum. It starts with zeros, except for the first micro-batch.
    start_as_sums: tuple[bool, ...]


class Mixed(Exception):
    """An iteration mixes rows of the batch, or its batch cannot be found."""

    def __init__(self, equation: Any = None, rows: int = 0) -> None:
        super().__init__()
        # equation: the equation of a jaxpr that mixes them, or None; rows: the number of rows that the micro-batches do
        # not divide; 0 if they do
        self.equation, self.rows = equation, rows


@no_mesh_set()
def micro_body(loop: Equation, micro_batches: int, known: Mapping[int, Rows]) -> MicroBody:
    """The body of a scan on one micro-batch."""
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.weak) for v in loop.blocks[0].inputs]
    jaxpr = jax.make_jaxpr(lambda *arrays: Interpreter().run(loop.blocks[0], arrays))(*shapes)
    loops = loops_of(jaxpr)
    first: Mixed | None = None
    for leaf in _candidates(loop, loops, known):
        try:
            return _with_batch(loop, jaxpr, loops, leaf, micro_batches)
        except Mixed as mixed:
            first = first or mixed
    raise first or Mixed()


def _candidates(loop: Equation, loops: FunctionLoops, known: Mapping[int, Rows]) -> Iterator[int]:
    """The loops that may be the batch, the likeliest first."""
    for i, rows in known.items():
        yield from loops.arguments[i][rows.dim][:1]
        return
    consts, carry = scan_counts(loop.params)
    inputs = loop.blocks[0].inputs
    tried = set[int]()
    for i in sorted(range(consts, consts + carry), key=lambda i: -inputs[i].bytes):
        for own in loops.arguments[i]:
            if own and own[0] not in tried:
                tried.add(own[0])
                yield own[0]


def _with_batch(loop: Equation, jaxpr: Any, loops: FunctionLoops, leaf: int, micro_batches: int) -> MicroBody:
    """The body if this loop is the batch."""
    whole, size = loops.table.whole(), loops.table.sizes[leaf]
    if leaf in whole:
        raise Mixed(whole[leaf])
    inputs, outputs = (tuple(_rows(dims, leaf, loops) for dims in own) for own in (loops.arguments, loops.results))
    consts, carry = scan_counts(loop.params)
    if not any(inputs[consts : consts + carry]):
        raise Mixed
    if size % micro_batches:
        raise Mixed(rows=size)
    mesh = Mesh.abstract(**{_AXIS: micro_batches})
    shapes = [
        jax.ShapeDtypeStruct(_shape_of_part(v.shape, rows, micro_batches), v.dtype, weak_type=v.weak)
        for v, rows in zip(loop.blocks[0].inputs, inputs, strict=True)
    ]
    flag = jax.ShapeDtypeStruct((), jnp.bool)
    start_as_sums = [micro_batches > 1 and x for x in _carried_sums(jaxpr, inputs, consts, carry)]
    found: list[Part] = []

    def atoms_of_loop(loop: int) -> Atoms:
        return mesh.atoms if leaf in loops.table.leaves(loop) else ()

    def local(is_first: Any, *arrays: Any) -> list[Any]:
        of_first = lambda x: jnp.where(is_first, x, jnp.zeros_like(x))  # noqa: E731
        shard = Shard(mesh, atoms_of_loop, finite=True, as_part=of_first, rounds=True)
        sum_over = dict.fromkeys(mesh.atoms, "add")
        parts = [Part(x, sum_over if is_sum else {}) for x, is_sum in zip(arrays, start_as_sums, strict=True)]
        found[:] = on_shards(jaxpr, parts, loops.steps, shard)
        return [part.array for part in found]

    try:
        traced = jax.make_jaxpr(local, axis_env=list(mesh.atom_sizes.items()))(flag, *shapes)
    except NotProven as error:
        raise Mixed(error.equation) from None
    except GShardError:
        raise Mixed from None
    sums = tuple(map(_is_sum, found))
    if inputs[consts : consts + carry] != outputs[:carry] or sums[:carry] != tuple(start_as_sums[consts:][:carry]):
        raise Mixed
    _check_position_free(traced)
    return MicroBody(size // micro_batches, traced, inputs, outputs, sums, tuple(start_as_sums))


def _carried_sums(jaxpr: Any, inputs: Sequence[Rows | None], consts: int, carry: int) -> list[bool]:
    """For each input of the body whether it is a carry without a batch dimension that depends on the batch: a sum."""
    body, _ = closed(jaxpr)
    carried = body.invars[consts : consts + carry]
    depends = {v for v, rows in zip(body.invars, inputs, strict=True) if rows is not None}
    while True:
        for eqn in body.eqns:
            if any(not isinstance(v, Literal) and v in depends for v in eqn.invars):
                depends.update(eqn.outvars)
        new = {v for v, w in zip(carried, body.outvars, strict=False) if not isinstance(w, Literal) and w in depends}
        if new <= depends:
            break
        depends |= new
    return [v in depends and rows is None for v, rows in zip(body.invars, inputs, strict=True)]


def _rows(dims: Sequence[Sequence[int]], leaf: int, loops: FunctionLoops) -> Rows | None:
    """The batch dimension of an array of these loops."""
    found = [d for d, own in enumerate(dims) if leaf in own]
    if not found:
        return None
    own = dims[found[0]]
    if len(found) > 1 or own[0] != leaf or own.count(leaf) > 1:
        raise Mixed
    return Rows(found[0], math.prod(loops.table.sizes[other] for other in own[1:]))


def _shape_of_part(shape: Sequence[int], rows: Rows | None, parts: int) -> tuple[int, ...]:
    return tuple(n if rows is None or d != rows.dim else n // parts for d, n in enumerate(shape))


def _is_sum(part: Part) -> bool:
    """Whether a value is a part of a sum over the batch."""
    if any(part.unreduced.get(a) != "add" for a in part.unreduced):
        raise Mixed
    return bool(part.unreduced)


def _check_position_free(jaxpr: Any) -> None:
    """Checks that a body on one micro-batch does not depend on the number of the micro-batch, and has no effects."""
    body, _ = closed(jaxpr)
    for eqn in jaxpr_without_dead_code(body).eqns:
        if eqn.effects:  # those that read the number of a device have an effect, too
            raise Mixed(eqn)
