"""Operators that move elements: shapes, slices, gather and scatter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

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
    add,
    is_float,
    moved,
    mul,
    neg,
    operator,
    reshaped,
)

# --- moving elements


@operator("reshape")
def _reshape(o: Operation, x: Value) -> Value:
    dimensions = o.params.get("dimensions")
    if dimensions is not None:
        x = moved(lambda v: v.transpose(0, *(d + 1 for d in dimensions)), x)
    return reshaped(x, (x.shape[0], *o.shape))


@operator("broadcast_in_dim")
def _broadcast_in_dim(o: Operation, x: Value, *_: Value) -> Value:
    shape = [1] * len(o.shape)
    for d, n in zip(o.params["broadcast_dimensions"], x.shape[1:], strict=True):
        shape[d] = n
    return moved(lambda v: np.broadcast_to(v.reshape(len(v), *shape), (len(v), *o.shape)), x)


@operator("iota")
def _iota(o: Operation, *_: Value) -> Value:
    dimension = o.params["dimension"]
    column = np.arange(o.shape[dimension]).reshape([-1 if d == dimension else 1 for d in range(len(o.shape))])
    numbers = np.broadcast_to(column, (o.lanes, *o.shape))
    return o.domain.from_ints(numbers) if jax.dtypes.issubdtype(o.dtype, np.floating) else numbers.astype(o.dtype)


@operator("slice")
def _slice(o: Operation, x: Value) -> Value:
    starts = o.params["start_indices"]
    steps = o.params["strides"] or (1,) * len(starts)
    at = tuple(slice(a, a + (n - 1) * s + 1 if n else a, s) for a, s, n in zip(starts, steps, o.shape, strict=True))
    return moved(lambda v: v[(slice(None), *at)], x)


@operator("pad")
def _pad(o: Operation, x: Value, fill: Value) -> Value:
    config = o.params["padding_config"]

    def pad(v: np.ndarray, f: np.ndarray) -> np.ndarray:
        result = np.broadcast_to(f.reshape(-1, *(1,) * len(config)), (len(v), *o.shape)).astype(v.dtype)
        at, read = [slice(None)], [slice(None)]
        for (low, _, inner), n, size in zip(config, v.shape[1:], o.shape, strict=True):
            step = inner + 1
            first = max(0, -(low // step)) if low < 0 else 0
            last = max(min(n, (size - low + step - 1) // step), first)
            read.append(slice(first, last))
            begin = low + first * step
            at.append(slice(begin, begin + (last - first - 1) * step + 1 if last > first else begin, step))
        result[tuple(at)] = v[tuple(read)]
        return result

    return moved(pad, x, fill)


def padded(o: Operation, x: Value, config: Sequence[tuple[int, int, int]], fill: Value) -> Value:
    """Pads the dimensions after the lanes: (before, after, between)."""
    shape = tuple(
        low + high + n + max(n - 1, 0) * inner for (low, high, inner), n in zip(config, x.shape[1:], strict=True)
    )
    return _pad(dataclasses.replace(o, params={"padding_config": tuple(config)}, shapes=(shape,)), x, fill)


@operator("concatenate")
def _concatenate(o: Operation, *arrays: Value) -> Value:
    return moved(lambda *vs: np.concatenate(vs, o.params["dimension"] + 1), *arrays)


@operator("stack")
def _stack(o: Operation, *arrays: Value) -> Value:
    return moved(lambda *vs: np.stack(vs, o.params["axis"] + 1), *arrays)


@operator("unstack")
def _unstack(o: Operation, x: Value) -> list[Value]:
    axis = o.params["axis"] + 1
    return [moved(lambda v, i=i: np.take(v, i, axis), x) for i in range(x.shape[axis])]


@operator("concatenate_slices")
def _concatenate_slices(o: Operation, *arrays: Value) -> Value:
    axis = o.params["dimension"] + 1
    shape = next(x.shape for x in arrays if x.ndim > 1)
    parts = []
    for x, (start, end) in zip(arrays, o.params["slices"], strict=True):
        if x.ndim == 1:
            wanted = [end - start if d == axis else n for d, n in enumerate(shape)]
            parts.append(moved(lambda v, s=wanted: np.broadcast_to(v.reshape(-1, *(1,) * (len(s) - 1)), s), x))
        else:
            parts.append(moved(lambda v, a=start, b=end: np.take(v, range(a, b), axis), x))
    return moved(lambda *vs: np.concatenate(vs, axis), *parts)


@operator("split")
def _split(o: Operation, x: Value) -> Value:
    axis, first, found = o.params["axis"] + 1, 0, []
    for shape in o.shapes:
        n = shape[axis - 1]
        found.append(moved(lambda v, a=first, n=n: np.take(v, range(a, a + n), axis), x))
        first += n
    return found


@operator("dynamic_slice")
def _dynamic_slice(o: Operation, x: Value, *starts: Value) -> Value:
    at = _places(x, starts, o.shape)
    return moved(lambda v: v[at], x)


@operator("dynamic_update_slice")
def _dynamic_update_slice(o: Operation, x: Value, update: Value, *starts: Value) -> Value:
    at = _places(x, starts, update.shape[1:])

    def write(v: np.ndarray, u: np.ndarray) -> np.ndarray:
        result = np.array(np.broadcast_to(v, (len(u), *v.shape[1:])))
        result[at] = u
        return result

    return moved(write, x, update)


def _places(x: Value, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Indices of a part of each lane, that begins at other places on each."""
    ndim = len(sizes)
    lanes = np.arange(x.shape[0]).reshape(-1, *(1,) * ndim)
    at = [lanes]
    for d, (start, n) in enumerate(zip(starts, sizes, strict=True)):
        first = np.clip(start.astype(np.int64), 0, x.shape[d + 1] - n).reshape(-1, *(1,) * ndim)
        at.append(first + np.arange(n).reshape([-1 if e == d else 1 for e in range(ndim)])[None])
    return tuple(at)


OPERATORS.update(
    {
        "transpose": lambda o, x: moved(lambda v: v.transpose(0, *(d + 1 for d in o.params["permutation"])), x),
        "squeeze": lambda o, x: reshaped(x, (x.shape[0], *o.shape)),
        "expand_dims": lambda o, x: reshaped(x, (x.shape[0], *o.shape)),
        "rev": lambda o, x: moved(lambda v: np.flip(v, tuple(d + 1 for d in o.params["dimensions"])), x),
        "stack": lambda o, *xs: moved(lambda *vs: np.stack(vs, o.params["axis"] + 1), *xs),
        "unstack": lambda o, x: [
            moved(lambda v, i=i: np.take(v, i, o.params["axis"] + 1), x) for i in range(len(o.shapes))],
        "tile": lambda o, x: moved(lambda v: np.tile(v, (1, *o.params["reps"])), x),
    }
)  # fmt: skip


def combined_at(o: Operation, target: Value, places: np.ndarray, updates: Value, combine: Operator | None) -> Value:
    """Combines updates ``[lanes, n]`` with elements ``[lanes, m]`` at places.

    A place of -1 is nowhere. Without ``combine``, updates replace elements, the last one of a place last.
    """
    lanes, size = np.arange(len(places))[:, None], target.shape[1]
    places = np.where(places < 0, size, places)
    order = np.argsort(places, axis=1, kind="stable")
    ordered = np.take_along_axis(places, order, 1)
    turn = np.zeros_like(ordered)  # how many updates of the same place come before
    for i in range(1, ordered.shape[1]):
        turn[:, i] = np.where(ordered[:, i] == ordered[:, i - 1], turn[:, i - 1] + 1, 0)
    turn = np.where(ordered == size, -1, turn)
    for now in range(int(turn.max(initial=-1)) + 1):
        source = np.full((len(places), size + 1), -1)
        row, column = np.nonzero(turn == now)
        source[row, ordered[row, column]] = order[row, column]
        source = source[:, :size]
        read = moved(lambda v, s=source: v[lanes, np.maximum(s, 0)], updates)
        new = read if combine is None else combine(o, target, read)
        target = moved(lambda a, b, s=source: np.where(s >= 0, b, a), target, new)
    return target


# --- looking up


def _window_places(
    shape: Sequence[int], indices: np.ndarray, sizes: Sequence[int], index_map: Sequence[int], batching: Sequence[int],
    of_indices: Sequence[int], collapsed: Sequence[int], clips: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Flat places ``[lanes, *batch, *window]`` in arrays of a shape, and whether each window is inside."""
    batch = indices.shape[1:-1]
    starts = np.zeros((*indices.shape[:-1], len(shape)), np.int64)
    for i, d in enumerate(index_map):
        starts[..., d] = indices[..., i]
    for d, e in zip(batching, of_indices, strict=True):
        starts[..., d] = np.arange(batch[e]).reshape([-1 if b == e else 1 for b in range(len(batch))])
    limits = np.array([n - s for n, s in zip(shape, sizes, strict=True)])
    inside = ((starts >= 0) & (starts <= limits)).all(-1)
    if clips:
        starts, inside = np.clip(starts, 0, np.maximum(limits, 0)), np.ones_like(inside)
    kept = [d for d in range(len(shape)) if d not in (*collapsed, *batching)]
    places = np.zeros((*indices.shape[:-1], *(1,) * len(kept)), np.int64)
    for d in range(len(shape)):
        stride = math.prod(shape[d + 1 :])
        places = places + (starts[..., d] * stride).reshape(*indices.shape[:-1], *(1,) * len(kept))
        if d in kept:
            grid = [1] * (1 + len(batch) + len(kept))
            grid[1 + len(batch) + kept.index(d)] = sizes[d]
            places = places + (np.arange(sizes[d]) * stride).reshape(grid)
    return np.asarray(places), np.asarray(inside)


@operator("gather")
def _gather(o: Operation, x: Value, indices: Value) -> Value:
    n, mode = o.params["dimension_numbers"], o.params["mode"]
    clips = mode in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    sizes = [min(s, m) for s, m in zip(o.params["slice_sizes"], x.shape[1:], strict=True)]
    places, inside = _window_places(
        x.shape[1:], indices.astype(np.int64), sizes, n.start_index_map, n.operand_batching_dims,
        n.start_indices_batching_dims, n.collapsed_slice_dims, clips,
    )  # fmt: skip
    batch = indices.ndim - 2
    order = iter(range(1, 1 + batch))
    window = iter(range(1 + batch, places.ndim))
    axes = [0, *(next(window) if d in n.offset_dims else next(order) for d in range(places.ndim - 1))]
    lanes = np.arange(len(places)).reshape(-1, *(1,) * (places.ndim - 1))
    valid = inside.reshape(*inside.shape, *(1,) * (places.ndim - inside.ndim))
    safe = np.where(valid, places, 0)
    found = moved(lambda v: v.reshape(len(v), -1)[lanes, safe].transpose(axes), x)
    if clips or inside.all():
        return found
    valid = np.broadcast_to(valid, places.shape).transpose(axes)
    return moved(lambda v, f: np.where(valid, v, f), found, _fill(o, found))


def _fill(o: Operation, x: Value) -> Value:
    value = o.params["fill_value"]
    shape = (o.lanes, *(1,) * (x.ndim - 1))
    if is_float(x):
        return o.domain.constant(np.full(shape, math.nan if value is None else value), np.float32)
    if value is None:
        value = True if x.dtype == bool else np.iinfo(x.dtype).min if x.dtype.kind == "i" else np.iinfo(x.dtype).max
    return np.full(shape, value, x.dtype)


@operator("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter_add", "scatter_mul",
          "scatter_min", "scatter_max", "scatter-sub", "scatter_sub")  # fmt: skip
def _scatter(o: Operation, x: Value, indices: Value, updates: Value) -> Value:
    n, mode = o.params["dimension_numbers"], o.params["mode"]
    shape, lanes = x.shape[1:], len(indices)
    window = iter(updates.shape[d + 1] for d in n.update_window_dims)
    single = (*n.inserted_window_dims, *n.operand_batching_dims)
    sizes = [1 if d in single else next(window) for d in range(len(shape))]
    places, inside = _window_places(
        shape, indices.astype(np.int64), sizes, n.scatter_dims_to_operand_dims, n.operand_batching_dims,
        n.scatter_indices_batching_dims, n.inserted_window_dims, mode == lax.GatherScatterMode.CLIP,
    )  # fmt: skip
    valid = inside.reshape(*inside.shape, *(1,) * (places.ndim - inside.ndim))
    places = np.where(valid, places, -1).reshape(lanes, -1)
    windows_of = [d + 1 for d in n.update_window_dims]
    order = [0, *(d for d in range(1, updates.ndim) if d not in windows_of), *windows_of]
    flat = moved(lambda v: v.transpose(order).reshape(lanes, -1), updates)
    how = o.name[len("scatter") + 1 :]
    combine = {"": None, "sub": lambda o, a, b: add(o, a, neg(o, b)), "add": add, "mul": mul}.get(how, COMBINE.get(how))
    if combine is add and not is_float(flat) and not isinstance(flat, Complex) and flat.dtype == bool:
        combine = COMBINE["or"]
    target = moved(lambda v: v.reshape(len(v), -1), x)
    return reshaped(combined_at(o, target, places, flat, combine), (lanes, *shape))
