"""Convolutions.

A spatial dimension is a ``communicate`` factor of operand and result, as in ``rules.window``. If the kernel is longer
than the result, as in the gradient of a kernel, the kernel is split instead and gshard sums over it. The zeros between
the elements of a dilated operand are not multiplied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.halo_windows import HaloWindows
from gshard.comm.shards import Shards
from gshard.core.mesh import Mesh
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.core.split import Split
from gshard.language.registry import Call, rule
from gshard.rules.contract import in_either_finite_operand, in_either_operand
from gshard.rules.window import fetch_reached, reached_length, sliding

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
    windows: dict[int, Callable[[int], Window]] = {}
    long_kernels: list[tuple[int, int, int]] = []  # dimensions of kernel and operand, and the dilation of the kernel
    for i, (lhs_dim, rhs_dim, out_dim) in enumerate(zip(lhs_spec[2:], rhs_spec[2:], out_spec[2:], strict=True)):
        n, size, m = lhs_shape[lhs_dim], rhs_shape[rhs_dim], out_shape[out_dim]
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

    def sends(mesh: Mesh, split: Split) -> int:
        return halos.sent_bytes(lhs_shape, call.in_dtypes[0], mesh, split, lambda d, window: reached_length(window))

    flops = 2 * math.prod(out_shape) * math.prod(rhs_shape[d] for d in rhs_spec[1:]) // math.prod(p["lhs_dilation"])
    return make.rule(
        [lhs, rhs], [out], local=local, flops=flops, masks_itself=True, sends=sends,
        linear=in_either_operand(call), finite=in_either_finite_operand(call),
    )  # fmt: skip


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
