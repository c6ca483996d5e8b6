"""Slices and updates at positions that are known at run time (dynamic_slice, dynamic_update_slice).

Each device first clamps the start for the whole array, as JAX does. It does so even if nothing is split, because XLA
merges a slice of a slice (the second slice may come from gshard) and then does not clamp the first start.

    dynamic_slice            a cut dimension is a ``reduce`` factor: each device contributes the elements that it holds,
                             and zero bits for the others, so devices send as many bytes as the result has
    dynamic_update_slice     a cut dimension is parallel: each device writes the elements that fall into its part, and
                             reads and writes only a window of the part
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards, along
from gshard.core.rule import REDUCE, Rule, RuleMaker, moves
from gshard.core.xla_workarounds import opaque_for_one, opaque_for_slice, taken
from gshard.language.registry import Call, rule


@rule("dynamic_slice", handed_on=True)
def dynamic_slice(call: Call) -> Rule:
    """Dimensions that are not cut are parallel.

    >>> params, dtypes = {"slice_sizes": (4, 2)}, ("f", "i", "i")
    >>> print(dynamic_slice(Call("dynamic_slice", params, ((4, 6), (), ()), ((4, 2),), dtypes)))
    a b, (), () -> a c; pick over b=6; replicate c
    """
    shape, sizes = call.in_shapes[0], call.params["slice_sizes"]
    make = RuleMaker()
    operand, result = [], []
    for n, m in zip(shape, sizes, strict=True):
        if n == m:
            operand.append(make.factor(n))
            result.append(operand[-1])
        else:
            operand.append(make.replicate(n) if call.on_keys else make.factor(n, REDUCE, "pick"))
            result.append(make.replicate(m))

    def local(shards: Shards, x: Any, *starts: Any) -> list[Any]:
        starts = tuple(_clamped(start, n, m) for start, n, m in zip(starts, shape, sizes, strict=True))
        cut_across_parts = [d for d in range(len(shape)) if sizes[d] != shape[d] and shards.atoms(operand[d][0])]
        local_starts = [jnp.zeros_like(start) if d in cut_across_parts else start for d, start in enumerate(starts)]
        local_sizes = [
            local if n == m or d in cut_across_parts else m
            for d, (n, m, local) in enumerate(zip(shape, sizes, x.shape, strict=True))
        ]
        (x,) = shards.bind(x, *local_starts, slice_sizes=tuple(local_sizes))
        for d in cut_across_parts:
            index = starts[d] - shards.offset(operand[d]) + jnp.arange(sizes[d], dtype=jnp.int32)
            is_held = along((index >= 0) & (index < x.shape[d]), d, x.ndim)
            x = taken(opaque_for_slice(x, d, sizes[d]), index, d)
            x = jnp.where(is_held, x, jnp.zeros((), x.dtype))
        return [x]

    starts: list[list[tuple[int, ...]]] = [[] for _ in operand]
    return make.rule([operand, *starts], [result], local=local, masks_itself=True, linear=moves(0))


@rule("dynamic_update_slice", same_on_parts=True)
def dynamic_update_slice(call: Call) -> Rule:
    """Dimensions of the operand are parallel. The update cannot be split along dimensions that it covers only partly.

    >>> params, shapes = {}, ((4, 6), (4, 2), (), ())
    >>> print(dynamic_update_slice(Call("dynamic_update_slice", params, shapes, ((4, 6),), ("f", "f", "i", "i"))))
    a b, a c, (), () -> a b; replicate c
    """
    shape, sizes = call.in_shapes[:2]
    make = RuleMaker()
    partial = [n != m for n, m in zip(shape, sizes, strict=True)]
    operand = [make.replicate(n) if p and call.on_keys else make.factor(n) for n, p in zip(shape, partial, strict=True)]
    update = [dim if n == m else make.replicate(m) for dim, n, m in zip(operand, shape, sizes, strict=True)]

    def local(shards: Shards, x: Any, values: Any, *starts: Any) -> list[Any]:
        starts = tuple(_clamped(start, n, m) for start, n, m in zip(starts, shape, sizes, strict=True))
        if not values.size:
            return [x]
        if not any(p and shards.atoms(dim[0]) for p, dim in zip(partial, operand, strict=True)):
            return shards.bind(x, values, *starts)
        # The device reads and writes only a window of its part, of the size of the update.
        sizes_here = [min(m, length) if p else length for m, length, p in zip(sizes, x.shape, partial, strict=True)]
        local_starts = list(starts)
        is_written = jnp.ones((1,) * x.ndim, jnp.bool_)
        for d, size in enumerate(sizes_here):
            if not partial[d]:
                local_starts[d] = jnp.zeros((), jnp.int32)
            elif shards.atoms(operand[d][0]):
                first = starts[d] - shards.offset(operand[d])
                local_starts[d] = jnp.clip(first, 0, x.shape[d] - size)
                index = local_starts[d] - first + jnp.arange(size, dtype=jnp.int32)
                if sizes[d] > 1:
                    values = taken(opaque_for_slice(values, d, size), index, d)
                is_written &= along((index >= 0) & (index < sizes[d]), d, x.ndim)
        x = opaque_for_one(x, math.prod(sizes_here))
        old_values = lax.dynamic_slice(x, local_starts, sizes_here)
        return [lax.dynamic_update_slice(x, jnp.where(is_written, values, old_values), local_starts)]

    starts: list[list[tuple[int, ...]]] = [[] for _ in operand]
    return make.rule([operand, update, *starts], [operand], local=local, linear=moves(0, 1))


def _clamped(start: Any, n: int, size: int) -> Any:
    """A start index (int32), clamped so that a window of ``size`` elements fits into ``n`` elements."""
    start = jnp.asarray(start)
    if start.dtype.itemsize < 4:
        start = start.astype(jnp.int32)
    return jnp.clip(start, jnp.zeros((), start.dtype), jnp.asarray(max(n - size, 0), start.dtype)).astype(jnp.int32)
