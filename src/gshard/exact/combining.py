"""Operators that combine elements of an array: reductions, order, products, windows and Fourier transforms."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from gshard.exact.movement import combined_at, padded
from gshard.exact.numbers import Reals, Value
from gshard.exact.operations import (
    COMBINE,
    OPERATORS,
    Complex,
    Operation,
    Operator,
    Undecided,
    add,
    as_floats,
    is_float,
    log_of_sum,
    moved,
    mul,
    neg,
    operator,
    reshaped,
    zeros,
    zeros_like,
)

# --- reductions and order


def as_reduced(o: Operation, x: Value, axes: Sequence[int], how: str, keep: bool = False) -> Value:
    """Combines the elements along dimensions (lanes are dimension 0)."""
    axes = tuple(axes)
    if isinstance(x, Complex) and how == "sum":
        return Complex(as_reduced(o, x.real, axes, how, keep), as_reduced(o, x.imag, axes, how, keep))
    kept = [1 if d in axes else n for d, n in enumerate(x.shape)]
    if is_float(x) and how == "sum":
        found = o.domain.sum(x, axes)
    elif is_float(x) and how in ("max", "min"):
        found = _extreme_along(o, x, axes, how)
    elif isinstance(x, Complex) or (is_float(x) and how == "prod"):
        rows = elements_along(x, axes)
        one = o.domain.constant(np.ones([n for d, n in enumerate(x.shape) if d not in axes]), np.float32)
        found = functools.reduce(functools.partial(COMBINE[how], o), rows) if rows else one
    else:
        f = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and,
             "or": np.bitwise_or, "xor": np.bitwise_xor}[how]  # fmt: skip
        if not math.prod(x.shape[d] for d in axes) and how in ("max", "min"):
            raise Undecided(f"'{o.name}' of nothing.")
        found = f.reduce(x, axis=axes, dtype=x.dtype)
    return reshaped(found, kept) if keep else found


def elements_along(x: Value, axes: Sequence[int]) -> list[Value]:
    """The elements along dimensions, one array for each position."""
    others = [d for d in range(x.ndim) if d not in axes]
    shape = [x.shape[d] for d in others]
    count = math.prod(x.shape[d] for d in axes)
    flat = moved(lambda v: v.transpose(*axes, *others).reshape(count, *shape), x)
    return [moved(lambda v, i=i: v[i], flat) for i in range(flat.shape[0])]


def _extreme_along(o: Operation, x: Value, axes: tuple[int, ...], how: str) -> Value:
    d = o.domain
    others = [i for i in range(x.ndim) if i not in axes]
    shape = [x.shape[i] for i in others]
    flat = moved(lambda v: v.transpose(*others, *axes).reshape(*shape, math.prod(v.shape[i] for i in axes)), x)
    if not flat.shape[-1]:
        return o.domain.constant(np.full(shape, -math.inf if how == "max" else math.inf), np.float32)
    at = place_of_extreme(o, flat, -1, how == "max")[..., None]
    return d.as_maximum(moved(lambda v: np.take_along_axis(v, at, -1)[..., 0], flat))


def order_of(o: Operation, x: Value) -> np.ndarray:
    """Integers in the order of the elements; NaN is the largest, and of complex numbers the real parts come first."""
    if isinstance(x, Complex):
        pairs = [order_of(o, part) for part in (x.real, x.imag)]
        return np.unique(np.stack(pairs, -1).reshape(-1, 2), axis=0, return_inverse=True)[1].reshape(x.shape)
    if not is_float(x):
        return x.astype(np.int64) if x.dtype != np.uint64 else x
    known = o.domain.decides(x)
    if known is not None:
        return np.unique(known, return_inverse=True)[1].reshape(x.shape)
    return np.where(o.domain.is_nan(x), 2**63 - 1, o.domain.rank(x))


def place_of_extreme(o: Operation, x: Value, axis: int, largest: bool) -> np.ndarray:
    """The first position of the maximum or minimum along a dimension; that of the first NaN, if there is one."""
    ranks = order_of(o, x)
    places = ranks.argmax(axis) if largest else ranks.argmin(axis)
    if is_float(x):
        nan = o.domain.is_nan(x)
        if nan.any():
            places = np.where(nan.any(axis), nan.argmax(axis), places)
    return np.asarray(places)


@operator("argmax", "argmin")
def _argument(o: Operation, x: Value) -> Value:
    (axis,) = o.params["axes"]
    return place_of_extreme(o, x, axis + 1, o.name == "argmax").astype(o.dtype)


def _reduction(o: Operation, x: Value) -> Value:
    return as_reduced(o, x, [d + 1 for d in o.params["axes"]], o.name.removeprefix("reduce_"))


OPERATORS.update({f"reduce_{how}": _reduction for how in COMBINE})


@operator("sort")
def _sort(o: Operation, *arrays: Value) -> Value:
    axis, keys = o.params["dimension"] + 1, o.params["num_keys"]
    ranks = [np.moveaxis(order_of(o, x), axis, -1) for x in arrays[:keys]]
    at = np.moveaxis(np.lexsort(ranks[::-1], axis=-1), -1, axis)
    return [moved(lambda v: np.take_along_axis(v, at, axis), x) for x in arrays]


@operator("top_k")
def _top_k(o: Operation, x: Value) -> Value:
    axis = o.params.get("axis", x.ndim - 2) % (x.ndim - 1) + 1
    ranks = order_of(o, x)
    if is_float(x):  # NaN with a sign is the least
        ranks = np.where(o.domain.is_minus_nan(x), -(2**63), ranks)
    at = np.argsort(np.invert(ranks), axis, kind="stable")
    at = np.take(at, range(o.shapes[0][axis - 1]), axis)
    return [moved(lambda v: np.take_along_axis(v, at, axis), x), at.astype(o.dtypes[1])]


@operator("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(o: Operation, x: Value) -> Value:
    axis, backwards = o.params["axis"] + 1, o.params["reverse"]
    if o.name == "cumlogsumexp":
        return _along(o, x, axis, backwards, log_of_sum)
    return _along(o, x, axis, backwards, COMBINE[o.name.removeprefix("cum")])


def _along(o: Operation, x: Value, axis: int, backwards: bool, combine: Operator) -> Value:
    order = range(x.shape[axis])[:: -1 if backwards else 1]
    found: list[Value] = []
    for i in order:
        row = moved(lambda v, i=i: np.take(v, [i], axis), x)
        found.append(combine(o, found[-1], row) if found else row)
    if not found:
        return x
    return moved(lambda *vs: np.concatenate(vs, axis), *found[:: -1 if backwards else 1])


# --- products


@operator("dot_general")
def _dot_general(o: Operation, a: Value, b: Value) -> Value:
    (ca, cb), (ba, bb) = o.params["dimension_numbers"]
    if isinstance(a, Complex) or isinstance(b, Complex):
        a, b = (x if isinstance(x, Complex) else Complex(x, zeros_like(x)) for x in (a, b))
        run = functools.partial(_dot_general, o)
        real = add(o, run(a.real, b.real), neg(o, run(a.imag, b.imag)))
        return Complex(real, add(o, run(a.real, b.imag), run(a.imag, b.real)))

    def matrices(x: Value, batch: Sequence[int], summed: Sequence[int], last: bool) -> tuple[Value, list[int]]:
        free = [d for d in range(x.ndim - 1) if d not in (*batch, *summed)]
        order = [*batch, *free, *summed] if last else [*batch, *summed, *free]
        sizes = [math.prod(x.shape[d + 1] for d in dims) for dims in (batch, free, summed)]
        shape = [sizes[0], sizes[1], sizes[2]] if last else [sizes[0], sizes[2], sizes[1]]
        f = lambda v: v.transpose(0, *(d + 1 for d in order)).reshape(len(v), *shape)  # noqa: E731
        return moved(f, x), [x.shape[d + 1] for d in free]

    left, rows = matrices(a, ba, ca, True)
    right, columns = matrices(b, bb, cb, False)
    batch = [a.shape[d + 1] for d in ba]
    if is_float(left) or is_float(right):
        found = o.domain.dot(as_floats(o, left), as_floats(o, right))
    else:
        found = np.matmul(left.astype(np.int64), right.astype(np.int64)).astype(o.dtype)
    return reshaped(found, (found.shape[0], *batch, *rows, *columns))


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
    x = padded(o, x, config, zeros(o, (), np.float32) if is_float(x) else np.zeros(o.lanes, x.dtype))
    sizes, counts = kernel.shape[3:], [o.shape[d] for d in out[2:]]
    x = windows(x, sizes, params["window_strides"], params["rhs_dilation"], counts, 3)
    groups, of_batch = params["feature_group_count"], params["batch_group_count"]
    lanes, batch, features = x.shape[:3]
    outputs, inputs = kernel.shape[1:3]
    # lanes, batch groups, batch, groups, features, (count, size) of each dimension
    split = (lanes, of_batch, batch // of_batch, groups, features // groups, *x.shape[3:])
    places, inside = [5 + 2 * i for i in range(space)], [6 + 2 * i for i in range(space)]

    def rows(v: np.ndarray) -> np.ndarray:
        v = v.reshape(split).transpose(0, 1, 3, 2, *places, 4, *inside)
        inner = features // groups * math.prod(sizes)
        return v.reshape(lanes, of_batch * groups, batch // of_batch * math.prod(counts), inner)

    both = of_batch * groups
    weights = moved(
        lambda v: v.reshape(v.shape[0], both, outputs // both, inputs * math.prod(sizes)).swapaxes(2, 3), kernel
    )
    if is_float(x):
        found = o.domain.dot(moved(rows, x), weights)
    else:
        found = np.matmul(rows(x).astype(np.int64), weights.astype(np.int64)).astype(o.dtype)
    of_result = (lanes, both, batch // of_batch, *counts, outputs // both)

    def arrange(v: np.ndarray) -> np.ndarray:
        v = v.reshape(of_result)
        v = v.transpose(0, 2, 1, v.ndim - 1, *range(3, 3 + space)).reshape(lanes, batch // of_batch, outputs, *counts)
        inverse = np.argsort(out)
        return v.transpose(0, *(d + 1 for d in inverse))

    return moved(arrange, found)


@operator("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(o: Operation, x: Value) -> Value:
    params, how = o.params, o.name.removeprefix("reduce_window_")
    fill: Value = _identity(o, x, how)
    config = [(a, b, n - 1) for (a, b), n in zip(params["padding"], params["base_dilation"], strict=True)]
    x = padded(o, x, config, fill)
    x = windows(x, params["window_dimensions"], params["window_strides"], params["window_dilation"], o.shape, 1)
    return as_reduced(o, x, range(2, x.ndim, 2), how)


def _identity(o: Operation, x: Value, how: str) -> Value:
    if how == "sum":
        return zeros(o, (), np.float32) if is_float(x) else np.zeros(o.lanes, x.dtype)
    if is_float(x):
        return o.domain.constant(np.full(o.lanes, -math.inf if how == "max" else math.inf), np.float32)
    info = np.iinfo(x.dtype)
    return np.full(o.lanes, info.min if how == "max" else info.max, x.dtype)


@operator("select_and_scatter_add")
def _select_and_scatter_add(o: Operation, source: Value, x: Value) -> Value:
    params = o.params
    sizes, strides = params["window_dimensions"], params["window_strides"]
    largest = params["select_prim"].name == "ge"
    config = [(a, b, 0) for a, b in params["padding"]]
    wide = padded(o, x, config, _identity(o, x, "max" if largest else "min"))
    inside = windows(wide, sizes, strides, [1] * len(sizes), source.shape[1:], 1)
    ndim = len(sizes)
    order = [0, *range(1, 2 * ndim, 2), *range(2, 2 * ndim + 1, 2)]
    flat = moved(lambda v: v.transpose(order).reshape(*source.shape, math.prod(sizes)), inside)
    chosen = np.unravel_index(place_of_extreme(o, flat, -1, largest), sizes)
    at = []
    for d in range(ndim):
        start = np.arange(source.shape[d + 1]).reshape([-1 if e == d else 1 for e in range(ndim)]) * strides[d]
        at.append(start[None] + chosen[d])
    places = np.ravel_multi_index(at, wide.shape[1:]).reshape(source.shape[0], -1)
    target = zeros(o, (math.prod(wide.shape[1:]),), np.float32)
    added = combined_at(o, target, places, reshaped(source, (source.shape[0], -1)), add)
    cut = tuple(slice(a, a + n) for (a, _), n in zip(params["padding"], x.shape[1:], strict=True))
    return moved(lambda v: v.reshape(wide.shape)[(slice(None), *cut)], added)


# --- Fourier transforms: products with a table. gshard assumes only that the table is symmetric


@operator("fft")
def _fft(o: Operation, x: Value) -> Value:
    kind, lengths = str(o.params["fft_type"]).rpartition(".")[2].lower(), o.params["fft_lengths"]
    kind = {"0": "fft", "1": "ifft", "2": "rfft", "3": "irfft"}.get(kind, kind)
    axes = list(range(x.ndim - len(lengths), x.ndim))
    if not isinstance(x, Complex):
        x = Complex(x, zeros_like(x))
    if kind == "rfft":
        x = _transformed(o, x, axes[-1], lengths[-1], -1)
        half = lengths[-1] // 2 + 1
        x = moved(lambda v: np.take(v, range(half), axes[-1]), x)
        axes = axes[:-1]
    for axis in axes[:-1] if kind == "irfft" else axes:
        x = _transformed(o, x, axis, x.shape[axis], 1 if "i" in kind else -1)
    if kind == "irfft":
        n, last = lengths[-1], axes[-1]
        at = [i if i <= n // 2 else n - i for i in range(n)]
        signs = np.array([1 if i <= n // 2 else -1 for i in range(n)])
        full = moved(lambda v: np.take(v, at, last), x)
        shape = [-1 if d == last else 1 for d in range(x.ndim)]
        x = Complex(full.real, mul(o, full.imag, o.domain.constant(signs.reshape(shape), np.float32)))
        return _transformed(o, x, last, n, 1).real
    return x


def _transformed(o: Operation, x: Complex, axis: int, n: int, sign: int) -> Complex:
    places = np.outer(np.arange(n), np.arange(n)) % n
    near, d = np.minimum(places, n - places), o.domain
    signs = np.where(places == near, 1, -1) * np.where(2 * places % n == 0, 0, 1)
    cosine: Value
    sine: Value
    if isinstance(d, Reals):
        cosine, sine = np.cos(2 * np.pi * near / n)[None], np.sin(2 * np.pi * near / n)[None]
    else:
        lanes = np.broadcast_to(near, (o.lanes, n, n))
        cosine, sine = (d.function(f"{f} of {n}", lanes) for f in ("cosine", "sine"))
        one = d.constant(np.ones((1, 1, 1)), np.float32)
        cosine = moved(lambda v, w: np.where(near == 0, w, v), cosine, one)
    scale = d.constant(np.full((1, 1, 1), sign), np.float32)
    sine = mul(o, mul(o, sine, d.constant(signs[None].astype(float), np.float32)), scale)
    table = Complex(cosine, sine)
    if isinstance(d, Reals):
        table = Complex(*(np.broadcast_to(v, (o.lanes, n, n)) for v in (cosine, sine)))
    rest = dataclasses.replace(o, params={"dimension_numbers": (((axis - 1,), (0,)), ((), ()))})
    found = moved(lambda v: np.moveaxis(v, -1, axis), _dot_general(rest, x, table))
    if sign > 0:
        found = mul(o, found, d.constant(np.full((1,) * found.ndim, 1 / n), np.float32))
    return found
