"""Runs a scan over layers as a pipeline: a function of the operands of the scan, which JAX traces.

A scan over turns runs all stages at once, each on another micro-batch, as a ``vmap`` over the stages. After each turn a
shift along the dimension of stages hands the results on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from gshard.core.mark import Mark, Schedule
from gshard.language.mark_primitive import bind_mark
from gshard.planning.micro_batches import MicroBody, Rows


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
        return bind_mark(x, Mark("spec", spec=tuple(spec), source_text=str(self.schedule)))


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
                dtype = _wide(aval.dtype) if self.body.sums[i] else aval.dtype
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


def _wide(dtype: Any) -> Any:
    """The dtype in which values of this dtype are added up."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
