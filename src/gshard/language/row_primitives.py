"""The primitives of ``gshard.put_rows`` and ``gshard.take_rows``: rows move to places that no two of them share.

    put    x [*B, T, 1 or K, *row], rows [*B, T, K] -> [*B, size, *row]      result[b, rows[b, t, k]] = x[b, t, k]
    take   x [*B, N, *row],         rows [*B, T, K] -> [*B, T, K, *row]      result[b, t, k] = x[b, rows[b, t, k]]

``put`` drops a row with a number out of range, and ``take`` returns zeros for it. All other numbers of a batch ``b``
differ. So a device receives at most as many rows as it holds places, and each operator is the transpose of the other.
``vmap`` adds the dimensions ``B``: each batch has places of its own. With ``sorted_parts``, the numbers of each of so
many equal parts of ``T`` increase, and ``K`` is 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

put_rows_p = Primitive("gshard_put_rows")
take_rows_p = Primitive("gshard_take_rows")


def put(x: Any, rows: Any, size: int, sorted_parts: int = 0) -> Any:
    """Computes ``put`` of whole arrays."""
    if rows.ndim > 2:
        return jax.vmap(functools.partial(put, size=size))(x, rows)
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


def take(x: Any, rows: Any, sorted_parts: int = 0) -> Any:
    """Computes ``take`` of whole arrays."""
    if rows.ndim > 2:
        return jax.vmap(take)(x, rows)
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
    batching.primitive_batchers[primitive] = functools.partial(_mapped, primitive)


def _tangent(primitive: Primitive, tangent: Any, x: Any, rows: Any, **params: Any) -> Any:
    return primitive.bind(tangent, rows, **params)


@put_rows_p.def_abstract_eval
def _type_of_put(x: Any, rows: Any, *, size: int, sorted_parts: int) -> Any:
    return jax.core.ShapedArray((*rows.shape[:-2], size, *x.shape[rows.ndim :]), x.dtype)


@take_rows_p.def_abstract_eval
def _type_of_take(x: Any, rows: Any, *, sorted_parts: int) -> Any:
    return jax.core.ShapedArray((*rows.shape, *x.shape[rows.ndim - 1 :]), x.dtype)


def _put_transposed(cotangent: Any, x: Any, rows: Any, *, size: int, sorted_parts: int) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), None]
    read_back = take_rows_p.bind(cotangent, rows, sorted_parts=sorted_parts)
    copies = rows.ndim - 1
    if x.aval.shape[copies] != rows.shape[copies]:
        read_back = jnp.sum(read_back, axis=copies, keepdims=True)
    return [read_back, None]


def _take_transposed(cotangent: Any, x: Any, rows: Any, *, sorted_parts: int) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), None]
    return [put_rows_p.bind(cotangent, rows, size=x.aval.shape[rows.ndim - 2], sorted_parts=sorted_parts), None]


def _mapped(primitive: Primitive, operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    """Mapped numbers have one more batch dimension; a mapped ``x`` alone has wider rows."""
    x, rows = operands
    if dims[1] is None:
        assert dims[0] is not None
        result = primitive.bind(jnp.moveaxis(x, dims[0], -1), rows, **params)
        return result, result.ndim - 1
    rows = jnp.moveaxis(rows, dims[1], 0)
    x = jnp.broadcast_to(x, (len(rows), *x.shape)) if dims[0] is None else jnp.moveaxis(x, dims[0], 0)
    return primitive.bind(x, rows, **params), 0


_define(put_rows_p, put, "size", "sorted_parts")
_define(take_rows_p, take, "sorted_parts")
ad.primitive_transposes[put_rows_p] = _put_transposed
ad.primitive_transposes[take_rows_p] = _take_transposed
