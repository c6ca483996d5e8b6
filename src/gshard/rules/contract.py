"""Contractions (``dot_general``)."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards
from gshard.core.program import Equation
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.language.merged_dims import Maker, emit
from gshard.language.passing import Ways, if_finite, is_exact
from gshard.language.registry import Call, rule


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
