"""Barrier: what keeps XLA from computing once what must be computed twice, and from computing it too early.

XLA for GPU and TPU leaves ``optimization_barrier`` in its place. XLA for CPU removes it and then merges what it kept
apart. There each array is changed by a number that XLA does not know and that is always zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def held_back(arrays: Sequence[Any], late: Any) -> list[Any]:
    """The same arrays, bit by bit; for XLA they are others, and not there before ``late`` is.

    >>> held_back([jnp.float32(-0.0), jnp.arange(2), jnp.bool_(True)], jnp.float32(7))
    [Array(-0., dtype=float32), Array([0, 1], dtype=int32), Array(True, dtype=bool)]
    """
    first = late[(0,) * late.ndim] if late.size and _bits(late.dtype) else None
    seed = jnp.uint32(1) if first is None else _as_bits(first).astype(jnp.uint32)
    zero = seed & lax.rng_uniform(jnp.uint32(0), jnp.uint32(1), ())
    return [_changed(x, zero) for x in arrays]


def _changed(x: Any, zero: Any) -> Any:
    bits = _bits(x.dtype)
    if not bits:
        return lax.optimization_barrier(x)
    if x.dtype == jnp.bool_:
        return x ^ (zero != 0)
    return lax.bitcast_convert_type(_as_bits(x) ^ zero.astype(bits), x.dtype)


def _as_bits(x: Any) -> Any:
    return x if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, _bits(x.dtype))


def _bits(dtype: Any) -> Any:
    """The unsigned type as wide as another; None for what has none, such as complex numbers and keys."""
    if dtype == jnp.bool_:
        return jnp.bool_
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)) or dtype.itemsize > 4:
        return None
    return {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]
