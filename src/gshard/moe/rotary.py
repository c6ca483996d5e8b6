"""Rotary positions: queries and keys are rotated by angles that grow with their positions (Su et al. 2021).

The score of a query and a key then depends on the distance of their positions only. The first and the second half of a
head's D numbers form D/2 pairs, each with its own angle. There are no parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gshard.moe.config import TransformerConfig


class Rotation(NamedTuple):
    """Cosines and sines of D/2 angles for positions of B sentences, float32 [B, L, D/2]; B may be 1."""

    cosine: jax.Array
    sine: jax.Array


def rotation(config: TransformerConfig, position_BL: jax.Array) -> Rotation | None:
    """The rotation for some positions; None if the model's positions are not rotary.

    >>> rotation(TransformerConfig(9, 9), jnp.zeros((1, 3), int)) is None
    True
    """
    if config.positions != "rotary":
        return None
    power_X = jnp.arange(config.head_dim // 2, dtype=jnp.float32) * (2.0 / config.head_dim)
    angle_BLX = position_BL[:, :, None].astype(jnp.float32) * jnp.float32(config.rotary_base) ** -power_X
    return Rotation(jnp.cos(angle_BLX), jnp.sin(angle_BLX))


def turned(x_BLND: jax.Array, by: Rotation | None) -> jax.Array:
    """Rotates each head, in float32. Returns the dtype of ``x_BLND``.

    >>> quarter = Rotation(jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)))
    >>> turned(jnp.array([[[[2.0, 3.0]]]]), quarter).tolist()
    [[[[-3.0, 2.0]]]]
    """
    if by is None:
        return x_BLND
    cosine, sine = by.cosine[:, :, None, :], by.sine[:, :, None, :]
    left, right = jnp.split(x_BLND.astype(jnp.float32), 2, axis=-1)
    both = [left * cosine - right * sine, right * cosine + left * sine]
    return jnp.concatenate(both, axis=-1).astype(x_BLND.dtype)
