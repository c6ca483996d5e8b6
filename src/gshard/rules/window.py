"""Sliding windows: pooling (convolutions: ``rules.convolution``).

A spatial dimension is a ``communicate`` factor of operand and result: each device fetches the rows that the windows of
its own results reach into (a halo), with strides, padding, and dilation of window and operand taken into account, fills
what is outside, and then works without padding (GShard paper, section 3.3.3 and appendix A.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.shards import Shards, along, identity, mask
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import itemsize
from gshard.core.rule import Rule, RuleMaker
from gshard.core.split import Split, place
from gshard.language.computation import monoid_of, skipping
from gshard.language.passing import combined, if_finite
from gshard.language.registry import Call, rule


def sliding(n: int, m: int, size: int, stride: int, low: int, base: int, dilation: int) -> Callable[[int], Window]:
    """The window of an operand of ``n`` elements that each part of ``m`` results reaches into.

    Result ``o`` reads positions ``o * stride - low`` to that plus ``(size - 1) * dilation``; operand elements stand
    ``base`` apart.
    """

    def window(parts: int) -> Window:
        local = -(-m // parts)
        extent = (local - 1) * stride + (size - 1) * dilation + 1 if local and size else 0
        inside = low <= 0 and (m - 1) * stride + (size - 1) * dilation - low <= (n - 1) * base
        return Window(n, -low, local * stride, parts, max(extent, 0), base, inside=inside)

    return window


MONOIDS = {"reduce_window_sum": "add", "reduce_window_max": "max", "reduce_window_min": "min"}


@rule(*MONOIDS, "reduce_window", "select_and_gather_add")
def pooling(call: Call) -> Rule:
    """Dimensions with a window of one element are parallel, the others exchange halos.

    >>> params = {"window_dimensions": (1, 3), "window_strides": (1, 2), "padding": ((0, 0), (1, 1))}
    >>> params |= {"base_dilation": (1, 1), "window_dilation": (1, 1)}
    >>> print(pooling(Call("reduce_window_sum", params, ((2, 8),), ((2, 4),), ("f4",))))
    a b -> a b; communicate b

    What is outside of the array becomes the monoid's identity. A computation that is no known monoid, or whose initial
    values are no identities, may have none: then flags beside the elements say which of them count.

    ``select_and_gather_add`` takes the first of several extremes, and in padded windows of several dimensions XLA's
    order is not always the same; there its windows are not split.
    """
    target, p = call.out_shapes[0], call.params
    # All operands are arrays but the initial values of a generic reduction, one for each array.
    count, shape = len(call.out_shapes) if call.name == "reduce_window" else len(call.in_shapes), call.in_shapes[0]
    monoid = MONOIDS.get(call.name)
    if call.name == "reduce_window" and count == 1:
        monoid = monoid_of(p["jaxpr"])
    make = RuleMaker()
    moved = [not _stays(p, d) for d in range(len(shape))]
    one_order = call.name != "select_and_gather_add" or sum(n > 1 for n in p["window_dimensions"]) < 2 or not (
        any(any(pad) for pad in p["padding"]) or any(n > 1 for n in p["base_dilation"])
    )  # fmt: skip
    slid = make.communicate if one_order else make.replicate
    dims = [slid(max(n, m)) if w else make.factor(n) for n, m, w in zip(shape, target, moved, strict=True)]

    def window(d: int, parts: int) -> Window:
        return sliding(
            shape[d], target[d], p["window_dimensions"][d], p["window_strides"][d], p["padding"][d][0],
            p["base_dilation"][d], p["window_dilation"][d],
        )(parts)  # fmt: skip

    def local(shards: Shards, *operands: Any) -> list[Any]:
        windows = _windows(shards.split, shards.mesh, dims, moved, window)
        if not windows:
            return shards.bind(*operands)
        xs, inits = operands[:count], operands[count:]
        fill = identity(monoid, xs[0].dtype) if monoid else 0
        padding, base = [tuple(pad) for pad in p["padding"]], list(p["base_dilation"])
        for d, w in windows.items():
            if monoid:
                x, padding[d], base[d] = reached(shards, xs[0], d, shards.atoms(dims[d][0]), w, fill)
                xs = (x,)
            else:
                xs = tuple(shards.window(x, d, shards.atoms(dims[d][0]), w, fill) for x in xs)
                padding[d], base[d] = (0, 0), 1
        done: dict[str, Any] = {"padding": tuple(padding), "base_dilation": tuple(base)}
        if monoid:
            return shards.bind(*xs, *inits, **done)
        flags = _inside(shards, xs[0].shape, dims, windows)
        sizes = {name: p[name] for name in ("window_dimensions", "window_strides", "window_dilation")}
        if call.name == "reduce_window":
            combine = skipping(p["jaxpr"], p["consts"])
            return list(lax.reduce_window((flags, *xs), (np.True_, *inits), combine, **sizes, **done)[1:])
        tangents, x = xs
        worst = identity("max" if p["select_prim"].name == "ge" else "min", x.dtype)
        start = (np.True_, jnp.asarray(worst, x.dtype), jnp.zeros((), tangents.dtype))
        scalar = jax.ShapeDtypeStruct((), x.dtype)
        combine = skipping(jax.make_jaxpr(_selecting(p["select_prim"]))(*[scalar] * 4))
        return [lax.reduce_window((flags, x, tangents), start, combine, **sizes, **done)[2]]

    flops = math.prod(target) * math.prod(p["window_dimensions"])
    operands = [dims if i < count else [] for i in range(len(call.in_shapes))]
    results = [dims for _ in call.out_shapes]
    if not one_order:
        return make.rule(operands, results, flops=flops)

    def length(w: Window) -> int:
        return w.width if monoid and _begin_alike(w) else w.extent

    sends = sends_in_turn(call, [(i, window, length) for i in range(count)], dims, moved)
    linear = combined(MONOIDS[call.name], call.in_dtypes[0], 0) if call.name in MONOIDS else []
    finite = if_finite(call.in_dtypes[0], (0,)) if MONOIDS.get(call.name) == "add" else []
    return make.rule(operands, results, local=local, flops=flops, sends=sends, linear=linear, finite=finite)


def _selecting(select: Any) -> Callable[..., tuple[Any, Any]]:
    def pick(x: Any, beside_x: Any, y: Any, beside_y: Any) -> tuple[Any, Any]:
        which = select.bind(x, y)
        return lax.select(which, x, y), lax.select(which, beside_x, beside_y)

    return pick


def _windows(
    split: Split,
    mesh: Mesh,
    dims: Sequence[tuple[int, ...]],
    moved: Sequence[bool],
    window: Callable[[int, int], Window],
) -> dict[int, Window]:
    """The windows of the dimensions that are split."""
    parts = {d: mesh.count(split.get(dim[0], ())) for d, dim in enumerate(dims) if dim and moved[d]}
    return {d: window(d, n) for d, n in parts.items() if n > 1}


def _inside(
    shards: Shards, shape: Sequence[int], dims: Sequence[tuple[int, ...]], windows: Mapping[int, Window]
) -> Any:
    """Which positions of fetched windows hold elements."""
    flags = jnp.ones(shape, jnp.bool_)
    for d, window in windows.items():
        at = window.position(lax.axis_index(shards.atoms(dims[d][0]))) + jnp.arange(window.extent, dtype=jnp.int32)
        inside = (at >= 0) & (at < (window.n - 1) * window.dilation + 1) & (at % window.dilation == 0)
        flags &= along(inside, d, len(shape))
    return flags


def sends_in_turn(
    call: Call,
    fetched: Sequence[tuple[int, Callable[[int, int], Window], Callable[[Window], int]]],
    dims: Sequence[tuple[int, ...]],
    moved: Sequence[bool],
) -> Callable[[Mesh, Split], int]:
    """What operands send whose windows are fetched one dimension after the other: each makes the next one larger.

    Args:
        call: the equation.
        fetched: operands, their windows, and how long what is fetched then is.
        dims: the dimensions of all these operands.
        moved: which of them have windows.
    """

    def sends(mesh: Mesh, split: Split) -> int:
        total = 0
        for operand, window, length in fetched:
            cut = place(tuple(dims), split)
            sizes = [-(-n // mesh.count(atoms)) for n, atoms in zip(call.in_shapes[operand], cut, strict=True)]
            for d, w in _windows(split, mesh, dims, moved, window).items():
                rest = math.prod(n for e, n in enumerate(sizes) if e != d) * itemsize(call.in_dtypes[operand])
                total += w.bytes(sizes[d], rest) if sizes[d] else 0
                sizes[d] = length(w)
        return total

    return sends


def _stays(p: dict[str, Any], d: int) -> bool:
    return (
        p["window_dimensions"][d] == 1
        and p["window_strides"][d] == 1
        and tuple(p["padding"][d]) == (0, 0)
        and p.get("base_dilation", (1,) * (d + 1))[d] == 1
    )


@rule("select_and_scatter_add")
def select_and_scatter_add(call: Call) -> Rule:
    """Windows that reach across the border of two parts are scattered in one of two ways, whichever sends less.

    Either each device scatters its own windows and gives back what falls into parts of others, which add it: elements
    come as for the pooling itself, often by the same halo. Or it scatters all windows that reach into its part of the
    result and keeps its part: it fetches the values to scatter of these windows and the elements that they select from.

    >>> import jax
    >>> params = {"window_dimensions": (1, 3), "window_strides": (1, 2), "padding": ((0, 0), (1, 1))}
    >>> params |= {"select_prim": jax.lax.ge_p}
    >>> print(select_and_scatter_add(Call("", params, ((2, 4), (2, 8)), ((2, 8),), ("f4", "f4"))))
    a b, a b -> a b; communicate b
    """
    (sources, shape), p = call.in_shapes, call.params
    sizes, strides = p["window_dimensions"], p["window_strides"]
    make = RuleMaker()
    moved = [not _stays(p, d) for d in range(len(shape))]
    dims = [make.communicate(max(n, m)) if w else make.factor(n) for n, m, w in zip(shape, sources, moved, strict=True)]

    def source(d: int, parts: int) -> Window:
        """Window ``o`` stands at ``o * stride``; those matter that begin less than their size before the part."""
        local = -(-shape[d] // parts)
        first = p["padding"][d][0] - sizes[d] + 1
        return Window(sources[d], first, local, parts, local + sizes[d] - 1, strides[d])

    def operand(d: int, parts: int) -> Window:
        """All elements of these windows; the first may begin up to a stride later on some devices."""
        w = source(d, parts)
        if w.step % strides[d] == 0:
            first = w.start(0) * strides[d] - p["padding"][d][0]
            return Window(shape[d], first, w.step, parts, (w.width - 1) * strides[d] + sizes[d])
        return Window(shape[d], 1 - sizes[d], w.step, parts, w.width * strides[d] + sizes[d] - 1)

    def own(d: int, parts: int) -> Window:
        """The elements of a part's own windows."""
        return sliding(shape[d], sources[d], sizes[d], strides[d], p["padding"][d][0], 1, 1)(parts)

    fetched = sends_in_turn(call, [(0, source, lambda w: w.width), (1, operand, lambda w: w.extent)], dims, moved)
    there = sends_in_turn(call, [(1, own, lambda w: w.extent)], dims, moved)

    def is_given_back(mesh: Mesh, split: Split) -> bool:
        return 2 * there(mesh, split) < fetched(mesh, split)

    def given_back(shards: Shards, values: Any, x: Any, fill: Any) -> Any:
        windows = _windows(shards.split, shards.mesh, dims, moved, own)
        parts = []
        for d, w in windows.items():
            atoms = shards.atoms(dims[d][0])
            values = mask(values, d, sources[d], atoms, 0) if sources[d] % w.parts else values
            parts.append(x.shape[d])
            x = shards.window(x, d, atoms, w, fill)
        padding = tuple((0, 0) if d in windows else tuple(pad) for d, pad in enumerate(p["padding"]))
        (sums,) = shards.bind(values, x, padding=padding)
        for (d, w), size in reversed([*zip(windows.items(), parts, strict=True)]):
            atoms = shards.atoms(dims[d][0])
            if not w.within and not w.filled_outside(size):
                sums = _filled(sums, d, atoms, w, 0)
            sums = shards.give_back(sums, d, atoms, w, size)
        return sums

    def local(shards: Shards, values: Any, x: Any) -> list[Any]:
        windows = _windows(shards.split, shards.mesh, dims, moved, source)
        if not windows or not x.size:
            return shards.bind(values, x) if x.size else [jnp.zeros(shards.out_shape(), x.dtype)]
        fill = identity("max" if p["select_prim"].name == "ge" else "min", x.dtype)
        if is_given_back(shards.mesh, shards.split):
            return [given_back(shards, values, x, fill)]
        around = {d: operand(d, w.parts) for d, w in windows.items()}
        part = {d: lax.axis_index(shards.atoms(dims[d][0])) for d in windows}
        begin = {d: w.start(part[d]) * strides[d] - p["padding"][d][0] for d, w in windows.items()}
        for d, w in windows.items():
            values = _elements(shards, values, d, shards.atoms(dims[d][0]), w)
            x = shards.window(x, d, shards.atoms(dims[d][0]), around[d], fill)
        for d, w in windows.items():
            reached = (w.width - 1) * strides[d] + sizes[d]
            x = lax.dynamic_slice_in_dim(x, begin[d] - around[d].position(part[d]), reached, axis=d)
        padding = tuple((0, 0) if d in windows else tuple(pad) for d, pad in enumerate(p["padding"]))
        (result,) = shards.bind(values, x, padding=padding)
        for d, w in windows.items():
            # Where strides are longer than windows, a part may begin before the first window or end after the last.
            gap = max(0, strides[d] - sizes[d])
            result = jnp.pad(result, [(gap, gap) if e == d else (0, 0) for e in range(result.ndim)])
            offset = part[d] * w.step - begin[d] + gap
            result = lax.dynamic_slice_in_dim(result, offset, w.step, axis=d)
        return [result]

    flops = math.prod(sources) * math.prod(sizes)

    def sends(mesh: Mesh, split: Split) -> int:
        return min(2 * there(mesh, split), fetched(mesh, split))

    return make.rule([dims, dims], [dims], local=local, flops=flops, sends=sends)


def reached(
    shards: Shards, x: Any, dim: int, atoms: Atoms, window: Window, fill: Any
) -> tuple[Any, tuple[int, int], int]:
    """What a device's windows reach into, the padding that remains around it, and how far apart elements then stand.

    Where all parts begin alike between two elements only these are laid side by side: nothing is done with what would
    fill the room between them.
    """
    if not _begin_alike(window):
        return shards.window(x, dim, atoms, window, fill), (0, 0), 1
    low = window.start(0) * window.dilation - window.first
    high = window.extent - low - (window.width - 1) * window.dilation - 1
    return _elements(shards, x, dim, atoms, window, fill), (low, high), window.dilation


def _begin_alike(window: Window) -> bool:
    return window.dilation > 1 and window.step % window.dilation == 0 and window.width > 0


def _elements(shards: Shards, x: Any, dim: int, atoms: Atoms, window: Window, fill: Any = 0) -> Any:
    """The elements that stand in this device's window, side by side; ``fill`` for those outside of the array."""
    got = shards.fetch(x, dim, atoms, window)
    if all(0 <= window.start(i) <= window.n - window.width for i in range(window.parts)):
        return got
    return _filled(got, dim, atoms, window, fill)


def _filled(x: Any, dim: int, atoms: Atoms, window: Window, fill: Any) -> Any:
    """The elements of this device's window, ``fill`` where they stand outside of the array."""
    at = window.start(lax.axis_index(atoms)) + jnp.arange(window.width, dtype=jnp.int32)
    return jnp.where(along((at >= 0) & (at < window.n), dim, x.ndim), x, jnp.asarray(fill, x.dtype))


@rule("select_and_scatter")
def by_other_dimensions(call: Call) -> Rule:
    """Dimensions with a window of one element are parallel, the others are whole: JAX makes it only while lowering."""
    arrays = [s for s in (*call.in_shapes, *call.out_shapes) if s]
    ndim = len(arrays[0])
    make = RuleMaker()
    parallel: list[tuple[int, ...] | None] = [
        make.factor(arrays[0][d]) if _stays(call.params, d) and len({s[d] for s in arrays}) == 1 else None
        for d in range(ndim)
    ]

    def tensor(shape: Sequence[int]) -> list[tuple[int, ...]]:
        return [dim if dim is not None else make.replicate(n) for n, dim in zip(shape, parallel, strict=False)]

    return make.rule([tensor(s) for s in call.in_shapes], [tensor(s) for s in call.out_shapes])
