"""The primitives of ``gshard.put_rows`` and ``gshard.take_rows``: rows move to places that no two of them share.

    put    x [T, 1 or K, *row], rows [T, K] -> [size, *row]      result[rows[t, k]] = x[t, k]
    take   x [N, *row],         rows [T, K] -> [T, K, *row]      result[t, k] = x[rows[t, k]]

``put`` drops a row with a number out of range, and ``take`` returns zeros for it. All other numbers differ. So a device
receives at most as many rows as it holds places, and each operator is the transpose of the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

put_rows_p = Primitive("gshard_put_rows")
take_rows_p = Primitive("gshard_take_rows")


def put(x: Any, rows: Any, size: int) -> Any:
    """Computes ``put`` of whole arrays."""
    places, choices = rows.size, rows.shape[1]
    if not x.size or not size:
        return jnp.zeros((size, *x.shape[2:]), x.dtype)
    # Numbers are written to a table, and rows are read through it, as in ``moe.dispatch``.
    table = jnp.full((size,), places, jnp.int32)
    table = table.at[rows.reshape(-1)].set(
        jnp.arange(places, dtype=jnp.int32), mode="drop", wrap_negative_indices=False
    )
    each = choices if x.shape[1] == 1 else 1
    # A place without a row holds ``places``, which is beyond the rows.
    return read(x.reshape(-1, *x.shape[2:]), table // each if each > 1 else table)


def take(x: Any, rows: Any) -> Any:
    """Computes ``take`` of whole arrays."""
    if not x.size or not rows.size:
        return jnp.zeros((*rows.shape, *x.shape[1:]), x.dtype)
    return read(x, rows)


def read(x: Any, rows: Any) -> Any:
    """The rows with these numbers; zeros for numbers out of range."""
    return x.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _define(primitive: Primitive, meaning: Callable[..., Any], *params: str) -> None:
    """Registers the function that a primitive computes, and the names of its parameters."""
    primitive.def_impl(jax.jit(meaning, static_argnames=params))
    mlir.register_lowering(primitive, mlir.lower_fun(meaning, multiple_results=False))
    ad.defjvp(primitive, functools.partial(_tangent, primitive), None)


def _tangent(primitive: Primitive, tangent: Any, x: Any, rows: Any, **params: Any) -> Any:
    return primitive.bind(tangent, rows, **params)


@put_rows_p.def_abstract_eval
def _type_of_put(x: Any, rows: Any, *, size: int) -> Any:
    return jax.core.ShapedArray((size, *x.shape[2:]), x.dtype)


@take_rows_p.def_abstract_eval
def _type_of_take(x: Any, rows: Any) -> Any:
    return jax.core.ShapedArray((*rows.shape, *x.shape[1:]), x.dtype)


def _put_transposed(cotangent: Any, x: Any, rows: Any, *, size: int) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), None]
    read_back = take_rows_p.bind(cotangent, rows)
    if x.aval.shape[1] != rows.shape[1]:
        read_back = jnp.sum(read_back, axis=1, keepdims=True)
    return [read_back, None]


def _take_transposed(cotangent: Any, x: Any, rows: Any) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), None]
    return [put_rows_p.bind(cotangent, rows, size=x.aval.shape[0]), None]


def _mapped_put(operands: Sequence[Any], dims: Sequence[int | None], *, size: int) -> Any:
    """Mapped numbers become numbers of places in one larger array; a mapped ``x`` alone gets wider rows."""
    x, rows = operands
    if dims[1] is None:
        return put_rows_p.bind(_trailing(x, dims[0]), rows, size=size), x.ndim - 2
    count = rows.shape[dims[1]]
    x = _merged(_leading(x, dims[0], count))
    result = put_rows_p.bind(x, _numbered(jnp.moveaxis(rows, dims[1], 0), size), size=count * size)
    return result.reshape(count, size, *result.shape[1:]), 0


def _mapped_take(operands: Sequence[Any], dims: Sequence[int | None]) -> Any:
    x, rows = operands
    if dims[1] is None:
        return take_rows_p.bind(_trailing(x, dims[0]), rows), x.ndim
    rows = jnp.moveaxis(rows, dims[1], 0)
    x = _leading(x, dims[0], rows.shape[0])
    result = take_rows_p.bind(_merged(x), _numbered(rows, x.shape[1]))
    return result.reshape(*rows.shape, *result.shape[2:]), 0


def _trailing(x: Any, dim: int | None) -> Any:
    assert dim is not None
    return jnp.moveaxis(x, dim, -1)


def _leading(x: Any, dim: int | None, count: int) -> Any:
    """The array with the mapped dimension first; repeated if it has none."""
    return jnp.broadcast_to(x, (count, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def _merged(x: Any) -> Any:
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])


def _numbered(rows: Any, size: int) -> Any:
    """Row numbers in arrays of ``size`` rows, as numbers in the concatenation of these arrays."""
    count = rows.shape[0]
    first = jnp.arange(count, dtype=rows.dtype).reshape(count, 1, 1) * size
    return _merged(jnp.where((rows >= 0) & (rows < size), rows + first, count * size))


_define(put_rows_p, put, "size")
_define(take_rows_p, take)
ad.primitive_transposes[put_rows_p] = _put_transposed
ad.primitive_transposes[take_rows_p] = _take_transposed
batching.primitive_batchers[put_rows_p] = _mapped_put
batching.primitive_batchers[take_rows_p] = _mapped_take
