"""Donation: the arguments where a program expects them, so that it may overwrite the memory of those it was given.

What is overwritten must be nobody else's: an array that had to be moved is a copy, and one that is where it should be
must not be given twice. XLA:CPU would write its memory twice, or crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.api.lowered import Lowered
from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_dispatch import address_of
from gshard.core.uneven import UnevenArray


def placed_arguments(lowered: Lowered, leaves: Sequence[Any]) -> list[Any]:
    """The flat arguments where the program expects them; donated ones share no memory with anything else.

    Raises:
        ShardingError: memory that may be overwritten is given twice, or was overwritten by an earlier call; it is a
            ``RuntimeError`` too, as of ``jax.jit``.
    """
    placed, donated, unread = [], lowered.donated, lowered.unread
    if donated:
        _check(lowered, leaves)
    for i, (x, target) in enumerate(zip(leaves, lowered.argument_shardings, strict=True)):
        if i in unread:
            placed.append(x)
            continue
        x = x.padded if isinstance(x, UnevenArray) else x
        if getattr(x, "sharding", None) != target:
            # An array that is on one of the devices already is not copied on its way.
            copied = i in donated and lowered.mesh.size > 1
            x = jax.device_put(jnp.array(x, copy=True) if copied else x, target)
        placed.append(x)
    return placed


def _check(lowered: Lowered, leaves: Sequence[Any]) -> None:
    at: dict[int, int] = {}
    names = lowered.program.names[len(lowered.program.captured) :]
    for i, (x, target) in enumerate(zip(leaves, lowered.argument_shardings, strict=True)):
        first = at.setdefault(address_of(x), i) if _is_at(x, target) else i
        if first != i and {first, i} & lowered.donated:
            raise ShardingError.like(
                RuntimeError(),
                f"{lowered.program.name} may overwrite an array that it was given twice, as {names[first]} and "
                f"{names[i]}.",
                user_line(),
                f"donated: {', '.join(names[k] for k in sorted(lowered.donated))}",
                "Give a copy (jnp.copy), or do not donate it.",
            )
        if i in lowered.donated and getattr(x, "is_deleted", bool)():
            raise ShardingError.like(
                RuntimeError(),
                f"{lowered.program.name} was given an array that an earlier call has overwritten, as {names[i]}.",
                user_line(),
                hint="Use the earlier call's result, or do not donate it.",
            )


def _is_at(x: Any, target: Any) -> bool:
    """Whether an array is on the devices of a sharding as this says, in whatever words."""
    if isinstance(x, UnevenArray):
        return x.sharding == target
    return isinstance(x, jax.Array) and x.sharding.is_equivalent_to(target, x.ndim)
