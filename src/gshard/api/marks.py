"""Marks: the three words a user adds to a program (GShard paper, section 3.2).

    x = gshard.split(x, 0, 8)                  # dimension 0 in 8 partitions
    w = gshard.replicate(w)                    # the same on every device
    y = gshard.shard(y, P("data", "model"))    # or an array of device ids

Outside of gshard a mark is an identity: under plain ``jax.jit``, ``grad``, ``vmap``, ``scan`` and on
one device a marked program computes what the unmarked one does. Inside ``gshard.jit`` it fixes the
sharding of the value from there on. The cotangent of a marked value carries the same mark.

Only what can be told without a mesh is checked here (ranks, dimensions, device ids); what needs the
mesh is checked when a program is traced (``core.mark``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import user_line
from gshard.core.mark import Mark
from gshard.rules.mark import bind_mark


def replicate(x: Any) -> Any:
    """Marks an array, or every array of a pytree, to be whole on every device.

    Args:
        x: array or pytree of arrays, any shape and dtype.

    Returns:
        the same values.

    >>> import jax.numpy as jnp
    >>> replicate(jnp.arange(3)).tolist()
    [0, 1, 2]
    """
    return jax.tree.map(lambda leaf: bind_mark(leaf, Mark("replicate")), x)


def split(x: Any, dim: int, num_partitions: int | str | Sequence[str]) -> Any:
    """Marks dimension ``dim`` of an array to be split in ``num_partitions``, all others whole.

    With fewer partitions than devices each part is held by several consecutive devices. A size that
    ``num_partitions`` does not divide is fine: parts have ``ceil(size / partitions)`` elements and
    the last ones are shorter or empty.

    Args:
        x: array or pytree of arrays.
        dim: the dimension, from 0; negative counts from the end.
        num_partitions: how many parts, or the name(s) of mesh axes to split over.

    Returns:
        the same values.

    Raises:
        ShardingError: the dimension does not exist.

    >>> import jax.numpy as jnp
    >>> split(jnp.zeros((8, 4)), 0, 4).shape
    (8, 4)
    """

    def mark(leaf: Any) -> Any:
        ndim = np.ndim(leaf)
        if not -ndim <= dim < ndim:
            raise ShardingError(
                f"an array of {ndim} dimensions has no dimension {dim} to split.",
                user_line(),
                f"{_describe(leaf)}; split(x, {dim}, {num_partitions!r})",
                f"Use a dimension from 0 to {ndim - 1}." if ndim else "A scalar cannot be split; use replicate(x).",
            )
        if isinstance(num_partitions, str | int | np.integer):
            parts: Any = num_partitions if isinstance(num_partitions, str) else int(num_partitions)
        else:
            parts = tuple(num_partitions)
        if isinstance(parts, int) and parts < 1:
            raise ShardingError(
                f"an array cannot be split in {parts} partitions.",
                user_line(),
                _describe(leaf),
                "Give a number from 1 to the number of devices, or the name of a mesh axis.",
            )
        return bind_mark(leaf, Mark("split", dim=dim % ndim, partitions=parts))

    return jax.tree.map(mark, x)


def shard(x: Any, device_assignment: Any) -> Any:
    """Marks how an array is cut along all its dimensions.

    Args:
        x: array (or pytree of arrays, if they all fit the assignment).
        device_assignment: either an integer array of device ids of the rank of ``x``, element ``[i, j]``
            naming the device that holds part ``[i, j]`` (paper, appendix A.3), or a
            ``jax.sharding.PartitionSpec`` over the axis names of the mesh. Fewer ids than devices
            (``arange(n)``) means that each part is held by several consecutive devices. Any order of ids will do:
            results and arguments lie as it says, and the program runs with the devices in that order.

    Returns:
        the same values.

    Raises:
        ShardingError: wrong rank, or a device id given twice or negative.

    >>> import jax.numpy as jnp
    >>> shard(jnp.zeros((8, 4)), np.arange(8).reshape(4, 2)).shape
    (8, 4)
    """

    def mark(leaf: Any) -> Any:
        ndim = np.ndim(leaf)
        if isinstance(device_assignment, PartitionSpec):
            if len(device_assignment) > ndim:
                raise ShardingError(
                    f"{device_assignment} names {len(device_assignment)} dimensions of an array of {ndim}.",
                    user_line(),
                    _describe(leaf),
                    "Give at most one entry for each dimension.",
                )
            return bind_mark(leaf, Mark("spec", spec=tuple(device_assignment)))
        ids = np.asarray(device_assignment)
        if ids.dtype.kind not in "iu":
            raise ShardingError(
                "a device assignment is an array of integers or a PartitionSpec.",
                user_line(),
                f"got {type(device_assignment).__name__} of {ids.dtype}",
                "For a 2x4 cut over 8 devices: np.arange(8).reshape(2, 4).",
            )
        if ids.ndim != ndim:
            raise ShardingError(
                f"a device assignment of rank {ids.ndim} cannot cut an array of rank {ndim}.",
                user_line(),
                f"{_describe(leaf)}; device assignment of shape {ids.shape}",
                "Give one dimension of device ids for each dimension of the array (size 1 where it stays whole).",
            )
        values, counts = np.unique(ids, return_counts=True)
        if (counts > 1).any():
            raise ShardingError(
                f"device {int(values[counts > 1][0])} stands twice in the device assignment.",
                user_line(),
                f"{_describe(leaf)}; device assignment {ids.tolist()}",
                "Each device holds one part; leave devices out to replicate over the rest.",
            )
        return bind_mark(leaf, Mark("assignment", ids=tuple(ids.ravel().tolist()), ids_shape=ids.shape))

    return jax.tree.map(mark, x)


def _describe(x: Any) -> str:
    aval = jax.typeof(x)
    return aval.str_short(short_dtypes=True) if hasattr(aval, "str_short") else str(aval)
