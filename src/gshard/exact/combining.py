"""Operators that combine elements of an array: reductions, order, products, windows and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gshard.exact.movement import combined_at, grouped, padded
from gshard.exact.numbers import Field, Value
from gshard.exact.operations import (
    COMBINE,
    OPERATORS,
    Complex,
    Operation,
    add,
    are_bits,
    as_complex,
    constants,
    is_float,
    log_of_sum,
    moved,
    mul,
    numbers,
    operator,
    reshaped,
)

# --- reductions and order


def as_reduced(o: Operation, x: Value, axes: Sequence[int], how: str) -> Value:
    """Combines the elements along dimensions (lanes are dimension 0)."""
    if how == "sum" and not are_bits(o, x):
        return numbers(o, x)[0].sum(x, tuple(axes))
    if not math.prod(x.shape[d] for d in axes):
        shape = [n for d, n in enumerate(x.shape) if d not in axes]
        return moved(lambda v: np.broadcast_to(v.reshape(-1, *(1,) * (len(shape) - 1)), shape), identity(o, x, how))
    return folded(lambda a, b: [COMBINE[how](o, *a, *b)], [x], axes)[0]


def identity(o: Operation, x: Value, how: str) -> Value:
    """The number that changes nothing if it is combined."""
    if isinstance(x, np.ndarray) and x.dtype.kind != "f":
        least, most = (False, True) if x.dtype == bool else (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)
        value = {"prod": 1, "max": least, "min": most, "and": True if x.dtype == bool else ~x.dtype.type(0)}.get(how, 0)
        return constants(o, value, (), x.dtype)
    return constants(o, {"prod": 1.0, "max": -math.inf, "min": math.inf}.get(how, 0.0), ())


Combine = Callable[[list[Value], list[Value]], Sequence[Value]]


def folded(combine: Combine, arrays: Sequence[Value], axes: Sequence[int]) -> list[Value]:
    """Combines the elements along dimensions: the first half with the second one, until one is left."""
    found = [grouped(x, axes, *([d] for d in range(1, x.ndim) if d not in axes)) for x in arrays]
    while (n := found[0].shape[1]) > 1:
        half = n // 2
        first, second, rest = ([moved(lambda v, s=s: v[:, s], x) for x in found]
                               for s in (slice(half), slice(half, 2 * half), slice(2 * half, n)))  # fmt: skip
        found = list(combine(first, second))
        if n % 2:
            found = [moved(lambda v, w: np.concatenate([v, w], 1), x, y) for x, y in zip(found, rest, strict=True)]
    return [moved(lambda v: v[:, 0], x) for x in found]


def place_of_extreme(o: Operation, x: Value, axis: int, largest: bool) -> np.ndarray:
    """The first position of the maximum or minimum along a dimension; that of the first NaN, if there is one."""
    ranks = numbers(o, x)[0].order(x)
    places = ranks.argmax(axis) if largest else ranks.argmin(axis)
    if is_float(x):
        nan = o.domain.is_nan(x)
        places = np.where(nan.any(axis), nan.argmax(axis), places)
    return np.asarray(places)


@operator("argmax", "argmin")
def _argument(o: Operation, x: Value) -> Value:
    (axis,) = o.params["axes"]
    return place_of_extreme(o, x, axis + 1, o.name == "argmax").astype(o.dtype)


OPERATORS.update({
    f"reduce_{how}": lambda o, x, how=how: as_reduced(o, x, [d + 1 for d in o.params["axes"]], how) for how in COMBINE
})  # fmt: skip


@operator("sort")
def _sort(o: Operation, *arrays: Value) -> Value:
    axis, keys = o.params["dimension"] + 1, o.params["num_keys"]
    ranks = [np.moveaxis(numbers(o, x)[0].order(x), axis, -1) for x in arrays[:keys]]
    at = np.moveaxis(np.lexsort(ranks[::-1], axis=-1), -1, axis)
    return [moved(lambda v: np.take_along_axis(v, at, axis), x) for x in arrays]


@operator("top_k")
def _top_k(o: Operation, x: Value) -> Value:
    axis = o.params.get("axis", x.ndim - 2) % (x.ndim - 1) + 1
    ranks = numbers(o, x)[0].order(x)
    if is_float(x):  # NaN with a sign is the least
        ranks = np.where(o.domain.is_minus_nan(x), -(2**63), ranks)
    at = np.argsort(np.invert(ranks), axis, kind="stable")
    at = np.take(at, range(o.shapes[0][axis - 1]), axis)
    return [moved(lambda v: np.take_along_axis(v, at, axis), x), at.astype(o.dtypes[1])]


@operator("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(o: Operation, x: Value) -> Value:
    axis, step = o.params["axis"] + 1, -1 if o.params["reverse"] else 1
    combine = {"logsumexp": log_of_sum, **COMBINE}[o.name.removeprefix("cum")]
    found: list[Value] = []
    for i in range(x.shape[axis])[::step]:
        row = moved(lambda v, i=i: v.take([i], axis), x)
        found.append(combine(o, found[-1], row) if found else row)
    return moved(lambda *vs: np.concatenate(vs, axis), *found[::step]) if found else x


# --- products


def product(o: Operation, a: Value, b: Value) -> Value:
    """Products of matrices: ``[lanes, batch, m, k] @ [lanes, batch, k, n]``."""
    kind, (a, b) = numbers(o, a, b)
    found = kind.dot(a, b)
    return found if is_float(found) or isinstance(found, Complex) else found.astype(o.dtype)


def contracted(o: Operation, a: Value, of_a: Sequence[Any], b: Value, of_b: Sequence[Any]) -> Value:
    """Contracts arrays; ``of_a`` and ``of_b`` are the batch dimensions, the free ones, and those that are summed."""
    (batch, rows, summed), (of_batch, columns, other) = of_a, of_b
    found = product(o, grouped(a, batch, rows, summed), grouped(b, of_batch, other, columns))
    sizes = (*(a.shape[d] for d in (*batch, *rows)), *(b.shape[d] for d in columns))
    return reshaped(found, (found.shape[0], *sizes))


@operator("dot_general")
def _dot_general(o: Operation, a: Value, b: Value) -> Value:
    groups = []
    for x, summed, batch in zip((a, b), *o.params["dimension_numbers"], strict=True):
        free = [d + 1 for d in range(x.ndim - 1) if d not in (*batch, *summed)]
        groups.append(([d + 1 for d in batch], free, [d + 1 for d in summed]))
    return contracted(o, a, groups[0], b, groups[1])


def windows(x: Value, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
            counts: Sequence[int], first: int) -> Value:  # fmt: skip
    """Windows along dimensions from ``first`` on: each becomes two dimensions, (number of windows, window)."""

    def take(v: np.ndarray) -> np.ndarray:
        for i, (size, stride, dilation, count) in enumerate(zip(sizes, strides, dilations, counts, strict=True)):
            axis = first + 2 * i
            at = np.arange(count)[:, None] * stride + np.arange(size)[None] * dilation
            v = np.take(v, at, axis)
        return v

    return moved(take, x)


@operator("conv_general_dilated")
def _convolution(o: Operation, x: Value, kernel: Value) -> Value:
    params = o.params
    lhs, rhs, out = params["dimension_numbers"]
    space = len(lhs) - 2
    x = moved(lambda v: v.transpose(0, *(d + 1 for d in lhs)), x)  # lanes, batch, features, space
    kernel = moved(lambda v: v.transpose(0, *(d + 1 for d in rhs)), kernel)  # lanes, out, in, space
    config = [(0, 0, 0)] * 2
    for (low, high), n, dilation in zip(params["padding"], x.shape[3:], params["lhs_dilation"], strict=True):
        config.append((low, high, dilation - 1 if n else 0))
    x = padded(x, config, identity(o, x, "sum"))
    sizes, counts = kernel.shape[3:], [o.shape[d] for d in out[2:]]
    x = windows(x, sizes, params["window_strides"], params["rhs_dilation"], counts, 3)
    groups, of_batch = params["feature_group_count"], params["batch_group_count"]
    both = groups * of_batch
    (lanes, batch, features), (outputs, inputs) = x.shape[:3], kernel.shape[1:3]
    x = reshaped(x, (lanes, of_batch, batch // of_batch, groups, features // groups, *x.shape[3:]))
    kernel = reshaped(kernel, (lanes, both, outputs // both, inputs, *sizes))
    places, inside = range(5, 5 + 2 * space, 2), range(6, 6 + 2 * space, 2)
    found = contracted(o, x, ((1, 3), (2, *places), (4, *inside)), kernel, ((1,), (2,), range(3, 4 + space)))
    order = (0, 3, 1, 2, 4 + space, *range(4, 4 + space))  # lanes, batch, groups, features, space
    found = moved(lambda v: v.transpose(order).reshape(lanes, batch // of_batch, outputs, *counts), found)
    return moved(lambda v: v.transpose(0, *(d + 1 for d in np.argsort(out))), found)


def padded_windows(o: Operation, x: Value, fill: Value) -> Value:
    """The windows of a reduction of windows: ``[lanes, number of windows, window, ...]``."""
    p, ones = o.params, [1] * (x.ndim - 1)
    between = p.get("base_dilation", ones)
    x = padded(x, [(a, b, n - 1) for (a, b), n in zip(p["padding"], between, strict=True)], fill)
    counts = o.shape if "base_dilation" in p else o.in_shapes[0]
    return windows(x, p["window_dimensions"], p["window_strides"], p.get("window_dilation", ones), counts, 1)


@operator("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(o: Operation, x: Value) -> Value:
    how = o.name.removeprefix("reduce_window_")
    return as_reduced(o, padded_windows(o, x, identity(o, x, how)), range(2, 2 * x.ndim - 1, 2), how)


@operator("select_and_scatter_add")
def _select_and_scatter_add(o: Operation, source: Value, x: Value) -> Value:
    fill = identity(o, x, "max" if o.params["select_prim"].name == "ge" else "min")
    inside, ndim = padded_windows(o, x, fill), x.ndim - 1
    # In the same windows: the place of each element, and -1 in the padding.
    places = padded_windows(o, np.arange(math.prod(x.shape[1:])).reshape(1, *x.shape[1:]), np.full(1, -1))
    order, size = [0, *range(1, 2 * ndim, 2), *range(2, 2 * ndim + 1, 2)], math.prod(o.params["window_dimensions"])
    rows = lambda v: v.transpose(order).reshape(len(v), *source.shape[1:], size)  # noqa: E731
    flat, places = moved(rows, inside), rows(places)
    chosen = place_of_extreme(o, flat, -1, o.params["select_prim"].name == "ge")[..., None]
    at = np.take_along_axis(np.broadcast_to(places, flat.shape), chosen, -1).reshape(o.lanes, -1)
    target = constants(o, 0.0, (math.prod(x.shape[1:]),))
    return reshaped(combined_at(o, target, at, reshaped(source, (o.lanes, -1)), add), x.shape)


# --- Fourier transforms: products with a table. gshard assumes only that the table is symmetric


@operator("fft")
def _fft(o: Operation, x: Value) -> Value:
    kind, lengths = str(o.params["fft_type"]).rpartition(".")[2].lower(), o.params["fft_lengths"]
    kind = {"0": "fft", "1": "ifft", "2": "rfft", "3": "irfft"}.get(kind, kind)
    axes = list(range(x.ndim - len(lengths), x.ndim))
    if kind == "rfft":
        half = lengths[-1] // 2 + 1
        last = axes.pop()
        x = moved(lambda v: v.take(range(half), last), _transformed(o, x, last, lengths[-1], -1))
    for axis in axes[:-1] if kind == "irfft" else axes:
        x = _transformed(o, x, axis, x.shape[axis], 1 if "i" in kind else -1)
    if kind == "irfft":
        n = lengths[-1]
        last = x.ndim - 1
        at = np.minimum(np.arange(n), n - np.arange(n))
        signs = np.where(at == np.arange(n), 1.0, -1.0).reshape([-1 if d == last else 1 for d in range(x.ndim)])
        full = moved(lambda v: v.take(at, last), as_complex(x))
        x = Complex(full.real, mul(o, full.imag, o.domain.constant(signs, np.float32)))
        return _transformed(o, x, last, n, 1).real
    return x


def _transformed(o: Operation, x: Value, axis: int, n: int, sign: int) -> Complex:
    places = np.outer(np.arange(n), np.arange(n)) % n
    near, d = np.minimum(places, n - places), o.domain
    cosine: Any
    sine: Any
    if isinstance(d, Field):
        lanes = np.broadcast_to(near, (o.lanes, 1, n, n))
        cosine, sine = (d.function(f"{f} of {n}", lanes) for f in ("cosine", "sine"))
        cosine = moved(lambda v, w: np.where(near == 0, w, v), cosine, constants(o, 1.0, (1, 1, 1)))
    else:
        cosine, sine = (np.broadcast_to(f(2 * np.pi * near / n), (o.lanes, 1, n, n)) for f in (np.cos, np.sin))
    signs = sign * np.where(places == near, 1.0, -1.0) * (2 * places % n != 0)
    scale = np.ones((n, n)) / (n if sign > 0 else 1)
    cosine, sine = (mul(o, t, d.constant((k * scale)[None, None], np.float64)) for t, k in ((cosine, 1), (sine, signs)))
    others = [n for i, n in enumerate(x.shape) if i not in (0, axis)]
    rows = moved(lambda v: np.moveaxis(v, axis, -1).reshape(len(v), 1, math.prod(others), n), x)
    if isinstance(x, Complex):
        found = product(o, rows, Complex(cosine, sine))
    else:
        found = Complex(product(o, rows, cosine), product(o, rows, sine))
    return moved(lambda v: np.moveaxis(v.reshape(len(v), *others, n), -1, axis), found)
