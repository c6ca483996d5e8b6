"""put_rows and take_rows: rows that move to places of their own, as tokens do to experts and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.rules.row_exchange import put_rows_p, take_rows_p


@without_our_frames
def put_rows(x: Any, rows: Any, size: int) -> jax.Array:
    """Moves rows to new places: ``result[rows[t]] = x[t]``. No two rows may have the same place.

    The same as ``jnp.zeros((size, ...)).at[rows].set(x, mode="drop", unique_indices=True)``. Inside ``gshard.jit``,
    where the rows and the places are split over the same devices, each device sends a row to the device that holds its
    place (a ragged all-to-all; on CPU, which has none, each device gathers all rows). gshard splits the places as the
    rows are split, and the dimensions of a row without communication. ``vmap`` adds batches, each with places of its
    own; they are split without communication too. The derivative of ``put_rows`` is ``take_rows``.

    Args:
        x: ``[T, ...]``, the rows.
        rows: integers ``[T]``, or ``[T, K]`` for ``K`` copies of each row: the new places. Numbers below 0, or of
            ``size`` and above, drop the row. All others must differ; if two are equal, the result is undefined.
        size: the number of places.

    Returns:
        ``[size, ...]`` in the dtype of ``x``, with zeros in places without a row.

    Raises:
        ArgumentError: ``rows`` are no integers or do not fit ``x``, or ``size`` is negative.

    >>> put_rows(jnp.array([1.0, 2.0, 3.0]), jnp.array([3, -1, 0]), 4).tolist()
    [3.0, 0.0, 0.0, 1.0]
    >>> put_rows(jnp.array([1.0, 2.0]), jnp.array([[3, 0], [1, 9]]), 4).tolist()
    [1.0, 2.0, 0.0, 1.0]
    """
    x, rows = jnp.asarray(x), jnp.asarray(rows)
    if not isinstance(size, int) or size < 0:
        raise ArgumentError(
            "size is the number of places, an integer of 0 or more.", user_line(), got=f"size={size!r}",
            hint="It is a part of the result's shape, so it cannot be an array: pass a Python integer.",
        )  # fmt: skip
    if not x.ndim or rows.shape[:1] != x.shape[:1]:
        raise ArgumentError(
            "rows has a number for each row of x.", user_line(), got=f"x: {x.shape}, rows: {rows.shape}",
            hint="The first dimensions of both must be equal.",
        )  # fmt: skip
    rows = _numbers(rows, size)
    numbers = rows.reshape(*rows.shape, *(1,) * (2 - rows.ndim))
    return put_rows_p.bind(x[:, None], numbers, size=size)


@without_our_frames
def take_rows(x: Any, rows: Any) -> jax.Array:
    """Reads rows at their places: ``result[t] = x[rows[t]]``. No place may be read twice.

    The same as ``x.at[rows].get(mode="fill", fill_value=0, unique_indices=True)``. It is partitioned as ``put_rows``
    is, whose derivative it is. It returns what ``put_rows`` with the same numbers has sent.

    Args:
        x: ``[N, ...]``, the rows.
        rows: integers ``[T]`` or ``[T, K]``, the places to read. Numbers below 0, or of ``N`` and above, give zeros.
            All others must differ; if two are equal, the result is undefined.

    Returns:
        ``[T, ...]`` or ``[T, K, ...]`` in the dtype of ``x``.

    Raises:
        ArgumentError: ``rows`` are no integers, or have no or more than two dimensions.

    >>> take_rows(jnp.array([1.0, 2.0, 3.0]), jnp.array([[2, 0], [5, -1]])).tolist()
    [[3.0, 1.0], [0.0, 0.0]]
    """
    x, rows = jnp.asarray(x), jnp.asarray(rows)
    if not x.ndim:
        raise ArgumentError("x has rows, so it has at least one dimension.", user_line(), got=f"x: {x.shape}")
    rows = _numbers(rows, x.shape[0])
    result = take_rows_p.bind(x, rows.reshape(*rows.shape, *(1,) * (2 - rows.ndim)))
    return result.reshape(*rows.shape, *x.shape[1:])


def _numbers(rows: jax.Array, size: int) -> jax.Array:
    """The numbers of places in int32."""
    if not jnp.issubdtype(rows.dtype, jnp.integer) or rows.ndim not in (1, 2):
        raise ArgumentError(
            "rows are integers, [rows] or [rows, copies].", user_line(), got=f"rows: {rows.dtype}{list(rows.shape)}",
            hint="Merge further dimensions: rows.reshape(rows.shape[0], -1).",
        )  # fmt: skip
    if rows.dtype.itemsize >= 4 and rows.dtype != jnp.int32:
        return jnp.clip(rows, -1 if jnp.issubdtype(rows.dtype, jnp.signedinteger) else 0, size).astype(jnp.int32)
    return rows.astype(jnp.int32)
