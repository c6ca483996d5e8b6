"""Convolutions: windows that slide, multiplied by a kernel.

A spatial dimension is a ``communicate`` factor of operand and result, as in ``rules.window``; a kernel longer than the
result, as in the gradient of a kernel, is summed over. Nothing is multiplied by the zeros between dilated elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.shards import Shards
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.language.registry import Call, rule
from gshard.rules.contract import in_either_finite_operand, in_either_operand
from gshard.rules.slicing import sends_of
from gshard.rules.window import reached, sliding


def sliding_with_kernel(
    n: int, m: int, size: int, stride: int, low: int, base: int, dilation: int
) -> Callable[[int], Window]:
    """The window of an operand that each part of a kernel reaches into, for all results."""

    def window(parts: int) -> Window:
        local = -(-size // parts)
        extent = (local - 1) * dilation + (m - 1) * stride + 1 if local and m else 0
        return Window(n, -low, local * dilation, parts, max(extent, 0), base)

    return window


@rule("conv_general_dilated")
def conv_general_dilated(call: Call) -> Rule:
    """Batch and output features are parallel, input features reduce, spatial dimensions exchange halos, groups split.

    A kernel longer than the result, as in the gradient of a kernel, is summed over: it is split together with what it
    slides over.

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
    features = make.factor(rhs_shape[rhs_spec[0]] // (feature_groups * batch_groups))
    inputs = make.factor(rhs_shape[rhs_spec[1]], REDUCE, "add")
    lhs[lhs_spec[0]] = (group if batch_groups > 1 else ()) + batch
    lhs[lhs_spec[1]] = (group if feature_groups > 1 else ()) + inputs
    rhs[rhs_spec[0]], rhs[rhs_spec[1]] = group + features, inputs
    out[out_spec[0]], out[out_spec[1]] = batch, group + features
    windows: dict[int, Callable[[int], Window]] = {}
    summed: list[tuple[int, int, int]] = []  # dimensions of long kernels, what they slide over, with which dilation
    for i, (ld, rd, od) in enumerate(zip(lhs_spec[2:], rhs_spec[2:], out_spec[2:], strict=True)):
        n, k, m = lhs_shape[ld], rhs_shape[rd], out_shape[od]
        slide = sliding if k <= m else sliding_with_kernel
        if k <= m:
            rhs[rd] = make.replicate(k)
            lhs[ld] = out[od] = make.communicate(max(n, m))
        else:
            lhs[ld] = rhs[rd] = make.factor(k, REDUCE, "add")
            out[od] = make.replicate(m)
            summed.append((rd, ld, p["rhs_dilation"][i]))
        windows[ld] = slide(
            n, m, k, p["window_strides"][i], p["padding"][i][0], p["lhs_dilation"][i], p["rhs_dilation"][i]
        )

    def local(shards: Shards, x: Any, kernel: Any) -> list[Any]:
        if 0 in out_shape:
            return [jnp.zeros(shards.out_shape(), shards.equation.outputs[0].dtype)]
        x, kernel = shards.masked(x, 0, {lhs_spec[1]}), shards.masked(kernel, 1, {rhs_spec[1]})
        padding, base = list(p["padding"]), list(p["lhs_dilation"])
        for i, d in enumerate(lhs_spec[2:]):
            if atoms := shards.atoms(lhs[d][0]):
                x, padding[i], base[i] = reached(shards, x, d, atoms, windows[d](shards.mesh.count(atoms)), 0)
        groups = shards.size(group[0]) if group else 1

        def convolve(x: Any, kernel: Any) -> list[Any]:
            return shards.bind(
                x,
                kernel,
                padding=tuple(padding),
                lhs_dilation=tuple(base),
                feature_group_count=groups if feature_groups > 1 else 1,
                batch_group_count=groups if batch_groups > 1 else 1,
            )

        for d, over, dilation in summed:
            convolve = _with_kernels_of(shards, convolve, d, over, rhs_shape[d], dilation)
        return convolve(x, kernel)

    moved = [d in windows and 0 not in out_shape for d in range(len(lhs))]
    sends = sends_of(call, 0, lhs, moved, lambda d, parts: windows[d](parts))
    flops = 2 * math.prod(out_shape) * math.prod(rhs_shape[d] for d in rhs_spec[1:]) // math.prod(p["lhs_dilation"])
    return make.rule(
        [lhs, rhs], [out], local=local, flops=flops, masks_itself=True, sends=sends,
        linear=in_either_operand(call), finite=in_either_finite_operand(call),
    )  # fmt: skip


def _with_kernels_of(
    shards: Shards, convolve: Callable[..., list[Any]], dim: int, over: int, size: int, dilation: int
) -> Callable[..., list[Any]]:
    """A convolution for each length of a split kernel's parts: zeros at their end would make NaN of infinities."""
    atoms = shards.atoms(shards.rule.operands[1][dim][0])
    parts = shards.mesh.count(atoms)
    local = -(-size // parts)
    lengths = [max(0, min(local, size - i * local)) for i in range(parts)]
    if len(set(lengths)) == 1:
        return convolve

    def of_length(n: int) -> Callable[..., list[Any]]:
        def run(x: Any, kernel: Any) -> list[Any]:
            if not n:
                return [jnp.zeros(shards.out_shape(), shards.equation.outputs[0].dtype)]
            x = lax.slice_in_dim(x, 0, x.shape[over] - (local - n) * dilation, axis=over)
            return convolve(x, lax.slice_in_dim(kernel, 0, n, axis=dim))

        return run

    kinds = sorted(set(lengths))
    which = jnp.asarray(np.array([kinds.index(n) for n in lengths], np.int32))[lax.axis_index(atoms)]
    return lambda x, kernel: lax.switch(which, [of_length(n) for n in kinds], x, kernel)
