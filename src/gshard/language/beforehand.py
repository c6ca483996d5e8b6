"""Moves the computation of values that depend on positions only out of a loop.

    inside = (row >= 1) & (row < n - 1)         rows from an iota and the device index: equal in every iteration
    u = jnp.where(inside[:, None], step(u), u)

Examples are masks of borders, of padding, and of a device's part. A compiler that fuses them with their readers
computes them at no cost, but libtpu runs a kernel for each in every iteration. gshard keeps only arrays along one
dimension over the loop, which need little memory. Arrays along several dimensions are computed where they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from gshard.core.jax_adapter import as_if_at, bind, body_of_call, closed, named_axes, sub_jaxprs
from gshard.core.jax_adapter_context import context_of, in_context
from gshard.language.traits import traits_of


def beforehand(step: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    """The body of a loop without equations whose results are equal in every iteration."""
    jaxpr, result = jax.make_jaxpr(step, return_shape=True)(*examples)
    body, consts = closed(jaxpr)
    invariant = _invariant(body.eqns)
    producer = {v: e for e in invariant for v in e.outvars}
    others = [e for e in body.eqns if e not in invariant]
    read = [v for e in others for v in e.invars] + list(body.outvars)
    kept = {v for v in read if not isinstance(v, Literal) and v in producer and _is_worth_it(v, producer[v])}
    shared_env = dict(zip(body.constvars, consts, strict=True))
    env_before = dict(shared_env)
    _run(_needed(list(invariant), kept, set()), env_before)
    shared_env.update((v, env_before[v]) for v in kept)
    remaining = _needed(body.eqns, {v for v in body.outvars if not isinstance(v, Literal)}, kept)

    def run(*arguments: Any) -> Any:
        env = {**shared_env, **dict(zip(body.invars, jax.tree.leaves(arguments), strict=True))}
        _run(remaining, env)
        results = [_value(env, v) for v in body.outvars]
        return jax.tree.unflatten(jax.tree.structure(result), results)

    return run


def _invariant(equations: Sequence[Any]) -> dict[Any, None]:
    """The equations, in order, whose results depend on positions only and extend along at most one dimension."""
    invariant: dict[Any, None] = {}
    results: set[Any] = set()
    for e in equations:
        is_small = all(sum(n > 1 for n in v.aval.shape) <= 1 for v in e.outvars)
        if is_small and _is_pure(e) and all(isinstance(v, Literal) or v in results for v in e.invars):
            invariant[e] = None
            results.update(e.outvars)
    return invariant


def _is_pure(e: Any) -> bool:
    """Whether an equation always computes the same result from its operands, without communication."""
    if e.primitive.name == "axis_index":
        return True
    if traits_of(e.primitive.name).fixed or e.effects or named_axes(e):
        return False
    body = body_of_call(e.primitive.name, e.params)
    if body is None:
        return not sub_jaxprs(e.params)
    return all(map(_is_pure, closed(body)[0].eqns))


def _is_worth_it(v: Any, producer: Any) -> bool:
    return math.prod(v.aval.shape) > 1 and not traits_of(producer.primitive.name).free


def _needed(equations: Sequence[Any], values: set[Any], given: set[Any]) -> list[Any]:
    """The equations that compute some values from given ones, and all equations with effects."""
    missing = values - given
    needed = []
    for e in reversed(equations):
        if e.effects or not missing.isdisjoint(e.outvars):
            needed.append(e)
            missing |= {v for v in e.invars if not isinstance(v, Literal)} - given
    return needed[::-1]


def _run(equations: Sequence[Any], env: dict[Any, Any]) -> None:
    for e in equations:
        with as_if_at(e.source_info), in_context(context_of(e)):
            results = bind(e.primitive, e.params, [_value(env, v) for v in e.invars])
        env.update(zip(e.outvars, results, strict=True))


def _value(env: dict[Any, Any], v: Any) -> Any:
    return v.val if isinstance(v, Literal) else env[v]
