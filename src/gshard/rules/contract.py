"""Contractions (``dot_general``), also by groups of rows (``ragged_dot_general``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards, along
from gshard.core.program import Equation
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.language.registry import Call, rule
from gshard.language.traits import Maker, Ways, emit, if_finite, is_exact


def in_either_operand(call: Call) -> Ways:
    """The value of ``linear`` for a product: parts of sums of integers pass from either operand."""
    preferred = call.params.get("preferred_element_type")
    exact = bool(call.in_dtypes) and all(is_exact(dtype) and preferred in (None, dtype) for dtype in call.in_dtypes)
    return [("add", (0,)), ("add", (1,))] if exact else []


def in_either_finite_operand(call: Call) -> Ways:
    """The value of ``finite`` for a product: parts of sums of floats pass from either operand."""
    dtypes = (*call.in_dtypes[:2], call.params.get("preferred_element_type"))
    are_floats = all(dtype is None or jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
    return if_finite(call.in_dtypes[0], (0,), (1,)) if call.in_dtypes and are_floats else []


def _merged(a: Maker, e: Equation) -> bool:
    lhs, rhs = map(a.either, e.inputs)
    summed, batch = e.params["dimension_numbers"]
    for lhs_dim, rhs_dim in (*zip(*summed, strict=True), *zip(*batch, strict=True)):
        if lhs.groups[lhs_dim] != rhs.groups[rhs_dim]:
            return False
    numbers = tuple((lhs.all_dims(lhs_dims), rhs.all_dims(rhs_dims)) for lhs_dims, rhs_dims in (summed, batch))
    groups = [lhs.groups[d] for d in batch[0]]
    for x, summed_dims, batch_dims in zip((lhs, rhs), summed, batch, strict=True):
        groups += [group for d, group in enumerate(x.groups) if d not in (*summed_dims, *batch_dims)]
    return emit(a, e, (lhs.array, rhs.array), tuple(groups), dimension_numbers=numbers)


@rule("dot_general", merged=_merged)
def dot_general(call: Call) -> Rule:
    """Batch and free dimensions are parallel. Contracted dimensions are reduced by ``add``.

    If a contracted dimension is split, each device computes a part of the sum (the Einsum case study of the GShard
    paper, section 3.3.2). gshard adds the parts where the result is read.

    >>> dims = (((2,), (1,)), ((0,), (0,)))
    >>> print(dot_general(Call("dot_general", {"dimension_numbers": dims}, ((2, 4, 8), (2, 8, 6)), ((2, 4, 6),), ())))
    a b c, a c d -> a b d; add over c=8
    """
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = call.params["dimension_numbers"]
    lhs_shape, rhs_shape = call.in_shapes
    preferred = call.params.get("preferred_element_type")
    # Products of booleans are "and", sums are "or".
    logical = bool(call.in_dtypes) and jnp.bool_ == (call.in_dtypes[0] if preferred is None else preferred)
    monoid = "or" if logical else "add"
    make = RuleMaker()
    lhs = [make.factor(n, REDUCE, monoid) if d in lhs_sum else make.factor(n) for d, n in enumerate(lhs_shape)]
    shared = dict(zip((*rhs_batch, *rhs_sum), (*lhs_batch, *lhs_sum), strict=True))
    rhs = [lhs[shared[d]] if d in shared else make.factor(n) for d, n in enumerate(rhs_shape)]
    batch = [lhs[d] for d in lhs_batch]
    free_lhs = [dim for d, dim in enumerate(lhs) if d not in lhs_sum and d not in lhs_batch]
    free_rhs = [dim for d, dim in enumerate(rhs) if d not in shared]
    flops = 2 * math.prod(f.size for f in make.factors)
    linear, finite = in_either_operand(call), in_either_finite_operand(call)
    part = None if logical else _part
    return make.rule([lhs, rhs], [[*batch, *free_lhs, *free_rhs]], flops=flops, linear=linear, finite=finite, part=part)


def _part(shards: Shards, lhs: Any, rhs: Any) -> Any:
    """The product of parts. Low-precision floats stay in float32, in which XLA also adds products of whole arrays."""
    dtype, precision = shards.equation.outputs[0].dtype, shards.params.get("precision")
    has_algorithm = isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 and not has_algorithm:
        return shards.bind(lhs, rhs, preferred_element_type=jnp.dtype(jnp.float32))[0]
    return shards.bind(lhs, rhs)[0]


# Contractions by groups (``ragged_dot_general``): rows belong to groups, whose sizes are known at run time.


@rule("ragged_dot_general")
def ragged_dot_general(call: Call) -> Rule:
    """Rows and free dimensions are parallel. Contracted dimensions, and the groups of matrices, are reduced.

    If sizes differ between batches, the dimensions that they refer to cannot be split, except the batches themselves.

    >>> import jax
    >>> numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    >>> shapes = ((6, 4), (3, 4, 5), (3,))
    >>> print(ragged_dot_general(Call("", {"ragged_dot_dimension_numbers": numbers}, shapes, ((6, 5),), ())))
    a b, c b d, e -> a d; add over b=4; add over c=3; replicate e
    """
    ragged = _Ragged(call)
    make, sizes_shape = ragged.make, call.in_shapes[2]
    batches = [ragged.lhs[d] for d in ragged.sized_batches]
    sizes = [*batches, *(make.replicate(n) for n in sizes_shape[len(batches) :])]
    return make.rule(
        [ragged.lhs, ragged.rhs, sizes], [ragged.result], local=ragged.local, flops=ragged.flops,
        finite=in_either_finite_operand(call),
        groups=sizes_shape[-1] if ragged.ragged_rows or ragged.ragged_sum else 1,
    )  # fmt: skip


class _Ragged:
    """The factors of a contraction by groups, and how it runs on shards."""

    def __init__(self, call: Call) -> None:
        self.numbers = numbers = call.params["ragged_dot_dimension_numbers"]
        (self.lhs_sum, self.rhs_sum), (self.lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
        (self.ragged,) = numbers.lhs_ragged_dimensions
        lhs_shape, rhs_shape, sizes_shape = call.in_shapes
        self.same_sizes = len(sizes_shape) == 1  # of all batches
        self.ragged_rows = self.ragged not in self.lhs_sum and self.ragged not in self.lhs_batch
        self.ragged_sum = self.ragged in self.lhs_sum
        is_sized = not self.same_sizes and (self.ragged_rows or self.ragged_sum)
        self.sized_batches = self.lhs_batch if is_sized else ()  # the leading dimensions of sizes
        self.make = make = RuleMaker()
        self.lhs = [self._lhs_dim(d, n) for d, n in enumerate(lhs_shape)]
        shared = dict(zip((*rhs_batch, *self.rhs_sum), (*self.lhs_batch, *self.lhs_sum), strict=True))
        group_dim = numbers.rhs_group_dimensions[0] if self.ragged_rows else -1

        def rhs_dim(d: int, n: int) -> tuple[int, ...]:
            if d in shared:
                return self.lhs[shared[d]]
            if d != group_dim:
                return make.factor(n)
            return make.factor(n, REDUCE, "add") if self.same_sizes else make.replicate(n)

        self.rhs = [rhs_dim(d, n) for d, n in enumerate(rhs_shape)]
        self.groups: tuple[int, ...] = ()
        if self.ragged_rows:
            self.groups = self.rhs[group_dim]
        elif self.ragged_sum and self.same_sizes:
            self.groups = make.factor(sizes_shape[-1])
        free = [dim for d, dim in enumerate(self.lhs) if d not in self.lhs_sum and d not in self.lhs_batch]
        rhs_free = [d for d in range(len(rhs_shape)) if d not in shared and d != group_dim]
        self.flops = 2 * math.prod(lhs_shape) * math.prod(rhs_shape[d] for d in rhs_free)
        self.result = [*(self.lhs[d] for d in self.lhs_batch), *free, *(self.rhs[d] for d in rhs_free)]
        if self.ragged_sum:
            self.result.insert(0, self.groups or make.replicate(sizes_shape[-1]))

    def _lhs_dim(self, d: int, n: int) -> tuple[int, ...]:
        if d in self.sized_batches:
            return self.make.factor(n)
        if self._depends_on_batch(d):
            return self.make.replicate(n)
        return self.make.factor(n, REDUCE, "add") if d in self.lhs_sum else self.make.factor(n)

    def _depends_on_batch(self, d: int) -> bool:
        """Whether sizes that differ between batches refer to a dimension: the ragged one, and those before it."""
        if self.same_sizes:
            return False
        if self.ragged_rows:
            return d <= self.ragged and d not in self.lhs_sum
        return not self.ragged_sum or d in self.lhs_sum

    def local(self, shards: Shards, x: Any, y: Any, sizes: Any) -> list[Any]:
        """Runs the contraction on the rows, and with the groups, of a device."""
        if not self.same_sizes:
            return _without_lone_batches(shards, self.numbers, x, y, sizes)
        ragged, groups = self.ragged, self.groups
        rows, rows_dim = x.shape[ragged], self.lhs[ragged]
        groups_are_split = any(shards.atoms(f) for f in groups)
        if not groups_are_split and not shards.atoms(rows_dim[0]):
            return shards.bind(x, y, sizes)
        ends = jnp.cumsum(sizes)
        # Groups that are padding of the last part are empty, and begin at the end of the last group.
        count = math.prod(map(shards.size, groups)) if groups else sizes.size
        padding = (count * math.prod(shards.mesh.count(shards.atoms(f)) for f in groups)) - sizes.size
        starts, ends = jnp.pad(ends - sizes, (0, padding), mode="edge"), jnp.pad(ends, (0, padding), mode="edge")
        starts = jnp.where(jnp.arange(starts.size) < sizes.size, starts, ends)
        first_row = jnp.asarray(shards.offset(rows_dim), ends.dtype)
        first_group = shards.offset(groups)
        starts, ends = (
            jnp.clip(lax.dynamic_slice_in_dim(row, first_group, count) - first_row, 0, rows) for row in (starts, ends)
        )
        local_sizes = ends - starts
        if not groups_are_split:
            return shards.bind(x, y, local_sizes)
        # While the product is computed, the rows of the device's groups come first.
        x = jnp.roll(x, -starts[0], axis=ragged)
        if self.ragged_sum:
            y = jnp.roll(y, -starts[0], axis=self.rhs_sum[self.lhs_sum.index(ragged)])
            return shards.bind(x, y, local_sizes)
        (out,) = shards.bind(x, y, local_sizes)
        axis = self.result.index(rows_dim)
        has_group = along(jnp.arange(rows, dtype=local_sizes.dtype) < jnp.sum(local_sizes), axis, out.ndim)
        return [jnp.roll(jnp.where(has_group, out, jnp.zeros((), out.dtype)), starts[0], axis=axis)]


def _without_lone_batches(shards: Shards, numbers: Any, x: Any, y: Any, sizes: Any) -> list[Any]:
    """Runs the equation on batches that have their own sizes; without batch dimensions if a device has one batch.

    XLA for TPU compiles ragged products without batch dimensions only.
    """
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    if ragged in lhs_batch or any(x.shape[d] != 1 for d in lhs_batch) or not lhs_batch:
        return shards.bind(x, y, sizes)

    def renumbered(dims: Sequence[int], removed: Sequence[int]) -> tuple[int, ...]:
        return tuple(d - sum(b < d for b in removed) for d in dims)

    one_batch = lax.RaggedDotDimensionNumbers(
        ((renumbered(lhs_sum, lhs_batch), renumbered(rhs_sum, rhs_batch)), ((), ())),
        renumbered(numbers.lhs_ragged_dimensions, lhs_batch), renumbered(numbers.rhs_group_dimensions, rhs_batch),
    )  # fmt: skip
    leading = tuple(range(len(lhs_batch)))  # of sizes [*batches, *dimensions before the ragged one, groups]
    arrays = lax.squeeze(x, lhs_batch), lax.squeeze(y, rhs_batch), lax.squeeze(sizes, leading)
    (out,) = shards.bind(*arrays, ragged_dot_dimension_numbers=one_batch)
    # The dimensions of batches come first; that of groups comes before them if rows are summed.
    first = 1 if ragged in lhs_sum else 0
    return [lax.expand_dims(out, tuple(range(first, first + len(lhs_batch))))]
