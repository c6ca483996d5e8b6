"""Contractions by groups: ``ragged_dot_general``, whose rows belong to groups of sizes known only when it runs.

    f32[rows,k], f32[groups,k,n], sizes -> f32[rows,n]       rows are ragged: each meets the matrix of its group
    f32[rows,m], f32[rows,n], sizes -> f32[groups,m,n]       contracted rows are ragged: a sum for each group

Every device cuts the groups' first and last rows, counted in the whole array, to the rows and groups that it holds.
Where each batch has sizes of its own, a batch is one product by itself, and devices share out batches.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards, along
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.language.registry import Call, rule
from gshard.rules.contract import in_either_finite_operand


@rule("ragged_dot_general")
def ragged_dot_general(call: Call) -> Rule:
    """Rows and free dimensions are parallel; groups of matrices are reduced like contracted dimensions.

    Sizes that differ from batch to batch leave the dimensions that they concern whole, but for the batches themselves.

    >>> import jax
    >>> numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    >>> shapes = ((6, 4), (3, 4, 5), (3,))
    >>> print(ragged_dot_general(Call("", {"ragged_dot_dimension_numbers": numbers}, shapes, ((6, 5),), ())))
    a b, c b d, e -> a d; add over b=4; add over c=3; replicate e
    """
    numbers = call.params["ragged_dot_dimension_numbers"]
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    lhs_shape, rhs_shape, sizes_shape = call.in_shapes
    alike = len(sizes_shape) == 1
    by_rows, by_sums = ragged not in lhs_sum and ragged not in lhs_batch, ragged in lhs_sum
    each_its_own = lhs_batch if not alike and (by_rows or by_sums) else ()  # batches whose sizes come first in `sizes`
    make = RuleMaker()

    def concerned(d: int) -> bool:
        """Whether sizes that differ are about a dimension of the rows: the ragged one, and those before it."""
        if alike:
            return False
        return (d <= ragged and d not in lhs_sum) if by_rows else not by_sums or d in lhs_sum

    def left(d: int, n: int) -> tuple[int, ...]:
        if d in each_its_own:
            return make.factor(n)
        if concerned(d):
            return make.replicate(n)
        return make.factor(n, REDUCE, "add") if d in lhs_sum else make.factor(n)

    lhs = [left(d, n) for d, n in enumerate(lhs_shape)]
    shared = dict(zip((*rhs_batch, *rhs_sum), (*lhs_batch, *lhs_sum), strict=True))
    grouped = numbers.rhs_group_dimensions[0] if by_rows else -1
    rhs = [
        lhs[shared[d]] if d in shared
        else make.factor(n) if d != grouped
        else make.factor(n, REDUCE, "add") if alike
        else make.replicate(n)
        for d, n in enumerate(rhs_shape)
    ]  # fmt: skip
    groups = rhs[grouped] if by_rows else make.factor(sizes_shape[-1]) if by_sums and alike else ()
    free = [dim for d, dim in enumerate(lhs) if d not in lhs_sum and d not in lhs_batch]
    free += [dim for d, dim in enumerate(rhs) if d not in shared and d != grouped]
    result = [*([groups or make.replicate(sizes_shape[-1])] if by_sums else []), *(lhs[d] for d in lhs_batch), *free]

    def local(shards: Shards, x: Any, y: Any, sizes: Any) -> list[Any]:
        rows, parted = x.shape[ragged], any(shards.atoms(f) for f in groups)
        if not parted and not shards.atoms(lhs[ragged][0]):
            return shards.bind(x, y, sizes)
        ends = jnp.cumsum(sizes)
        # Groups that only fill up the last part are empty and begin where the last one ends.
        count = math.prod(map(shards.size, groups)) if groups else sizes.size
        missing = (count * math.prod(shards.mesh.count(shards.atoms(f)) for f in groups)) - sizes.size
        starts, ends = jnp.pad(ends - sizes, (0, missing), mode="edge"), jnp.pad(ends, (0, missing), mode="edge")
        starts = jnp.where(jnp.arange(starts.size) < sizes.size, starts, ends)
        starts, ends = (
            jnp.clip(lax.dynamic_slice_in_dim(at, shards.offset(groups), count) - first, 0, rows)
            for first in [jnp.asarray(shards.offset(lhs[ragged]), ends.dtype)]
            for at in (starts, ends)
        )
        own = ends - starts
        if not parted:
            return shards.bind(x, y, own)
        # The rows of the groups held here come first while the product is computed.
        x = jnp.roll(x, -starts[0], axis=ragged)
        if by_sums:
            y = jnp.roll(y, -starts[0], axis=rhs_sum[lhs_sum.index(ragged)])
            return shards.bind(x, y, own)
        (out,) = shards.bind(x, y, own)
        axis = result.index(lhs[ragged])
        held = along(jnp.arange(rows, dtype=own.dtype) < jnp.sum(own), axis, out.ndim)
        return [jnp.roll(jnp.where(held, out, jnp.zeros((), out.dtype)), starts[0], axis=axis)]

    of_batches = [lhs[d] for d in each_its_own]
    sizes = [*of_batches, *(make.replicate(n) for n in sizes_shape[len(of_batches) :])]
    flops = 2 * math.prod(lhs_shape) * math.prod(rhs_shape[d] for d in range(len(rhs_shape)) if rhs[d] in free)
    return make.rule(
        [lhs, rhs, sizes], [result], local=local if alike else None, flops=flops, finite=in_either_finite_operand(call),
        groups=sizes_shape[-1] if by_rows or by_sums else 1,
    )  # fmt: skip
