"""Memory kinds: the memories of a device in which an array can be.

JAX has two terms for it. A *memory kind* (``device``, ``pinned_host``, ``unpinned_host``) belongs to a sharding and
says where an argument or a result of a program is. A *memory space* (``jax.memory.Space.Device`` or ``Host``) belongs
to a type and says where a value inside a program is. An array of kind ``pinned_host`` has a type of space ``Host``; one
of kind ``unpinned_host`` has a type of space ``Device``, as in JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

DEVICE, PINNED_HOST = "device", "pinned_host"
_HOST_KINDS = (PINNED_HOST, "unpinned_host")


def memory_of(sharding: Any) -> str | None:
    """The memory kind that a sharding asks for, as ``jax.jit`` reads it; None where it says nothing.

    A ``PartitionSpec`` is a sharding in the default memory of the devices.

    >>> memory_of(jax.sharding.PartitionSpec("data")), memory_of(None)
    ('device', None)
    """
    if sharding is None:
        return None
    kind = getattr(sharding, "memory_kind", None)
    return DEVICE if kind is None else str(kind)


def is_host_kind(kind: str | None) -> bool:
    """Whether arrays of a memory kind are in the memory of the host, and take none of a device."""
    return kind in _HOST_KINDS


def is_in_host_space(kind: str | None) -> bool:
    """Whether the types of arrays of a memory kind are of the host's space; ``unpinned_host`` is not, as in JAX."""
    return kind == PINNED_HOST


def kind_in_space(on_host: bool) -> str:
    """The memory kind of arrays whose types are of the host's space, or of the devices'."""
    return PINNED_HOST if on_host else DEVICE


def space(on_host: bool) -> Any:
    """The memory space of the host or of the devices."""
    return jax.memory.Space.Host if on_host else jax.memory.Space.Device


def in_memory(sharding: Any, kind: str) -> Any:
    """A sharding of JAX's in a memory kind; in the default memory of its devices it is as it was."""
    return sharding if kind == DEVICE else sharding.with_memory_kind(kind)


def is_on_host(x: Any) -> bool:
    """Whether the type of an array, or a type, is one of the host's memory."""
    aval = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def shape_in_memory(shape: Sequence[int], dtype: Any, *, on_host: bool, weak_type: bool = False) -> Any:
    """What to trace a function on that is to see an array in the memory of the host, or of the devices."""
    if on_host:
        return jax.core.ShapedArray(tuple(shape), dtype, weak_type=weak_type, memory_space=jax.memory.Space.Host)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=weak_type)


def shape_of_type(aval: Any) -> Any:
    """The same for an array of a type, on no devices in particular."""
    weak = bool(getattr(aval, "weak_type", False))
    return shape_in_memory(aval.shape, aval.dtype, on_host=is_on_host(aval), weak_type=weak)
