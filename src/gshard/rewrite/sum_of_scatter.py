"""Sums of updates: a sum along a dimension of what was scattered into zeros along it is a sum of the updates.

The gradient of a look-up in each row is zeros with one update in each row. Where rows are normalised (the cross entropy
of labels), it is summed along the row, which is the sum of the row's updates: nobody needs all of the row for that.

    zeros(8, n).at[arange(8), labels].add(u).sum(1)        where(0 <= labels < n, u, 0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax

from gshard.core.program import Constant, Equation, Value
from gshard.rewrite.cse import is_repeatable
from gshard.rewrite.dce import without_unread

Array = Value | Constant


def sums_of_updates(
    equations: Iterable[Equation],
    outputs: Sequence[Array],
    fresh: Callable[[tuple[int, ...], Any], Value],
    equation: Callable[..., Equation],
) -> list[Equation]:
    """The equations with sums of updates for sums of what they were scattered to.

    Args:
        equations: of one block.
        outputs: the block's results.
        fresh: a new value of a shape and a dtype.
        equation: an equation of a primitive, its parameters, operands, results, and the source that it is blamed on.
    """
    equations = list(equations)
    producers: dict[Any, Equation] = {v: e for e in equations for v in e.outputs}
    out: list[Equation] = []
    for e in equations:
        scattered, negated = _scattered(e, producers)
        axes = None if scattered is None else _summed_with(e, scattered, producers)
        if scattered is None or axes is None:
            out.append(e)
            continue
        x, (result,) = _valid(scattered, e, fresh, equation, out), e.outputs
        total = fresh(result.shape, result.dtype) if negated else result
        out.append(equation(e.primitive, {**e.params, "axes": axes}, (x,), (total,), e.source_info))
        if negated:
            out.append(equation(lax.neg_p, {}, (total,), (result,), e.source_info))
    return out if len(out) == len(equations) else without_unread(out, outputs, is_repeatable)


def _scattered(e: Equation, producers: dict[Any, Equation]) -> tuple[Equation | None, bool]:
    """What made that of which an equation is the sum, and whether it was negated."""
    if e.name != "reduce_sum" or e.mark is not None:
        return None, False
    maker, negated = producers.get(e.inputs[0]), False
    while maker is not None and maker.name == "neg":
        maker, negated = producers.get(maker.inputs[0]), not negated
    return (maker if maker is not None and maker.name == "scatter-add" else None), negated


def _summed_with(e: Equation, scattered: Equation, producers: dict[Any, Equation]) -> tuple[int, ...] | None:
    """The dimensions of updates over which to sum them; None if that is not all there is to it."""
    numbers, zeros = scattered.params["dimension_numbers"], producers.get(scattered.inputs[0])
    made_of = zeros.inputs[0] if zeros is not None and zeros.name == "broadcast_in_dim" else None
    if not isinstance(made_of, Constant) or made_of.number != 0.0 or np.signbit(made_of.number):
        return None
    batch, beside = tuple(numbers.operand_batching_dims), tuple(numbers.scatter_indices_batching_dims)
    dims = tuple(numbers.scatter_dims_to_operand_dims)
    alone = {*batch, *dims} == set(range(len(scattered.outputs[0].shape))) and not numbers.update_window_dims
    in_order = batch == tuple(sorted(batch)) and beside == tuple(sorted(beside))
    if not alone or not in_order or len(dims) != 1 or tuple(e.params["axes"]) != dims:
        return None
    return tuple(d for d in range(len(scattered.inputs[2].shape)) if d not in beside) or None


def _valid(
    scattered: Equation,
    e: Equation,
    fresh: Callable[..., Value],
    equation: Callable[..., Equation],
    out: list[Equation],
) -> Array:
    """The updates, with zeros for those of which the place is out of range, and for -0.0, which became 0.0 in zeros."""
    _, indices, updates = scattered.inputs
    (dim,), shape = scattered.params["dimension_numbers"].scatter_dims_to_operand_dims, updates.shape

    def made(primitive: Any, operands: tuple[Array, ...], dtype: Any, **params: Any) -> Value:
        value = fresh(shape, np.dtype(dtype))
        out.append(equation(primitive, params, operands, (value,), e.source_info))
        return value

    number = Constant(np.zeros((), updates.dtype))
    zeros = made(lax.broadcast_in_dim_p, (number,), updates.dtype, shape=shape, broadcast_dimensions=(), sharding=None)
    counts = made(lax.ne_p, (updates, number), bool)
    if scattered.params["mode"] == lax.GatherScatterMode.CLIP:
        return made(lax.select_n_p, (counts, zeros, updates), updates.dtype)
    at = made(lax.squeeze_p, (indices,), indices.dtype, dimensions=(len(shape),))
    last = min(scattered.outputs[0].shape[dim] - 1, np.iinfo(indices.dtype).max)
    least, end = (Constant(np.asarray(n, indices.dtype)) for n in (0, last))
    inside = made(lax.and_p, (made(lax.ge_p, (at, least), bool), made(lax.le_p, (at, end), bool)), bool)
    return made(lax.select_n_p, (made(lax.and_p, (inside, counts), bool), zeros, updates), updates.dtype)
