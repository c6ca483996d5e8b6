"""Replaces a sum over a dimension that was scattered into zeros by a sum of the updates.

The gradient of a look-up in each row consists of zeros with one update in each row. If rows are normalised (the cross
entropy of labels), this gradient is summed over each row. The sum equals the sum of the updates of the row, and does
not need the row.

    zeros(8, n).at[arange(8), labels].add(u).sum(1)        where(0 <= labels < n, u, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.core.jax_adapter import bind
from gshard.core.program import Constant, Equation
from gshard.rewrite.driver import at
from gshard.rewrite.equation_graph import Graph


@at("reduce_sum")
def sum_of_scatter(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """Replaces ``reduce_sum(scatter-add(zeros, places, updates))``, perhaps negated, by ``reduce_sum(updates)``."""
    scatter, negated = graph.producer(e.inputs[0], "scatter-add", "neg"), False
    while scatter is not None and scatter.name == "neg":
        scatter, negated = graph.producer(scatter.inputs[0], "scatter-add", "neg"), not negated
    axes = None if scatter is None else _axes_of_updates(graph, e, scatter)
    if scatter is None or axes is None:
        return None
    mode, (dim,) = scatter.params["mode"], scatter.params["dimension_numbers"].scatter_dims_to_operand_dims
    size, params = scatter.outputs[0].shape[dim], {**e.params, "axes": axes}

    def total(places: Any, updates: Any) -> Any:
        (result,) = bind(e.primitive, params, [_valid(places, updates, size, mode)])
        return lax.neg(result) if negated else result

    return graph.write(total, scatter.inputs[1:], e.outputs, e)


def _axes_of_updates(graph: Graph, e: Equation, scatter: Equation) -> tuple[int, ...] | None:
    """The dimensions over which to sum the updates; None if the sum depends on more than the updates."""
    numbers, zeros = scatter.params["dimension_numbers"], graph.producer(scatter.inputs[0], "broadcast_in_dim")
    number = None if zeros is None else zeros.inputs[0]
    if not isinstance(number, Constant) or number.number != 0.0 or np.signbit(number.number):
        return None
    batch, beside = tuple(numbers.operand_batching_dims), tuple(numbers.scatter_indices_batching_dims)
    dims = tuple(numbers.scatter_dims_to_operand_dims)
    alone = {*batch, *dims} == set(range(len(scatter.outputs[0].shape))) and not numbers.update_window_dims
    in_order = batch == tuple(sorted(batch)) and beside == tuple(sorted(beside))
    if not alone or not in_order or len(dims) != 1 or tuple(e.params["axes"]) != dims:
        return None
    return tuple(d for d in range(len(scatter.inputs[2].shape)) if d not in beside) or None


def _valid(places: Any, updates: Any, size: int, mode: Any) -> Any:
    """The updates, with zeros instead of updates out of range and instead of -0.0 (0.0 + -0.0 is 0.0)."""
    zeros = jnp.zeros_like(updates)
    is_added = updates != np.zeros((), updates.dtype)
    if mode != lax.GatherScatterMode.CLIP:
        place = lax.squeeze(places, (updates.ndim,))
        last = np.asarray(min(size - 1, np.iinfo(places.dtype).max), places.dtype)
        is_added = ((place >= np.zeros((), places.dtype)) & (place <= last)) & is_added
    return lax.select(is_added, updates, zeros)
