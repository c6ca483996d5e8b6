"""Converts between JAX's memory kinds and memory spaces.

A memory kind (``device``, ``pinned_host``, ``unpinned_host``) belongs to a sharding of an argument or result, a memory
space (``Device``, ``Host``) to the type of a value. ``pinned_host`` is ``Host``; ``unpinned_host`` is ``Device``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

DEVICE, PINNED_HOST = "device", "pinned_host"
_HOST_KINDS = (PINNED_HOST, "unpinned_host")


def memory_of(sharding: Any) -> str | None:
    """The memory kind of a sharding, as in ``jax.jit``; None for None.

    A ``PartitionSpec`` is a sharding in the default memory of the devices.

    >>> memory_of(jax.sharding.PartitionSpec("data")), memory_of(None)
    ('device', None)
    """
    if sharding is None:
        return None
    kind = getattr(sharding, "memory_kind", None)
    return DEVICE if kind is None else str(kind)


def is_host_kind(kind: str | None) -> bool:
    """Whether arrays of a memory kind are in the memory of the host, and use no device memory."""
    return kind in _HOST_KINDS


def is_in_host_space(kind: str | None) -> bool:
    """Whether arrays of a memory kind have types of the host's space; as in JAX, ``unpinned_host`` does not."""
    return kind == PINNED_HOST


def kind_in_space(on_host: bool) -> str:
    """The memory kind of arrays whose types are of the host's space or of the devices' space."""
    return PINNED_HOST if on_host else DEVICE


def space(on_host: bool) -> Any:
    """The memory space of the host or of the devices."""
    return jax.memory.Space.Host if on_host else jax.memory.Space.Device


def in_memory(sharding: Any, kind: str) -> Any:
    """A JAX sharding with a memory kind; unchanged for the default memory of the devices."""
    return sharding if kind == DEVICE else sharding.with_memory_kind(kind)


def is_on_host(x: Any) -> bool:
    """Whether a type, or the type of an array, is of the host's memory space."""
    aval = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def shape_in_memory(shape: Sequence[int], dtype: Any, *, on_host: bool, weak_type: bool = False) -> Any:
    """The abstract argument with which to trace a function of an array in host or device memory."""
    if on_host:
        return jax.core.ShapedArray(tuple(shape), dtype, weak_type=weak_type, memory_space=jax.memory.Space.Host)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=weak_type)


def shape_of_type(aval: Any) -> Any:
    """The abstract argument with which to trace a function of an array of a type, without a sharding."""
    weak = bool(getattr(aval, "weak_type", False))
    return shape_in_memory(aval.shape, aval.dtype, on_host=is_on_host(aval), weak_type=weak)
