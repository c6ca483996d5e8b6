"""Placement: a call's arguments in the buffers that its executable expects.

An executable runs on buffers. It takes them as they lie: on these devices, in this order, in this memory and layout. An
array that lies otherwise is moved before the call. JAX's dispatch in C++ moves arrays that are not committed, and those
on another number of devices. It takes the buffers of a committed array on as many devices as they are, so a call with
such an array does not go through it.

Memory that a call may overwrite must belong to that call alone: a donated array that was moved is a copy, and one that
lies where it is expected must not be given twice. XLA:CPU would write its memory twice, or crash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format

from gshard.api.lowered import Lowered
from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_dispatch import address_of, input_layouts, layout_of
from gshard.core.uneven import UnevenArray


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """The arguments of one call.

    Attributes:
        arrays: the flat arguments where the executable expects them; those that it does not read as they came.
        by_dispatch: whether JAX's dispatch in C++ brings arguments that lie like these to the same place.
    """

    arrays: list[Any]
    by_dispatch: bool


def placed_arguments(lowered: Lowered, leaves: Sequence[Any]) -> Placed:
    """Moves flat arguments to where the program expects them; donated ones share no memory with anything else.

    Raises:
        ShardingError: memory that may be overwritten is given twice, or was overwritten by an earlier call; it is a
            ``RuntimeError`` too, as of ``jax.jit``.
    """
    arrays, by_dispatch, donated, unread = [], True, lowered.donated, lowered.unread
    layouts = input_layouts(lowered.executable.compiled, len(lowered.program.captured))
    if donated:
        _check(lowered, leaves)
    for i, (x, target) in enumerate(zip(leaves, lowered.argument_shardings, strict=True)):
        if i in unread:
            arrays.append(x)
            continue
        x = x.padded if isinstance(x, UnevenArray) else x
        layout = layouts.get(i)
        if not _lies_so(x, target, layout):
            copied = i in donated and lowered.mesh.size > 1
            # C++ makes no copy of a donated array that lies on one of the devices already.
            by_dispatch = by_dispatch and not copied and not _is_taken_as_it_is(x, target, layout)
            x = jax.device_put(jnp.array(x, copy=True) if copied else x, target)
            if layout is not None and layout_of(x) != layout:
                x = jax.device_put(x, Format(layout, target))
        arrays.append(x)
    return Placed(arrays, by_dispatch)


def _lies_so(x: Any, target: Any, layout: Any) -> bool:
    """Whether an array's buffers are the ones that are expected: devices, their order, memory, parts and layout."""
    if not isinstance(x, jax.Array):
        return False
    same = x.sharding == target or x.sharding.is_equivalent_to(target, x.ndim)
    return same and (layout is None or layout_of(x) == layout)


def _is_taken_as_it_is(x: Any, target: Any, layout: Any) -> bool:
    """Whether JAX's dispatch in C++ runs on the buffers of an array that lies otherwise than expected."""
    if not isinstance(x, jax.Array):
        return False
    if layout is not None and layout_of(x) != layout:
        return True
    return x.committed and len(x.sharding.addressable_devices) == len(target.addressable_devices)


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
        return bool(x.sharding == target)
    return isinstance(x, jax.Array) and x.sharding.is_equivalent_to(target, x.ndim)
