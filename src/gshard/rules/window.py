"""Sliding windows: convolutions and pooling.

A spatial dimension is an ``exchange`` factor of operand and result: each device fetches the rows that the windows of
its own results reach into (a halo), with strides, padding, and dilation of window and operand taken into account, fills
what lies outside, and then works without padding (GShard paper, section 3.3.3 and appendix A.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gshard.comm.halo import Window
from gshard.comm.shards import Shards, identity
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.rules.registry import Call, rule
from gshard.rules.slicing import sends_of


def sliding(
    n: int, m: int, size: int, stride: int, low: int, base: int, dilation: int
) -> Callable[[int], Window]:
    """The window of an operand of ``n`` elements that each part of ``m`` results reaches into.

    Result ``o`` reads positions ``o * stride - low`` to that plus ``(size - 1) * dilation``; operand elements stand
    ``base`` apart.
    """

    def window(parts: int) -> Window:
        local = -(-m // parts)
        extent = (local - 1) * stride + (size - 1) * dilation + 1 if local and size else 0
        return Window(n, -low, local * stride, parts, max(extent, 0), base)

    return window


@rule("conv_general_dilated")
def conv_general_dilated(call: Call) -> Rule:
    """Batch and output features are parallel, input features reduce, spatial dimensions exchange halos, groups split.

    >>> import jax
    >>> numbers = jax.lax.conv_dimension_numbers((2, 3, 8), (5, 3, 3), ("NCW", "OIW", "NCW"))
    >>> params = {"dimension_numbers": numbers, "window_strides": (1,), "padding": ((1, 1),), "lhs_dilation": (1,)}
    >>> params |= {"rhs_dilation": (1,), "feature_group_count": 1, "batch_group_count": 1}
    >>> print(conv_general_dilated(Call("conv", params, ((2, 3, 8), (5, 3, 3)), ((2, 5, 8),), ("f4", "f4"))))
    a b c, d b e -> a d c; add over b=3; exchange c; whole e
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
    for i, (ld, rd, od) in enumerate(zip(lhs_spec[2:], rhs_spec[2:], out_spec[2:], strict=True)):
        n, k, m = lhs_shape[ld], rhs_shape[rd], out_shape[od]
        rhs[rd] = make.whole(k)
        lhs[ld] = out[od] = make.exchange(max(n, m))
        windows[ld] = sliding(
            n, m, k, p["window_strides"][i], p["padding"][i][0], p["lhs_dilation"][i], p["rhs_dilation"][i]
        )

    def local(shards: Shards, x: Any, kernel: Any) -> list[Any]:
        padding, base = list(p["padding"]), list(p["lhs_dilation"])
        for i, d in enumerate(lhs_spec[2:]):
            atoms = shards.atoms(lhs[d][0])
            if atoms:
                x = shards.window(x, d, atoms, windows[d](shards.mesh.count(atoms)), 0)
                padding[i], base[i] = (0, 0), 1
        groups = shards.size(group[0]) if group else 1
        return shards.bind(
            x,
            kernel,
            padding=tuple(padding),
            lhs_dilation=tuple(base),
            feature_group_count=groups if feature_groups > 1 else 1,
            batch_group_count=groups if batch_groups > 1 else 1,
        )

    moved = [d in windows for d in range(len(lhs))]
    sends = sends_of(call, 0, lhs, moved, lambda d, parts: windows[d](parts))
    flops = 2 * math.prod(out_shape) * math.prod(rhs_shape[d] for d in rhs_spec[1:])
    return make.rule([lhs, rhs], [out], local=local, flops=flops, sends=sends)


_MONOIDS = {"reduce_window_sum": "add", "reduce_window_max": "max", "reduce_window_min": "min"}


@rule(*_MONOIDS)
def pooling(call: Call) -> Rule:
    """Dimensions with a window of one element are parallel, the others exchange halos.

    >>> params = {"window_dimensions": (1, 3), "window_strides": (1, 2), "padding": ((0, 0), (1, 1))}
    >>> params |= {"base_dilation": (1, 1), "window_dilation": (1, 1)}
    >>> print(pooling(Call("reduce_window_sum", params, ((2, 8),), ((2, 4),), ("f4",))))
    a b -> a b; exchange b
    """
    (shape,), (target,), p = call.in_shapes, call.out_shapes, call.params
    make = RuleMaker()
    moved = [not _stays(p, d) for d in range(len(shape))]
    dims = [make.exchange(max(n, m)) if w else make.factor(n) for n, m, w in zip(shape, target, moved, strict=True)]

    def window(d: int, parts: int) -> Window:
        return sliding(
            shape[d], target[d], p["window_dimensions"][d], p["window_strides"][d], p["padding"][d][0],
            p["base_dilation"][d], p["window_dilation"][d],
        )(parts)  # fmt: skip

    def local(shards: Shards, x: Any) -> list[Any]:
        padding, base = list(p["padding"]), list(p["base_dilation"])
        fill = identity(_MONOIDS[call.name], x.dtype)
        for d, dim in enumerate(dims):
            atoms = shards.atoms(dim[0])
            if moved[d] and atoms:
                x = shards.window(x, d, atoms, window(d, shards.mesh.count(atoms)), fill)
                padding[d], base[d] = (0, 0), 1
        return shards.bind(x, padding=tuple(padding), base_dilation=tuple(base))

    flops = math.prod(target) * math.prod(p["window_dimensions"])
    return make.rule([dims], [dims], local=local, flops=flops, sends=sends_of(call, 0, dims, moved, window))


def _stays(p: dict[str, Any], d: int) -> bool:
    return (
        p["window_dimensions"][d] == 1
        and p["window_strides"][d] == 1
        and tuple(p["padding"][d]) == (0, 0)
        and p.get("base_dilation", (1,) * (d + 1))[d] == 1
    )


@rule("select_and_scatter_add", "select_and_gather_add", "reduce_window", "select_and_scatter")
def by_other_dimensions(call: Call) -> Rule:
    """Dimensions with a window of one element are parallel, the others are whole."""
    arrays = [s for s in (*call.in_shapes, *call.out_shapes) if s]
    ndim = len(arrays[0])
    make = RuleMaker()
    parallel: list[tuple[int, ...] | None] = [
        make.factor(arrays[0][d]) if _stays(call.params, d) and len({s[d] for s in arrays}) == 1 else None
        for d in range(ndim)
    ]

    def tensor(shape: Sequence[int]) -> list[tuple[int, ...]]:
        return [dim if dim is not None else make.whole(n) for n, dim in zip(shape, parallel, strict=False)]

    return make.rule([tensor(s) for s in call.in_shapes], [tensor(s) for s in call.out_shapes])
