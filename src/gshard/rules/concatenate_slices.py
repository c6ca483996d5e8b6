"""Concatenation of slices as one equation, so that each element moves once (``rewrite.compose_movement`` finds them).

It communicates: part ``i`` of the result takes from each operand the window where its segment and the part overlap. An
operand without dimensions is a number; as many copies of it as its segment is long are made in place. In derivatives a
concatenation is a sum: each segment with zeros in the place of the others.

    concatenate(x[7:], x[:7]) of 8 elements over 4 parts      each part sends one element to its neighbour
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gshard.core.rule import Rule
from gshard.language.registry import Call, rule
from gshard.rules.joining import joined

concatenate_slices_p = Primitive("concatenate_slices")


@concatenate_slices_p.def_impl
def _run(*xs: Any, dimension: int, slices: Sequence[tuple[int, int]], added: bool) -> Any:
    like = next(x for x in xs if x.shape)

    def segment(x: Any, start: int, end: int) -> Any:
        if x.shape:
            return lax.slice_in_dim(x, start, end, axis=dimension)
        return lax.full([end - start if d == dimension else n for d, n in enumerate(like.shape)], x, like.dtype)

    x = lax.concatenate([segment(x, start, end) for x, (start, end) in zip(xs, slices, strict=True)], dimension)
    return with_zero(x) if added else x


def with_zero(x: Any) -> Any:
    """What is left of a sum with zeros: -0.0 + 0.0 is 0.0."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(with_zero(x.real), with_zero(x.imag))
    return jnp.where(x == 0, jnp.zeros((), x.dtype), x)


@concatenate_slices_p.def_abstract_eval
def _shape(*xs: Any, dimension: int, slices: Sequence[tuple[int, int]], added: bool) -> Any:
    like = next(x for x in xs if x.shape)
    length = sum(b - a for a, b in slices)
    return jax.core.ShapedArray(tuple(length if d == dimension else n for d, n in enumerate(like.shape)), like.dtype)


mlir.register_lowering(concatenate_slices_p, mlir.lower_fun(_run, multiple_results=False))


@rule("concatenate_slices", same_on_parts=True)
def concatenate_slices(call: Call) -> Rule:
    """
    >>> params = {"dimension": 0, "slices": ((7, 8), (0, 7)), "added": False}
    >>> print(concatenate_slices(Call("concatenate_slices", params, ((8, 2), (8, 2)), ((8, 2),), ("f", "f"))))
    a b, a b -> a b; communicate a
    """
    made = joined(call, call.params["dimension"], call.params["slices"])
    if not call.params["added"]:
        return made
    join = made.local
    assert join is not None
    ways = tuple(way for way in made.linear if way[0] in ("add", "pick"))
    return dataclasses.replace(made, local=lambda shards, *xs: [*map(with_zero, join(shards, *xs))], linear=ways)
