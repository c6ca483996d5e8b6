"""Folds an equation into the one that reads it: pads, transpositions, concatenations and scatters."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import identity
from gshard.core.jax_adapter import bind
from gshard.core.program import Constant, Equation
from gshard.rewrite.driver import at
from gshard.rewrite.equation_graph import Graph, Others, again
from gshard.rules.shape import index_of
from gshard.rules.window import MONOIDS

# Folds a pad into the reduction over windows that reads it.


@at(*MONOIDS)
def fold_pad_into_window(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """Replaces ``reduce_window_sum(pad(x, 0))`` by a ``reduce_window_sum`` of ``x`` with more padding."""
    pad = graph.producer(e.inputs[0], "pad")
    padding = None if pad is None else _padding(e, pad)
    return None if pad is None or padding is None else [graph.changed(e, pad.inputs[:1], **padding)]


def _padding(e: Equation, pad: Equation) -> dict[str, Any] | None:
    """The parameters of a window reduction that includes the pad; None if there is none."""
    number, config = pad.inputs[1], [tuple(map(int, c)) for c in pad.params["padding_config"]]
    unit = identity(MONOIDS[e.name], e.outputs[0].dtype)
    if not isinstance(number, Constant) or not np.all(np.asarray(number.value) == unit):
        return None
    if any(low < 0 or high < 0 for low, high, _ in config) or any(n != 1 for n in e.params["base_dilation"]):
        return None
    padding = zip(e.params["padding"], config, strict=True)
    return {
        "padding": tuple((a + low, b + high) for (a, b), (low, high, _) in padding),
        "base_dilation": tuple(interior + 1 for _, _, interior in config),
    }


# Replaces a sum over a dimension that was scattered into zeros by a sum of the updates.


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


# Folds a transpose of a product into the product, by swapping its operands.


@at("transpose")
def transpose_of_dot(graph: Graph, e: Equation) -> Others | None:
    """Replaces ``transpose(dot_general(a, b))`` by ``dot_general(b, a)``, if nothing else reads the product."""
    dot = graph.producer(e.inputs[0], "dot_general")
    if dot is None or not graph.is_read_once(e.inputs[0]) or (params := _swapped(dot, e)) is None:
        return None
    product = graph.writer.equation(dot.primitive, params, dot.inputs[::-1], e.outputs, dot.source_info)
    return {dot: [product], e: []}


def _swapped(dot: Equation, transpose: Equation) -> dict[str, Any] | None:
    """The parameters of the product with swapped operands, if the transpose exactly undoes the swap; otherwise None."""
    summed, batch = dot.params["dimension_numbers"]
    lhs, rhs = (len(x.shape) - len(own) for x, own in zip(dot.inputs, summed, strict=True))
    shared = len(batch[0])
    order = (*range(shared), *range(lhs, lhs + rhs - shared), *range(shared, lhs))
    precision = dot.params["precision"]
    is_per_operand = precision is None or isinstance(precision, tuple | lax.Precision)  # or the default
    if tuple(transpose.params["permutation"]) != order or not is_per_operand:
        return None
    if isinstance(precision, tuple):
        precision = precision[::-1]
    return {**dot.params, "dimension_numbers": (summed[::-1], batch[::-1]), "precision": precision}


# Folds a concatenation into a product: arrays that are joined for one product, whose result is cut again.

_MOST = 8  # largest number of joined arrays: more products (of a stack of rows) would start more kernels than they save


@at("dot_general")
def dots_of_parts(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """Replaces a product of joined arrays by products of these: by their sum, or if each reader takes one part."""
    (summed, batch), out = e.params["dimension_numbers"], e.outputs[0]
    joined = [graph.producer(x, "concatenate") for x in e.inputs]
    dims = [-1 if c is None else c.params["dimension"] for c in joined]
    parts = [() if c is None else c.inputs for c in joined]
    ends = [[*itertools.accumulate(x.shape[d] for x in own)] for own, d in zip(parts, dims, strict=True)]
    if max(map(len, parts)) > _MOST:
        return None
    if None not in joined and tuple(dims) in zip(*summed, strict=True) and ends[0] == ends[1]:
        dtype = np.promote_types(out.dtype, np.float32) if jnp.issubdtype(out.dtype, jnp.floating) else out.dtype
        count = len(ends[0])

        def total(*arrays: Any) -> Any:
            pairs = zip(arrays[:count], arrays[count:], strict=True)
            dots = (again(e, pair, preferred_element_type=dtype) for pair in pairs)
            return functools.reduce(jnp.add, dots).astype(out.dtype)  # of truth values: whether any is true

        return graph.write(total, (*parts[0], *parts[1]), e.outputs, e)
    first = len(batch[0])
    for side, (own, d) in enumerate(zip(parts, dims, strict=True)):
        free = [k for k in range(len(e.inputs[side].shape)) if k not in (*summed[side], *batch[side])]
        dim = first + free.index(d) if d in free else None
        if (
            dim is not None
            and out not in graph.outputs
            and all(_takes_part(reader, dim, ends[side]) for reader in graph.readers(out))
        ):
            return graph.write(functools.partial(_dots, e, side, dim), (e.inputs[1 - side], *own), e.outputs, e)
        first += len(free)
    return None


def _dots(e: Equation, side: int, dim: int, other: Any, *parts: Any) -> Any:
    return lax.concatenate([again(e, (other, part) if side else (part, other)) for part in parts], dim)


def _takes_part(e: Equation, dim: int, ends: Sequence[int]) -> bool:
    """Whether each result of an equation has elements of one part of a dimension of its operand."""
    for index in index_of(e) or [()]:
        spans = index[dim] if index else ()
        parts = [bisect.bisect(ends, i) for s in spans for i in (s.start, s.start + s.step * (s.count - 1))]
        if len(parts) != 2 or parts[0] != parts[1]:
            return False
    return True
