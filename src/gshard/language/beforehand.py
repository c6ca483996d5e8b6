"""Computes values of a loop that depend on positions only once before the loop, not in every iteration.

    inside = (row >= 1) & (row < n - 1)         rows from an iota and the number of the device: the same in every round
    u = jnp.where(inside[:, None], step(u), u)

Masks of borders, of padding, and of what belongs to a device are such. A compiler that fuses them into what reads them
computes them for nothing, but libtpu makes a kernel of each, in every round. Only arrays along one dimension are kept
over a loop: they take no memory to speak of, while a table along several is better made where it is read.
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
    """The body of a loop, traced where it stands, without what is the same in every round.

    Args:
        step: a function of pytrees of arrays, inside ``shard_map``. It is traced once.
        examples: arrays, or their shapes, that its arguments are like.

    Returns:
        the same function; what it shares between rounds is computed where this is called.
    """
    jaxpr, result = jax.make_jaxpr(step, return_shape=True)(*examples)
    body, consts = closed(jaxpr)
    early = _of_nothing(body.eqns)
    made_by = {v: e for e in early for v in e.outvars}
    later = [e for e in body.eqns if e not in early]
    read = [v for e in later for v in e.invars] + list(body.outvars)
    kept = {v for v in read if not isinstance(v, Literal) and v in made_by and _is_worth_it(v, made_by[v])}
    known = dict(zip(body.constvars, consts, strict=True))
    shared = dict(known)
    _run(_needed(list(early), kept, set()), shared)
    known.update((v, shared[v]) for v in kept)
    rest = _needed(body.eqns, {v for v in body.outvars if not isinstance(v, Literal)}, kept)

    def run(*arguments: Any) -> Any:
        env = {**known, **dict(zip(body.invars, jax.tree.leaves(arguments), strict=True))}
        _run(rest, env)
        results = [_value(env, v) for v in body.outvars]
        return jax.tree.unflatten(jax.tree.structure(result), results)

    return run


def _of_nothing(equations: Sequence[Any]) -> dict[Any, None]:
    """The equations, in order, whose results are known of positions alone, and lie along one dimension at most."""
    found: dict[Any, None] = {}
    known: set[Any] = set()
    for e in equations:
        small = all(sum(n > 1 for n in v.aval.shape) <= 1 for v in e.outvars)
        if small and _is_pure(e) and all(isinstance(v, Literal) or v in known for v in e.invars):
            found[e] = None
            known.update(e.outvars)
    return found


def _is_pure(e: Any) -> bool:
    """Whether an equation computes the same whenever it runs, on one device by itself."""
    if e.primitive.name == "axis_index":
        return True
    if traits_of(e.primitive.name).fixed or e.effects or named_axes(e):
        return False
    body = body_of_call(e.primitive.name, e.params)
    if body is None:
        return not sub_jaxprs(e.params)
    return all(map(_is_pure, closed(body)[0].eqns))


def _is_worth_it(v: Any, made_by: Any) -> bool:
    return math.prod(v.aval.shape) > 1 and not traits_of(made_by.primitive.name).free


def _needed(equations: Sequence[Any], wanted: set[Any], known: set[Any]) -> list[Any]:
    """The equations that some values need, if others are known; those with effects stay."""
    wanted = wanted - known
    found = []
    for e in reversed(equations):
        if e.effects or not wanted.isdisjoint(e.outvars):
            found.append(e)
            wanted |= {v for v in e.invars if not isinstance(v, Literal)} - known
    return found[::-1]


def _run(equations: Sequence[Any], env: dict[Any, Any]) -> None:
    for e in equations:
        with as_if_at(e.source_info), in_context(context_of(e)):
            results = bind(e.primitive, e.params, [_value(env, v) for v in e.invars])
        env.update(zip(e.outvars, results, strict=True))


def _value(env: dict[Any, Any], v: Any) -> Any:
    return v.val if isinstance(v, Literal) else env[v]
