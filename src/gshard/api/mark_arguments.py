"""Checks the arguments of ``split``: a dimension, and a number of parts or names of mesh axes."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import user_line


def dimension_of(dim: Any, partitions: Any, call: str) -> int:
    """A dimension, checked to be a number."""
    is_name = isinstance(dim, str) or (isinstance(dim, tuple | list) and all(isinstance(n, str) for n in dim))
    if is_name or isinstance(dim, PartitionSpec | NamedSharding | bool | np.bool_):
        hint = "Give a number, from 0; negative counts from the end."
        if isinstance(dim, PartitionSpec | NamedSharding):
            hint = "A PartitionSpec goes to shard: shard(x, P(...))."
        elif is_name and (partitions is None or isinstance(partitions, int | np.integer)):
            first = int(partitions) if isinstance(partitions, int | np.integer) else 0
            hint = f"split takes the dimension first: split(x, {first}, {dim!r})."
        raise ShardingError(f"{dim!r} is no dimension of an array.", user_line(), call, hint)
    try:
        return operator.index(dim)
    except TypeError as error:
        if isinstance(dim, jax.core.Tracer):
            raise  # JAX says best that a value is needed
        raise ShardingError(
            f"a dimension is a whole number, not {type(dim).__name__}.",
            user_line(),
            call,
            "Give a number, from 0; negative counts from the end.",
        ) from error


def partitions_of(partitions: Any, call: str) -> int | str | tuple[str, ...]:
    """A number of parts or names of axes, checked to be one or the other."""
    if isinstance(partitions, str):
        return partitions
    if isinstance(partitions, tuple | list) and partitions and all(isinstance(n, str) for n in partitions):
        return tuple(partitions)
    try:
        number = None if isinstance(partitions, bool | np.bool_) else operator.index(partitions)
    except TypeError:
        if isinstance(partitions, jax.core.Tracer):
            raise
        number = None
    if number is not None and number >= 1:
        return number
    hint = "Give a number from 1 to the number of devices, or the name of a mesh axis, or a tuple of names."
    if number is not None:
        what = f"an array cannot be split in {number} partitions."
    elif isinstance(partitions, tuple | list) and not partitions:
        what, hint = "an array cannot be split over no axes.", "Name an axis, or use replicate(x)."
    elif isinstance(partitions, PartitionSpec | NamedSharding):
        what, hint = "a PartitionSpec says how all dimensions are cut.", "Use shard(x, P(...))."
    else:
        what = f"{partitions!r} is neither a number of partitions nor names of mesh axes."
        if isinstance(partitions, float) and partitions.is_integer() and partitions >= 1:
            hint = f"Give a whole number: {int(partitions)}."
    raise ShardingError(what, user_line(), call, hint)
