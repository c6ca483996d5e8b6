"""Finds the shardings of the operands of a partitioned function that is called inside ``jax.jit``.

Placed arguments of ``jax.jit`` have no sharding while the function is traced, unless their mesh has axes of type
Explicit. While it is lowered they have; so a call of a partitioned function is planned then, for operands as they come.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from gshard.api.target import Target
from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_lowering import LoweredSharding, meshes_of, sharding_of_lowered
from gshard.core.mark import Mark
from gshard.core.sharding import Sharding
from gshard.tracing.expand import mark_of_type

_log = logging.getLogger("gshard")
_SHOWN = 8  # types of operands in a message


def marks_of_operands(ctx: Any, operands: Sequence[Any], target: Target) -> tuple[Mark | None, ...] | None:
    """The marks that the operands of a call come with, while it is lowered; None if they do not count."""
    if not target.takes_arguments_as_marks or target.mesh.devices is None:
        return None
    return tuple(_mark(ctx, aval, x, target) for aval, x in zip(ctx.avals_in, operands, strict=True))


def cut_alike(ctx: Any, target: Target) -> bool:
    """Whether all meshes on which arguments of the program are cut its devices as the axes of the target do.

    JAX names the axes of results by the mesh that it was told of, the target's, and fails where XLA has split a result
    over a part of one, as it may where an argument lies on a mesh with smaller axes.
    """
    own, atoms = _bounds(n for _, n in target.mesh.axes), tuple(target.mesh.atom_sizes.items())
    return all(axes == atoms or (not ids and _bounds(n for _, n in axes) <= own) for axes, ids in meshes_of(ctx))


def _bounds(sizes: Iterable[int]) -> set[int]:
    return {1, *itertools.accumulate(sizes, operator.mul)}


def _mark(ctx: Any, aval: Any, operand: Any, target: Target) -> Mark | None:
    typed = mark_of_type(getattr(aval, "sharding", None), len(aval.shape))
    if typed is not None:
        return typed
    found = sharding_of_lowered(ctx, operand)
    return None if found is None else _mark_of(found, len(aval.shape), target)


def _mark_of(found: LoweredSharding, ndim: int, target: Target) -> Mark | None:
    """The mark for a sharding over the devices of the target; None for one over others."""
    if target.mesh.devices is None or math.prod(size for _, size in found.axes) != target.mesh.size:
        return None
    spec = tuple(axes or None for axes in found.dims[:ndim])  # a random key is numbers along more dimensions
    devices = tuple(target.mesh.devices[i] for i in found.device_ids)
    return Mark("spec", spec=spec, axes=found.axes, devices=devices)


def tell_unknown(jaxpr: Any, target: Target, come: Sequence[Sharding]) -> None:
    """Logs that a call was planned without a way to see how its operands are split, or refuses it.

    That is so in a program that is exported; inside of ``jax.shard_map``; and in a loop or a nested ``jax.jit``, of
    random keys, of functions with effects, and where arguments are on a mesh with smaller axes. What is split may be
    gathered.
    """
    whole = [
        a.str_short(short_dtypes=True) for a, s in zip(jaxpr.in_avals, come, strict=True) if a.shape and not any(s.dims)
    ]
    if not whole or not target.takes_arguments_as_marks:
        return
    what = "a partitioned function is called where nothing says how its operands are split."
    got = f"taken as whole: {', '.join(whole[:_SHOWN])}{', ...' if len(whole) > _SHOWN else ''}"
    hint = "Give gshard.jit in_shardings and arguments on its own mesh, mark them inside, or use gshard.jit outside."
    if target.strict:
        raise ShardingError(what, user_line(), got, hint)
    _log.warning("gshard: %s", ShardingError(what, user_line(), got, hint))
