"""Concatenates slices in one equation, so that each element moves once (``rewrite.compose_movement``).

Each part of the result fetches from each operand the elements of its segment that the part contains. A scalar operand
fills its segment with copies, and nothing is sent. In derivatives a concatenation is a sum of padded segments
(``added``).

    concatenate(x[7:], x[:7]) of 8 elements over 4 parts      each part sends one element to its neighbour
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.core.rule import Rule
from gshard.language.function_primitive import function_primitive
from gshard.language.registry import Call, rule
from gshard.rules.joining import joined


def _run(*xs: Any, dimension: int, slices: Sequence[tuple[int, int]], added: bool) -> Any:
    array = next(x for x in xs if x.shape)

    def segment(x: Any, start: int, end: int) -> Any:
        if x.shape:
            return lax.slice_in_dim(x, start, end, axis=dimension)
        return lax.full([end - start if d == dimension else n for d, n in enumerate(array.shape)], x, array.dtype)

    x = lax.concatenate([segment(x, start, end) for x, (start, end) in zip(xs, slices, strict=True)], dimension)
    return with_zero(x) if added else x


def with_zero(x: Any) -> Any:
    """The sum of an array and zeros: -0.0 + 0.0 is 0.0."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(with_zero(x.real), with_zero(x.imag))
    return jnp.where(x == 0, jnp.zeros((), x.dtype), x)


def _shape(*xs: Any, dimension: int, slices: Sequence[tuple[int, int]], added: bool) -> Any:
    array = next(x for x in xs if x.shape)
    length = sum(end - start for start, end in slices)
    return jax.core.ShapedArray(tuple(length if d == dimension else n for d, n in enumerate(array.shape)), array.dtype)


concatenate_slices_p = function_primitive("concatenate_slices", _run, _shape, dimension="dimension")


@rule("concatenate_slices", same_on_parts=True)
def concatenate_slices(call: Call) -> Rule:
    """Like ``concatenate``, for slices of the operands.

    >>> params = {"dimension": 0, "slices": ((7, 8), (0, 7)), "added": False}
    >>> print(concatenate_slices(Call("concatenate_slices", params, ((8, 2), (8, 2)), ((8, 2),), ("f", "f"))))
    a b, a b -> a b; communicate a
    """
    joined_rule = joined(call, call.params["dimension"], call.params["slices"])
    if not call.params["added"]:
        return joined_rule
    join = joined_rule.local
    assert join is not None
    linear = tuple(way for way in joined_rule.linear if way[0] in ("add", "pick"))
    return dataclasses.replace(
        joined_rule, local=lambda shards, *xs: [with_zero(x) for x in join(shards, *xs)], linear=linear
    )
