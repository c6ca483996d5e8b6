"""The part of the JAX adapter about ``jax.shard_map``: types of arrays inside, and another function in its place.

Types say over which axes arrays vary. JAX checks them unless ``check_vma=False``. An equation that gshard binds there
takes operands that vary over the same axes. So the derivative of the cast that makes them vary (a sum over these axes)
stays JAX's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

# The axis of a jax.pmap whose axis_name= is not given: such a jax.pmap is a jax.shard_map.
PMAP_AXIS = "_internal_pmap_axis_name"


def with_mapping(outer: Any, run: Callable[..., Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr of one ``shard_map``, with another function in the place of that.

    Args:
        outer: the jaxpr.
        run: takes the operands of the ``shard_map``, gives its results.
        arrays: the constants of the jaxpr, then its arguments.
    """
    (mapping,) = outer.eqns
    env = dict(zip((*outer.constvars, *outer.invars), arrays, strict=True))
    env.update(zip(mapping.outvars, run(*(env[v] for v in mapping.invars)), strict=True))
    return [env[v] for v in outer.outvars]


def varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, each varying over all axes over which any of them varies."""
    axes = frozenset[str]().union(*map(_varying, arrays))

    def over_all(x: Any) -> Any:
        missing = tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return [over_all(x) for x in arrays]


def types_alike(avals: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Types of results that vary as the operands of their equation, which vary alike, do."""
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
