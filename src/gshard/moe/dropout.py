"""Dropout. Without a random key nothing is dropped."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets each element to zero with probability ``rate`` and scales the others by 1/(1-rate).

    >>> dropout(jnp.ones(2), 0.5, None).tolist()
    [1.0, 1.0]
    """
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))


def split_key(key: jax.Array | None, number: int) -> list[jax.Array | None]:
    """``number`` independent keys; as many None if there is no key.

    >>> split_key(None, 2)
    [None, None]
    """
    return [None] * number if key is None else list(jax.random.split(key, number))
