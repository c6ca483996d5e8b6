"""Shardings in JAX's own words, on arguments and results: they count as marks.

An argument that is an array with a ``NamedSharding`` over the mesh's devices comes marked; ``in_shardings`` and
``out_shardings`` of ``gshard.jit`` take ``PartitionSpec`` and ``NamedSharding`` as ``jax.jit`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import ShardingError
from gshard.core.mark import Mark
from gshard.rules.expand import mark_of_named_sharding
from gshard.rules.mark import bind_mark


def mark_of_sharding(sharding: Any, ndim: int, devices: Collection[Any]) -> Mark | None:
    """The mark that an array's own ``NamedSharding`` over all of these devices is, if it has one."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, jax.sharding.Mesh):
        return None
    if sharding.mesh.size != len(devices) or not all(d in devices for d in sharding.mesh.devices.flat):
        return None
    return mark_of_named_sharding(sharding, ndim)


def mark_of_spec(spec: Any, x: Any) -> Mark | None:
    """A ``PartitionSpec`` or ``NamedSharding`` as a mark on an array; None says nothing."""
    if spec is None:
        return None
    if isinstance(spec, NamedSharding):
        return mark_of_named_sharding(spec, np.ndim(x))
    if not isinstance(spec, PartitionSpec):
        raise ShardingError(
            f"{type(spec).__name__} is no sharding.", way_out="Give a PartitionSpec, a NamedSharding or None."
        )
    if len(spec) > np.ndim(x):
        raise ShardingError(
            f"{spec} names {len(spec)} dimensions of an array of {np.ndim(x)}.",
            way_out="Give at most one entry for each dimension.",
        )
    return Mark("spec", spec=tuple(spec))


def spread_specs(what: str, prefix: Any, tree: Any) -> list[Any]:
    """One entry of a pytree prefix of shardings for each leaf of the tree."""
    try:
        spread = jax.tree.broadcast(prefix, tree, is_leaf=_is_spec)
    except ValueError as error:
        raise ShardingError(
            f"{what} does not have the structure of what it speaks of.",
            got=str(error).splitlines()[0],
            way_out="Give one sharding for all, or a pytree that is a prefix.",
        ) from error
    return jax.tree.leaves(spread, is_leaf=_is_spec)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


def with_marked_arguments(f: Callable[..., Any], in_shardings: Any) -> Callable[..., Any]:
    """The function with its positional arguments marked as ``in_shardings`` says."""

    @functools.wraps(f)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return f(*_marked("in_shardings", in_shardings, args), **kwargs)

    return marked


def with_marked_results(f: Callable[..., Any], out_shardings: Any) -> Callable[..., Any]:
    """The function with its results marked as ``out_shardings`` says."""

    @functools.wraps(f)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return _marked("out_shardings", out_shardings, f(*args, **kwargs))

    return marked


def _marked(what: str, specs: Any, tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    marks = [mark_of_spec(s, x) for s, x in zip(spread_specs(what, specs, tree), leaves)]
    return jax.tree.unflatten(structure, [x if m is None else bind_mark(x, m) for x, m in zip(leaves, marks)])
