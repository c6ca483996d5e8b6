"""Calls the callbacks of ``jax.debug.inspect_array_sharding`` once a program is compiled.

As under ``jax.jit`` a callback is called once for each compiled program, with a ``NamedSharding`` over the user's mesh:

- For an array of the program, also in loops and branches, the callback gets the sharding of the plan. For an unreduced
  array it gets the sharding after the reduction, because meshes of Auto axes cannot express unreduced axes.
- Inside ``jax.shard_map`` arrays are parts, and the callback gets ``P()``, as under ``jax.jit``.
- The program may not hold an array, because only the inspection reads it or because it became part of another
  computation. The callback then gets the sharding that the array would have. A message is logged.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from gshard.api.target import Target
from gshard.core.look import Look
from gshard.core.plan import Plan
from gshard.core.program import Constant, Value
from gshard.core.program_boundary import AS_MARKED
from gshard.core.sharding import Sharding
from gshard.emit.compile import named_sharding
from gshard.tracing.looks import number_of

_log = logging.getLogger("gshard")


def call_back(plan: Plan, target: Target) -> None:
    """Calls the callbacks of a program's looks.

    Args:
        plan: of the program.
        target: what it was planned for, to plan what only looks read.
    """
    watched: Mapping[int, Sharding] | None = None
    held = {*plan.program.block.values()}
    for i, look in enumerate(plan.program.looks):
        if look.manual:
            _call(look, plan, Sharding.replicated(len(look.shape)))
            continue
        values = [v for v in look.values if isinstance(v, Constant) or v in held]
        for v in values:
            _call(look, plan, plan.sharding(v))
        if values:
            continue
        watched = _shardings_if_computed(plan, target) if watched is None else watched
        sharding = watched.get(i)
        if sharding is None:
            _log.warning("gshard: %s, at which %s looks, is not in the program.", _text(look), look.line)
            continue
        text = "gshard: %s, at which %s looks, is not computed as such; if it were, it would be sharded %s."
        _log.warning(text, _text(look), look.line, named_sharding(plan.mesh, sharding).spec)
        _call(look, plan, sharding)


def _call(look: Look, plan: Plan, sharding: Sharding) -> None:
    told = named_sharding(plan.mesh, sharding)
    try:
        look.callback(told)
    except (ValueError, AssertionError) as error:
        if sharding.is_even(plan.mesh, look.shape):
            raise
        # JAX draws arrays of equal parts only.
        text = "gshard: %s at %s is cut into unequal parts, %s; its callback failed: %s"
        _log.warning(text, _text(look), look.line, told.spec, error)


def _text(look: Look) -> str:
    return f"an array of shape {list(look.shape)}"


def _shardings_if_computed(plan: Plan, target: Target) -> dict[int, Sharding]:
    """How the looked-at arrays are sharded in the program that computes them, by the number of the look."""
    program = plan.program
    assert program.watched is not None
    watched = dataclasses.replace(program.watched(), argument_marks=program.argument_marks)
    other = dataclasses.replace(target.by_marks, strict=False).planned(watched, AS_MARKED).plan
    found: dict[int, Sharding] = {}
    for e in other.program.block.walk():
        number = number_of(e.name, e.params)
        if number is not None:
            (x,) = e.inputs
            found[number] = other.sharding(x) if isinstance(x, Value) else Sharding.replicated(len(x.shape))
    return found
