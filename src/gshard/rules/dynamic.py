"""Windows whose place is known only when the program runs: dynamic_slice and dynamic_update_slice.

The start is clamped for the whole array, as JAX does, before any shard looks at its own part; also where nothing is
split, because XLA merges a slice of a slice (the second may be ours) and forgets to clamp the first.

    dynamic_slice            a split dimension that is cut is a ``reduce`` factor: every device contributes the elements
                             that it holds and zero bits for the others, so as many bytes are sent as the result has
    dynamic_update_slice     a split dimension stays split: every device writes what falls into its part, and touches no
                             more than a window of it
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
    """Dimensions taken whole are parallel.

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
        split = [d for d in range(len(shape)) if sizes[d] != shape[d] and shards.atoms(operand[d][0])]
        take = [m if n != m else local for n, m, local in zip(shape, sizes, x.shape, strict=True)]
        for d in split:
            take[d] = x.shape[d]
        starts = tuple(clamped(s, n, m) for s, n, m in zip(starts, shape, sizes, strict=True))
        begins = [jnp.zeros_like(s) if d in split else s for d, s in enumerate(starts)]
        (x,) = shards.bind(x, *begins, slice_sizes=tuple(take))
        for d in split:
            index = starts[d] - shards.offset(operand[d]) + jnp.arange(sizes[d], dtype=jnp.int32)
            held = (index >= 0) & (index < x.shape[d])
            x = taken(opaque_for_slice(x, d, sizes[d]), index, d)
            x = jnp.where(along(held, d, x.ndim), x, jnp.zeros((), x.dtype))
        return [x]

    starts: list[list[tuple[int, ...]]] = [[] for _ in operand]
    return make.rule([operand, *starts], [result], local=local, masks_itself=True, linear=moves(0))


@rule("dynamic_update_slice", same_on_parts=True)
def dynamic_update_slice(call: Call) -> Rule:
    """Dimensions of the operand are parallel; the update is replicated where it covers only a part.

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
        covered = [d for d in range(len(shape)) if partial[d]]
        starts = tuple(clamped(s, n, m) for s, n, m in zip(starts, shape, sizes, strict=True))
        if not any(shards.atoms(operand[d][0]) for d in covered) or not values.size:
            return shards.bind(x, values, *starts) if values.size else [x]
        # Only the window is read and written, or what of it may be in this part.
        sizes_here = [min(m, length) if p else length for m, length, p in zip(sizes, x.shape, partial, strict=True)]
        begins, written = list(starts), jnp.ones((1,) * x.ndim, jnp.bool_)
        for d, size in enumerate(sizes_here):
            if not partial[d]:
                begins[d] = jnp.zeros((), jnp.int32)
            elif shards.atoms(operand[d][0]):
                first = starts[d] - shards.offset(operand[d])
                begins[d] = jnp.clip(first, 0, x.shape[d] - size)
                index = begins[d] - first + jnp.arange(size, dtype=jnp.int32)
                if sizes[d] > 1:
                    values = taken(opaque_for_slice(values, d, size), index, d)
                written &= along((index >= 0) & (index < sizes[d]), d, x.ndim)
        x = opaque_for_one(x, math.prod(sizes_here))
        there = lax.dynamic_slice(x, begins, sizes_here)
        return [lax.dynamic_update_slice(x, jnp.where(written, values, there), begins)]

    starts: list[list[tuple[int, ...]]] = [[] for _ in operand]
    return make.rule([operand, update, *starts], [operand], local=local, linear=moves(0, 1))


def clamped(start: Any, n: int, size: int) -> Any:
    """A start index moved so that a window of ``size`` fits into ``n`` elements, as int32."""
    start = jnp.asarray(start)
    if start.dtype.itemsize < 4:
        start = start.astype(jnp.int32)
    return jnp.clip(start, jnp.zeros((), start.dtype), jnp.asarray(max(n - size, 0), start.dtype)).astype(jnp.int32)
