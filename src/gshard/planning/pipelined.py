"""Runs scans over marked stacks of layers as pipelines (``gshard.pipeline``).

A scan is a pipeline if it reads a marked stack, or one that a pipeline made, and hands a carry on. So the loop of the
derivative is a pipeline in the other direction. Loops that only add go to ``rewrite.shard_scan``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import no_mesh_set, scan_counts, user_line
from gshard.core.mark import Schedule, atoms_of_partitions
from gshard.core.mesh import Mesh
from gshard.core.program import RUN_AS_PIPELINE, Block, Constant, Equation, Fired, Program, Value
from gshard.language.region import Interpreter, value_of, with_edges
from gshard.language.traits import traits_of
from gshard.planning.layer_stacks import all_schedules, entering, hands_on, layers_handed_on, schedules_of
from gshard.planning.micro_batches import Mixed, Rows, micro_body
from gshard.planning.pipeline_loop import PipelinedLoop, StageLayout
from gshard.rewrite.driver import recorded
from gshard.rewrite.equation_graph import Array, common_key, is_pure, without_dead_code, written
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
    counter = itertools.count(1 + max((v.index for v in program.block.values()), default=0))
    walk = _Walk(mesh, Builder(counter))
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
                    if parts is None and (eqn := mixed.equation) is not None:
                        parts = _computed_before(e, eqn.primitive.name, user_line(eqn.source_info), self._builder)
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
        renamed, known, reshaped, kept = dict[Any, Any](), dict[Any, Equation](), dict[Any, Any](), list[Equation]()
        for e in equations:
            inputs = tuple(renamed.get(x, x) for x in e.inputs)
            new = e if inputs == e.inputs else dataclasses.replace(e, inputs=inputs)
            new = with_edges(new) if new is not e and new.blocks else new
            key = None if new.blocks else common_key(new.primitive, new.params, inputs, new.context)
            if new.mark is not None:
                key = new.mark, inputs
            first = new if key is None else known.setdefault(key, new)
            if first is not new:
                renamed |= zip(new.outputs, (renamed.get(v, v) for v in first.outputs), strict=True)
            elif new.mark is not None and new.mark.schedule is not None and new.mark.schedule.rounds > 1:
                renamed[new.outputs[0]] = inputs[0]
            elif traits_of(new.name).shape_in == _RESHAPE and new.params.get("dimensions") is None:
                (v,) = new.outputs
                reshaped[v] = x = reshaped.get(inputs[0], inputs[0])
                if x is inputs[0]:
                    kept.append(new)
                else:
                    kept += written(self._builder, functools.partial(jnp.reshape, shape=v.shape), [x], [v], new)
            else:
                kept.append(new)
        return kept, tuple(renamed.get(v, v) for v in outputs)

    def _with_bodies(self, e: Equation, known: Mapping[Value, _Stack]) -> Equation:
        if not e.blocks:
            return e
        inner = {v: known[x] for v, x in entering(e, known).items()}
        bodies = tuple(self.block(body, {v: s for v, s in inner.items() if v in body.inputs}) for body in e.blocks)
        return e if bodies == e.blocks else with_edges(dataclasses.replace(e, blocks=bodies))

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
    return _split(e, builder, others, once=tables) if any(v.shape for v in made & read) else None


def _computed_before(e: Equation, name: str, line: str, builder: Builder) -> list[Equation] | None:
    """A scan whose body reads what some equations compute; None if all of these depend on the carry.

    A loop before it computes them for all iterations. A split of a random key into one for each row, for example, needs
    the positions of the rows.
    """
    (body,) = e.blocks
    consts, carry = scan_counts(e.params)
    known = {*body.inputs[:consts], *body.inputs[consts + carry :]}
    early = list[Equation]()
    for q in body.equations:
        values = {x for x in q.inputs if isinstance(x, Value)}
        if q.rule is None or q.mark is not None:
            continue
        if q.rule.passes:  # a barrier: each result depends on one operand
            early.append(q)
            known.update(v for x, v in zip(q.inputs, q.outputs, strict=True) if x in known)
        elif is_pure(q) and values <= known:
            early.append(q)
            known.update(q.outputs)
    moved = [q for q in early if (q.name, user_line(q.source_info)) == (name, line)]
    needed, before = {v for q in moved for v in q.outputs}, list[Equation]()
    for q in reversed(early):
        if not needed.isdisjoint(q.outputs):
            before.insert(0, q)
            needed.update(x for x in q.inputs if isinstance(x, Value) and x in known)
    others = [q for q in body.equations if q not in moved]
    return _split(e, builder, others, before=before, made=[v for q in moved for v in q.outputs]) if moved else None


def _split(
    e: Equation,
    builder: Builder,
    others: Sequence[Equation],
    *,
    once: Sequence[Equation] = (),
    before: Sequence[Equation] = (),
    made: Sequence[Value] = (),
) -> list[Equation]:
    """A scan of ``others``. ``once`` runs before it, and ``before``, which makes ``made``, in a scan of its own."""
    (body,) = e.blocks
    consts, carry = scan_counts(e.params)
    slices = body.inputs[consts + carry :]
    inputs = {x for q in before for x in q.inputs}
    read = [i for i, v in enumerate(slices) if v in inputs]
    params = {name: e.params[name] for name in ("length", "reverse", "unroll")}

    def loops(*operands: Any) -> list[Any]:
        shared = dict(zip(body.inputs[:consts], operands, strict=False))
        Interpreter().evaluate(once, shared)
        start, stacks = list(operands[consts : consts + carry]), list(operands[consts + carry :])

        def first(_: None, own: Any) -> Any:
            env = shared | {slices[i]: x for i, x in zip(read, own, strict=True)}
            for q in before:
                if q.rule is not None and q.rule.passes:
                    env.update((v, env[x]) for x, v in zip(q.inputs, q.outputs, strict=True) if x in env)
                else:
                    Interpreter().evaluate([q], env)
            return None, [value_of(v, env) for v in made]

        def second(carried: Any, own: Any) -> Any:
            env = shared | dict(zip((*body.inputs[consts:], *made), (*carried, *own), strict=True))
            Interpreter().evaluate(others, env)
            out = [value_of(v, env) for v in body.outputs]
            return out[:carry], out[carry:]

        if made:
            stacks += lax.scan(first, None, [stacks[i] for i in read], length=e.params["length"])[1]
        end, stacked = lax.scan(second, start, stacks, **params)
        return [*end, *stacked]

    return written(builder, loops, e.inputs, e.outputs, e)


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
