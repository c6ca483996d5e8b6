"""Adapts gshard to ``jax.shard_map``: types of arrays inside, and replacement of the mapped function.

The types inside state over which axes an array varies. JAX checks them unless ``check_vma=False``. gshard casts all
operands of an equation that it binds there to vary over the same axes. So the derivative of the cast (a sum over these
axes) is JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

# The axis of a jax.pmap without axis_name=. JAX implements jax.pmap by jax.shard_map.
PMAP_AXIS = "_internal_pmap_axis_name"


def with_mapping(outer: Any, run: Callable[..., Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr that is one ``shard_map``, with another function in place of the ``shard_map``."""
    (mapping,) = outer.eqns
    env = dict(zip((*outer.constvars, *outer.invars), arrays, strict=True))
    env.update(zip(mapping.outvars, run(*(env[v] for v in mapping.invars)), strict=True))
    return [env[v] for v in outer.outvars]


def varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, cast such that each varies over all axes over which any of them varies."""
    axes = frozenset[str]().union(*map(_varying, arrays))

    def over_all(x: Any) -> Any:
        missing = tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return [over_all(x) for x in arrays]


def types_alike(avals: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """The types of results that vary over the same axes as the operands, which all vary over the same axes."""
    axes = frozenset[str]().union(*map(_varying, operands))
    mesh = jax.sharding.get_abstract_mesh()

    def typed(aval: Any) -> Any:
        if not axes:
            return aval
        sharding = NamedSharding(mesh, PartitionSpec(*(None,) * len(aval.shape)))
        varying = next(a for a in map(_type, operands) if _varying(a)).manual_axis_type
        return aval.update(sharding=sharding, manual_axis_type=varying)

    return list(map(typed, avals))


def _type(x: Any) -> Any:
    return x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)


def _varying(x: Any) -> frozenset[str]:
    return frozenset(getattr(getattr(_type(x), "manual_axis_type", None), "varying", ()))
