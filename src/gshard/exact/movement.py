"""Operators that move elements: shapes, slices, gather and scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from gshard.exact.numbers import Value
from gshard.exact.operations import (
    COMBINE,
    OPERATORS,
    Complex,
    Operation,
    Operator,
    constants,
    is_float,
    moved,
    neg,
    operator,
    reshaped,
)

# --- shapes and slices


def grouped(x: Value, *groups: Sequence[int]) -> Value:
    """The dimensions in another order, those of a group as one. Lanes, dimension 0, stay in front."""
    order, shape = [d for group in groups for d in group], [math.prod(x.shape[d] for d in group) for group in groups]
    return moved(lambda v: v.transpose(0, *order).reshape(len(v), *shape), x)


@operator("reshape")
def _reshape(o: Operation, x: Value) -> Value:
    dimensions = o.params.get("dimensions")
    order = range(x.ndim) if dimensions is None else (0, *(d + 1 for d in dimensions))
    return moved(lambda v: v.transpose(order).reshape(len(v), *o.shape), x)


@operator("broadcast_in_dim")
def _broadcast_in_dim(o: Operation, x: Value, *_: Value) -> Value:
    sizes = dict(zip(o.params["broadcast_dimensions"], x.shape[1:], strict=True))
    shape = [sizes.get(d, 1) for d in range(len(o.shape))]
    return moved(lambda v: np.broadcast_to(v.reshape(len(v), *shape), (len(v), *o.shape)), x)


@operator("iota")
def _iota(o: Operation, *_: Value) -> Value:
    numbers = np.broadcast_to(_along(o.shape, o.params["dimension"]), (o.lanes, *o.shape))
    return o.domain.from_ints(numbers) if jax.dtypes.issubdtype(o.dtype, np.floating) else numbers.astype(o.dtype)


def _along(shape: Sequence[int], d: int) -> np.ndarray:
    """Positions along a dimension, ``[1, ..., 1, n, 1, ..., 1]``."""
    return np.arange(shape[d]).reshape([-1 if e == d else 1 for e in range(len(shape))])


@operator("slice")
def _slice(o: Operation, x: Value) -> Value:
    starts = o.params["start_indices"]
    steps = o.params["strides"] or (1,) * len(starts)
    at = tuple(slice(a, a + (n - 1) * s + 1 if n else a, s) for a, s, n in zip(starts, steps, o.shape, strict=True))
    return moved(lambda v: v[(slice(None), *at)], x)


def padded(x: Value, config: Sequence[tuple[int, int, int]], fill: Value, shape: Sequence[int] | None = None) -> Value:
    """Pads the dimensions after the lanes: (before, after, between). ``shape``: that of the result."""

    def pad(v: np.ndarray, f: np.ndarray) -> np.ndarray:
        for d, (low, high, inner) in enumerate(config, 1):
            n = v.shape[d]
            size = low + high + n + max(n - 1, 0) * inner if shape is None else shape[d - 1]
            at, between = np.divmod(np.arange(size) - low, inner + 1)
            at = np.where((between == 0) & (at >= 0) & (at < n), at, n)  # of what is new: that of the padding
            padding = np.broadcast_to(f.reshape(-1, *(1,) * len(config)), (len(v), *v.shape[1:d], 1, *v.shape[d + 1 :]))
            v = np.concatenate([v, padding], d).take(at, d)
        return v

    return moved(pad, x, fill)


@operator("concatenate_slices")
def _concatenate_slices(o: Operation, *arrays: Value) -> Value:
    axis = o.params["dimension"] + 1
    shape = next(x.shape for x in arrays if x.ndim > 1)

    def part(v: np.ndarray, start: int, end: int) -> np.ndarray:
        if v.ndim > 1:
            return v.take(range(start, end), axis)
        wanted = [end - start if d == axis else n for d, n in enumerate(shape)]
        return np.broadcast_to(v.reshape(-1, *(1,) * (len(shape) - 1)), wanted)

    return moved(
        lambda *vs: np.concatenate([part(v, *at) for v, at in zip(vs, o.params["slices"], strict=True)], axis), *arrays
    )


@operator("split")
def _split(o: Operation, x: Value) -> Value:
    axis = o.params["axis"] + 1
    ends = np.cumsum([shape[axis - 1] for shape in o.shapes])[:-1]
    return [moved(lambda v, i=i: np.split(v, ends, axis)[i], x) for i in range(len(o.shapes))]


OPERATORS.update(
    {
        **dict.fromkeys(("squeeze", "expand_dims"), lambda o, x: reshaped(x, (x.shape[0], *o.shape))),
        "transpose": lambda o, x: moved(lambda v: v.transpose(0, *(d + 1 for d in o.params["permutation"])), x),
        "rev": lambda o, x: moved(lambda v: np.flip(v, tuple(d + 1 for d in o.params["dimensions"])), x),
        "tile": lambda o, x: moved(lambda v: np.tile(v, (1, *o.params["reps"])), x),
        "pad": lambda o, x, fill: padded(x, o.params["padding_config"], fill, o.shape),
        "concatenate": lambda o, *xs: moved(lambda *vs: np.concatenate(vs, o.params["dimension"] + 1), *xs),
        "stack": lambda o, *xs: moved(lambda *vs: np.stack(vs, o.params["axis"] + 1), *xs),
        "unstack": lambda o, x: [
            moved(lambda v, i=i: v.take(i, o.params["axis"] + 1), x) for i in range(len(o.shapes))],
    }
)  # fmt: skip


# --- windows at positions known at run time


def _places(
    shape: Sequence[int], indices: np.ndarray, sizes: Sequence[int], index_map: Sequence[int], clips: bool,
    batching: Sequence[int] = (), of_indices: Sequence[int] = (), collapsed: Sequence[int] = (),
) -> np.ndarray:  # fmt: skip
    """Flat places ``[lanes, *batch, *window]`` in arrays of a shape; -1 in windows that are not inside."""
    starts = np.zeros((*indices.shape[:-1], len(shape)), np.int64)
    starts[..., list(index_map)] = indices
    for d, e in zip(batching, of_indices, strict=True):
        starts[..., d] = _along(indices.shape[1:-1], e)
    limits = np.array([n - s for n, s in zip(shape, sizes, strict=True)], np.int64)
    if clips:
        starts = np.clip(starts, 0, np.maximum(limits, 0))
    strides = np.array([math.prod(shape[d + 1 :]) for d in range(len(shape))], np.int64)
    kept = [d for d in range(len(shape)) if d not in (*collapsed, *batching)]
    window = np.zeros((1,) * len(kept), np.int64)
    for i, d in enumerate(kept):
        window = window + _along([sizes[k] for k in kept], i) * strides[d]
    of_window = (..., *(None,) * len(kept))
    inside: Any = ((starts >= 0) & (starts <= limits)).all(-1)
    return np.where(inside[of_window], (starts * strides).sum(-1)[of_window] + window, -1)


def _taken(x: Value, places: np.ndarray) -> Value:
    lanes = np.arange(len(places)).reshape(-1, *(1,) * (places.ndim - 1))
    return moved(lambda v: v.reshape(len(v), -1)[lanes, np.maximum(places, 0)], x)


def combined_at(o: Operation, target: Value, places: np.ndarray, updates: Value, combine: Operator | None) -> Value:
    """Combines updates ``[lanes, n]`` with elements ``[lanes, m]`` at places.

    A place of -1 is nowhere. Without ``combine``, updates replace elements, the last one of a place last.
    """
    lanes, size = np.arange(len(places))[:, None], target.shape[1]
    places = np.where(places < 0, size, places)
    numbers = np.broadcast_to(np.arange(places.shape[1]), places.shape)
    while (places < size).any():
        source = np.full((len(places), size + 1), -1)  # of each element: the first update, or the last one
        step = 1 if combine is None else -1
        source[lanes, places[:, ::step]] = numbers[:, ::step]
        source = source[:, :size]
        new = _taken(updates, source)
        new = new if combine is None else combine(o, target, new)
        target = moved(lambda a, b, s=source: np.where(s >= 0, b, a), target, new)
        row, column = np.nonzero(source >= 0)
        places[row, source[row, column]] = size
        if combine is None:
            break
    return target


def _flat(x: Value) -> Value:
    return reshaped(x, (x.shape[0], math.prod(x.shape[1:])))


@operator("dynamic_slice", "dynamic_update_slice")
def _dynamic(o: Operation, x: Value, *operands: Value) -> Value:
    writes = o.name == "dynamic_update_slice"
    indices = np.stack(operands[writes:], -1).astype(np.int64) if x.ndim > 1 else np.zeros((o.lanes, 0), np.int64)
    sizes = operands[0].shape[1:] if writes else o.shape
    places = _places(x.shape[1:], indices, sizes, range(x.ndim - 1), True)
    if not writes:
        return _taken(x, places)
    return reshaped(combined_at(o, _flat(x), places.reshape(len(places), -1), _flat(operands[0]), None), x.shape)


@operator("gather")
def _gather(o: Operation, x: Value, indices: Value) -> Value:
    n = o.params["dimension_numbers"]
    sizes = [min(s, m) for s, m in zip(o.params["slice_sizes"], x.shape[1:], strict=True)]
    clips = o.params["mode"] in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    places = _places(
        x.shape[1:], indices, sizes, n.start_index_map, clips, n.operand_batching_dims, n.start_indices_batching_dims,
        n.collapsed_slice_dims,
    )  # fmt: skip
    order, window = iter(range(1, indices.ndim - 1)), iter(range(indices.ndim - 1, places.ndim))
    places = places.transpose(0, *(next(window if d in n.offset_dims else order) for d in range(places.ndim - 1)))
    found = _taken(x, places)
    return found if (places >= 0).all() else moved(lambda v, f: np.where(places >= 0, v, f), found, _fill(o, found))


def _fill(o: Operation, x: Value) -> Value:
    value, shape = o.params["fill_value"], (1,) * (x.ndim - 1)
    if is_float(x) or isinstance(x, Complex):
        return constants(o, math.nan if value is None else value, shape)
    if value is None:
        value = True if x.dtype == bool else np.iinfo(x.dtype).min if x.dtype.kind == "i" else np.iinfo(x.dtype).max
    return constants(o, value, shape, x.dtype)


@operator("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter_add", "scatter_mul",
          "scatter_min", "scatter_max", "scatter-sub", "scatter_sub")  # fmt: skip
def _scatter(o: Operation, x: Value, indices: Value, updates: Value) -> Value:
    n = o.params["dimension_numbers"]
    windows = [d + 1 for d in n.update_window_dims]
    window = iter(updates.shape[d] for d in windows)
    single = (*n.inserted_window_dims, *n.operand_batching_dims)
    sizes = [1 if d in single else next(window) for d in range(x.ndim - 1)]
    places = _places(
        x.shape[1:], indices, sizes, n.scatter_dims_to_operand_dims, o.params["mode"] == lax.GatherScatterMode.CLIP,
        n.operand_batching_dims, n.scatter_indices_batching_dims, n.inserted_window_dims,
    )  # fmt: skip
    order = [0, *(d for d in range(1, updates.ndim) if d not in windows), *windows]
    ordered = moved(lambda v: v.transpose(order), updates)
    how = {"add": "sum", "mul": "prod"}.get(o.name[len("scatter") + 1 :], o.name[len("scatter") + 1 :])
    if how == "sub":
        ordered, how = neg(o, ordered), "sum"
    return reshaped(
        combined_at(o, _flat(x), places.reshape(len(places), -1), _flat(ordered), COMBINE.get(how)), x.shape
    )
