"""Runs a scan over layers whose iterations are independent on all stages of a pipeline at once, without a bubble.

Such a loop reads stacks that a pipeline made, and only adds to its carry: the gradients of weights after
``schedule="zero_bubble"``. Each stage runs its own layers on the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Equation
from gshard.language.interpret import Interpreter
from gshard.planning.micro_batches import Rows
from gshard.planning.stage_layout import StageLayout


@dataclasses.dataclass(frozen=True, slots=True)
class StageLoop:
    """A scan with independent iterations over the layers of a pipeline.

    Attributes:
        layout: the stages.
        loop: the scan.
        rows: for each stacked operand the batch dimension of a slice, if it is a stack by turns; otherwise None.
    """

    layout: StageLayout
    loop: Equation
    rows: tuple[Rows | None, ...]

    def __call__(self, *operands: Any) -> list[Any]:
        """The results of the scan.

        Args:
            operands: those of the scan, some of them as stacks by turns.
        """
        consts, carry = scan_counts(self.loop.params)
        (body,) = self.loop.blocks
        layout = self.layout
        shapes = [v.shape for v in body.inputs[consts + carry :]]
        stacks = [
            layout.pinned(x, 1) if rows is not None else layout.pinned(layout.by_stage(x, shape), 0)
            for x, rows, shape in zip(operands[consts + carry :], self.rows, shapes, strict=True)
        ]
        count = layout.layers * layout.schedule.rounds

        def of_layer(x: Any, rows: Rows | None, shape: Sequence[int], i: Any) -> Any:
            if rows is not None:
                return layout.layer_from_turns(x, rows, i)
            return lax.dynamic_index_in_dim(x.reshape(layout.stages, count, *shape), i, 1, keepdims=False)

        def stages(sums: Sequence[Any], i: Any) -> tuple[list[Any], list[Any]]:
            slices = [of_layer(x, rows, shape, i) for x, rows, shape in zip(stacks, self.rows, shapes, strict=True)]
            out = jax.vmap(lambda own, xs: Interpreter().run(body, [*operands[:consts], *own, *xs]))(sums, slices)
            return out[:carry], out[carry:]

        zeros = [layout.pinned(jnp.zeros((layout.stages, *v.shape), v.dtype), 0) for v in body.outputs[:carry]]
        sums, made = lax.scan(stages, zeros, jnp.arange(count, dtype=jnp.int32), reverse=self.loop.params["reverse"])
        made = [
            layout.by_layer(layout.pinned(jnp.moveaxis(y, 0, 1), 0).reshape(*layout.leading, *y.shape[2:]))
            for y in made
        ]
        start = operands[consts : consts + carry]
        return [*((x + total.sum(0)).astype(x.dtype) for x, total in zip(start, sums, strict=True)), *made]
