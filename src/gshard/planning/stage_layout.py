"""Cuts stacks of layers and batches into stages, rounds and micro-batches, and joins them again.

A stack of layers ``[length, ...]`` is ``[rounds, stages, layers, ...]``. Micro-batch ``m`` has the rows ``m, m +
micro_batches, ...``, so a batch that other mesh axes split stays where it is. A stack by turns ``[turns, stages,
layers, ...]`` has the slices for one micro-batch as a pipeline makes and reads them (``planning.pipeline_loop``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from gshard.core.mark import Mark
from gshard.core.pipeline_schedule import Schedule
from gshard.language.mark_primitive import bind_mark
from gshard.planning.micro_batches import Rows


@dataclasses.dataclass(frozen=True, slots=True)
class StageLayout:
    """The stages of a pipeline."""

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
