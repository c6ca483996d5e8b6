"""Convolutions, pooling and their gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.halo import HaloWindows, Window
from gshard.comm.shards import Shards, along, identity, mask
from gshard.core.mesh import Atoms, Mesh
from gshard.core.rule import REDUCE, Rule, RuleMaker, Split
from gshard.language.registry import Call, rule
from gshard.language.traits import combined, if_finite
from gshard.rules.contract import in_either_finite_operand, in_either_operand
from gshard.rules.reductions import monoid_of


def sliding(n: int, m: int, size: int, stride: int, low: int, base: int, dilation: int) -> Callable[[int], Window]:
    """The window of an operand that each part of the results reads."""

    def window(parts: int) -> Window:
        local = -(-m // parts)
        extent = (local - 1) * stride + (size - 1) * dilation + 1 if local and size else 0
        inside = low <= 0 and (m - 1) * stride + (size - 1) * dilation - low <= (n - 1) * base
        return Window(n, -low, local * stride, parts, max(extent, 0), base, inside=inside)

    return window


MONOIDS = {"reduce_window_sum": "add", "reduce_window_max": "max", "reduce_window_min": "min"}


@rule(*MONOIDS, "reduce_window", "select_and_gather_add")
def pooling(call: Call) -> Rule:
    """Dimensions with a window of one element are parallel. Other dimensions exchange halos.

    >>> params = {"window_dimensions": (1, 3), "window_strides": (1, 2), "padding": ((0, 0), (1, 1))}
    >>> params |= {"base_dilation": (1, 1), "window_dilation": (1, 1)}
    >>> print(pooling(Call("reduce_window_sum", params, ((2, 8),), ((2, 4),), ("f4",))))
    a b -> a b; communicate b

    Elements outside of the array become the identity of the monoid. If a computation is not a known monoid, the
    dimensions with windows cannot be split; nor can those of ``select_and_gather_add``.
    """
    target, p = call.out_shapes[0], call.params
    shape = call.in_shapes[0]
    # A generic reduction also has an initial value for each array.
    count = len(call.out_shapes) if call.name == "reduce_window" else len(call.in_shapes)
    monoid = MONOIDS.get(call.name)
    if call.name == "reduce_window" and count == 1:
        monoid = monoid_of(p["jaxpr"])
    make = RuleMaker()
    moved = [not _stays(p, d) for d in range(len(shape))]
    windowed = make.communicate if monoid else make.replicate
    dims = [windowed(max(n, m)) if w else make.factor(n) for n, m, w in zip(shape, target, moved, strict=True)]

    def window(d: int, parts: int) -> Window:
        return sliding(
            shape[d], target[d], p["window_dimensions"][d], p["window_strides"][d], p["padding"][d][0],
            p["base_dilation"][d], p["window_dilation"][d],
        )(parts)  # fmt: skip

    halos = HaloWindows(dims, moved, window)

    def local(shards: Shards, x: Any, *inits: Any) -> list[Any]:
        padding, base = [tuple(pad) for pad in p["padding"]], list(p["base_dilation"])
        for d, w in halos.split_over(shards.mesh, shards.split).items():
            fill = identity(monoid or "", x.dtype)
            x, padding[d], base[d] = fetch_reached(shards, x, d, shards.atoms(dims[d][0]), w, fill)
        return shards.bind(x, *inits, padding=tuple(padding), base_dilation=tuple(base))

    flops = math.prod(target) * math.prod(p["window_dimensions"])
    operands = [dims if i < count else [] for i in range(len(call.in_shapes))]
    results = [dims for _ in call.out_shapes]
    if not monoid:
        return make.rule(operands, results, flops=flops)

    sends = halos.sends(shape, call.in_dtypes[0], lambda d, window: reached_length(window))
    linear = combined(MONOIDS[call.name], call.in_dtypes[0], 0) if call.name in MONOIDS else []
    finite = if_finite(call.in_dtypes[0], (0,)) if MONOIDS.get(call.name) == "add" else []
    return make.rule(operands, results, local=local, flops=flops, sends=sends, linear=linear, finite=finite)


def _worst(params: Mapping[str, Any], dtype: Any) -> Any:
    """The value that is never selected (``select_prim``)."""
    return identity("max" if params["select_prim"].name == "ge" else "min", dtype)


def _stays(params: Mapping[str, Any], d: int) -> bool:
    """Whether the windows along a dimension contain one element each, at the same position as the result."""
    return (
        params["window_dimensions"][d] == 1
        and params["window_strides"][d] == 1
        and tuple(params["padding"][d]) == (0, 0)
        and params.get("base_dilation", (1,) * (d + 1))[d] == 1
    )


@rule("select_and_scatter_add")
def select_and_scatter_add(call: Call) -> Rule:
    """Each device scatters its own windows, and returns the sums that fall into the parts of other devices.

    It fetches the same elements as the pooling, often by the same halo.

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

    def window(d: int, parts: int) -> Window:
        """The elements of a part's windows."""
        return sliding(shape[d], sources[d], sizes[d], strides[d], p["padding"][d][0], 1, 1)(parts)

    halos = HaloWindows(dims, moved, window)

    def local(shards: Shards, values: Any, x: Any) -> list[Any]:
        if not x.size:
            return [jnp.zeros(shards.out_shape(), x.dtype)]
        windows = halos.split_over(shards.mesh, shards.split)
        part_sizes = {d: x.shape[d] for d in windows}
        for d, w in windows.items():
            atoms = shards.atoms(dims[d][0])
            values = mask(values, d, sources[d], atoms, 0) if sources[d] % w.parts else values
            x = shards.window(x, d, atoms, w, _worst(p, x.dtype))
        padding = tuple((0, 0) if d in windows else tuple(pad) for d, pad in enumerate(p["padding"]))
        (sums,) = shards.bind(values, x, padding=padding)
        for d, w in reversed(windows.items()):
            atoms = shards.atoms(dims[d][0])
            if not w.within and not w.filled_outside(part_sizes[d]):
                sums = _fill_outside(sums, d, atoms, w, 0)
            sums = shards.give_back(sums, d, atoms, w, part_sizes[d])
        return [sums]

    def sends(mesh: Mesh, split: Split) -> int:
        """Devices fetch the elements, and return as many sums."""
        return 2 * halos.sends(shape, call.in_dtypes[1], lambda d, window: window.extent)(mesh, split)

    flops = math.prod(sources) * math.prod(sizes)
    return make.rule([dims, dims], [dims], local=local, flops=flops, sends=sends)


def fetch_reached(
    shards: Shards, x: Any, dim: int, atoms: Atoms, window: Window, fill: Any
) -> tuple[Any, tuple[int, int], int]:
    """Fetches the elements that this device's windows read along a dimension.

    If all parts of a dilated operand begin at the same distance from an element, this is an array of the elements
    alone. Otherwise it also contains ``fill`` between the elements.
    """
    if not _has_constant_phase(window):
        return shards.window(x, dim, atoms, window, fill), (0, 0), 1
    low = window.start(0) * window.dilation - window.first
    high = window.extent - low - (window.width - 1) * window.dilation - 1
    return _fetch_elements(shards, x, dim, atoms, window, fill), (low, high), window.dilation


def reached_length(window: Window) -> int:
    """The size of the array that ``fetch_reached`` returns."""
    return window.width if _has_constant_phase(window) else window.extent


def _has_constant_phase(window: Window) -> bool:
    """Whether the windows of all parts of a dilated operand begin at the same distance from an element."""
    return window.dilation > 1 and window.step % window.dilation == 0 and window.width > 0


def _fetch_elements(shards: Shards, x: Any, dim: int, atoms: Atoms, window: Window, fill: Any) -> Any:
    """The elements of this device's window without the room between them, with ``fill`` outside of the array."""
    elements = shards.fetch(x, dim, atoms, window)
    if all(0 <= window.start(i) <= window.n - window.width for i in range(window.parts)):
        return elements
    return _fill_outside(elements, dim, atoms, window, fill)


def _fill_outside(elements: Any, dim: int, atoms: Atoms, window: Window, fill: Any) -> Any:
    """The elements of this device's window with ``fill`` in place of those outside of the array."""
    index = window.start(lax.axis_index(atoms)) + jnp.arange(window.width, dtype=jnp.int32)
    is_inside = along((index >= 0) & (index < window.n), dim, elements.ndim)
    return jnp.where(is_inside, elements, jnp.asarray(fill, elements.dtype))


# Convolutions.

Convolve = Callable[[Any, Any], list[Any]]


@rule("conv_general_dilated")
def conv_general_dilated(call: Call) -> Rule:
    """Batch, output features and groups are parallel, input features are reduced, spatial dimensions exchange halos.

    A kernel longer than the result, as in the gradient of a kernel, is reduced: it is split together with the operand.

    >>> import jax
    >>> numbers = jax.lax.conv_dimension_numbers((2, 3, 8), (5, 3, 3), ("NCW", "OIW", "NCW"))
    >>> params = {"dimension_numbers": numbers, "window_strides": (1,), "padding": ((1, 1),), "lhs_dilation": (1,)}
    >>> params |= {"rhs_dilation": (1,), "feature_group_count": 1, "batch_group_count": 1}
    >>> print(conv_general_dilated(Call("conv", params, ((2, 3, 8), (5, 3, 3)), ((2, 5, 8),), ("f4", "f4"))))
    a b c, d b e -> a d c; add over b=3; communicate c; replicate e
    """
    p = call.params
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    lhs_shape, rhs_shape = call.in_shapes
    (out_shape,) = call.out_shapes
    feature_groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    make = RuleMaker()
    lhs: list[tuple[int, ...]] = [() for _ in lhs_shape]
    rhs: list[tuple[int, ...]] = [() for _ in rhs_shape]
    out: list[tuple[int, ...]] = [() for _ in out_shape]
    group = make.factor(feature_groups * batch_groups) if feature_groups * batch_groups > 1 else ()
    batch = make.factor(out_shape[out_spec[0]])
    out_features = make.factor(rhs_shape[rhs_spec[0]] // (feature_groups * batch_groups))
    in_features = make.factor(rhs_shape[rhs_spec[1]], REDUCE, "add")
    lhs[lhs_spec[0]] = (group if batch_groups > 1 else ()) + batch
    lhs[lhs_spec[1]] = (group if feature_groups > 1 else ()) + in_features
    rhs[rhs_spec[0]] = group + out_features
    rhs[rhs_spec[1]] = in_features
    out[out_spec[0]] = batch
    out[out_spec[1]] = group + out_features
    windows, long_kernels = _spatial(call, make, lhs, rhs, out)
    moved = [d in windows and 0 not in out_shape for d in range(len(lhs))]
    halos = HaloWindows(lhs, moved, lambda d, parts: windows[d](parts))

    def local(shards: Shards, x: Any, kernel: Any) -> list[Any]:
        if 0 in out_shape:
            return [jnp.zeros(shards.out_shape(), shards.equation.outputs[0].dtype)]
        x = shards.masked(x, 0, {lhs_spec[1]})
        kernel = shards.masked(kernel, 1, {rhs_spec[1]})
        padding, base = list(p["padding"]), list(p["lhs_dilation"])
        windows_here = halos.split_over(shards.mesh, shards.split)
        for i, d in enumerate(lhs_spec[2:]):
            if d in windows_here:
                x, padding[i], base[i] = fetch_reached(shards, x, d, shards.atoms(lhs[d][0]), windows_here[d], 0)
        groups = shards.size(group[0]) if group else 1

        convolve: Convolve = functools.partial(
            shards.bind,
            padding=tuple(padding),
            lhs_dilation=tuple(base),
            feature_group_count=groups if feature_groups > 1 else 1,
            batch_group_count=groups if batch_groups > 1 else 1,
        )
        for rhs_dim, lhs_dim, dilation in long_kernels:
            convolve = _without_kernel_padding(shards, convolve, rhs_dim, lhs_dim, dilation)
        return convolve(x, kernel)

    sends = halos.sends(lhs_shape, call.in_dtypes[0], lambda d, window: reached_length(window))
    flops = 2 * math.prod(out_shape) * math.prod(rhs_shape[d] for d in rhs_spec[1:]) // math.prod(p["lhs_dilation"])
    return make.rule(
        [lhs, rhs], [out], local=local, flops=flops, masks_itself=True, sends=sends,
        linear=in_either_operand(call), finite=in_either_finite_operand(call),
    )  # fmt: skip


def _spatial(
    call: Call, make: RuleMaker, lhs: list[tuple[int, ...]], rhs: list[tuple[int, ...]], out: list[tuple[int, ...]]
) -> tuple[dict[int, Callable[[int], Window]], list[tuple[int, int, int]]]:
    """Adds the spatial dimensions to those of operand, kernel and result.

    Returns the windows by dimension of the operand; and of kernels longer than the result the dimensions of kernel and
    operand, and the dilation of the kernel.
    """
    p, windows, long_kernels = call.params, dict[int, Callable[[int], Window]](), list[tuple[int, int, int]]()
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    for i, (lhs_dim, rhs_dim, out_dim) in enumerate(zip(lhs_spec[2:], rhs_spec[2:], out_spec[2:], strict=True)):
        n, size, m = call.in_shapes[0][lhs_dim], call.in_shapes[1][rhs_dim], call.out_shapes[0][out_dim]
        stride, low = p["window_strides"][i], p["padding"][i][0]
        base, dilation = p["lhs_dilation"][i], p["rhs_dilation"][i]
        if size <= m:
            rhs[rhs_dim] = make.replicate(size)
            lhs[lhs_dim] = out[out_dim] = make.communicate(max(n, m))
            windows[lhs_dim] = sliding(n, m, size, stride, low, base, dilation)
        else:
            lhs[lhs_dim] = rhs[rhs_dim] = make.factor(size, REDUCE, "add")
            out[out_dim] = make.replicate(m)
            long_kernels.append((rhs_dim, lhs_dim, dilation))
            windows[lhs_dim] = sliding(n, size, m, dilation, low, base, stride)  # results slide over the kernel
    return windows, long_kernels


def _without_kernel_padding(shards: Shards, convolve: Convolve, rhs_dim: int, lhs_dim: int, dilation: int) -> Convolve:
    """The convolution without the padding at the end of a split kernel.

    Zeros in place of the padding would give NaN where the operand is infinite. So there is one convolution for each
    length of the parts.
    """
    (factor,) = shards.rule.operands[1][rhs_dim]
    atoms = shards.atoms(factor)
    parts, size = shards.mesh.count(atoms), shards.rule.factors[factor].size
    local = -(-size // parts)
    lengths = [max(0, min(local, size - i * local)) for i in range(parts)]
    if len(set(lengths)) == 1:
        return convolve

    def of_length(n: int) -> Convolve:
        def run(x: Any, y: Any) -> list[Any]:
            if not n:
                return [jnp.zeros(shards.out_shape(), shards.equation.outputs[0].dtype)]
            x = lax.slice_in_dim(x, 0, x.shape[lhs_dim] - (local - n) * dilation, axis=lhs_dim)
            return convolve(x, lax.slice_in_dim(y, 0, n, axis=rhs_dim))

        return run

    distinct = sorted(set(lengths))
    branches = [of_length(n) for n in distinct]
    branch = jnp.asarray(np.array([distinct.index(n) for n in lengths], np.int32))[lax.axis_index(atoms)]
    return lambda x, y: lax.switch(branch, branches, x, y)
