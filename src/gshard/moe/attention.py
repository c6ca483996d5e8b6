"""Multi-head attention as four products and a softmax, with rotary positions and dropout."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gshard.moe.config import TransformerConfig
from gshard.moe.param import Param

# Rotary positions: queries and keys are rotated by angles that grow with their positions (Su et al. 2021).


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


# Dropout. Without a random key nothing is dropped.


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


class KeysValues(NamedTuple):
    """Keys and values: keys_BKND and values_BKND for K positions of B sentences. N is ``kv_heads`` here."""

    keys_BKND: jax.Array
    values_BKND: jax.Array


def attention_specs(config: TransformerConfig) -> dict[str, Param]:
    """Query, key and value [M, N, D] and output [N, D, M] of one attention; keys and values have ``kv_heads`` heads.

    >>> attention_specs(TransformerConfig(9, 9, model_dim=8, heads=2, head_dim=4))["query"].shape
    (8, 2, 4)
    """
    M, N, D = config.model_dim, config.heads, config.head_dim
    shared = config.kv_heads or N
    dims = ("model", "heads", "head")
    return {
        "query": Param((M, N, D), dims, "normal", (M * D) ** -0.5),
        "key": Param((M, shared, D), dims, "normal", M**-0.5),
        "value": Param((M, shared, D), dims, "normal", M**-0.5),
        "output": Param((N, D, M), ("heads", "head", "model"), "normal", (N * D) ** -0.5),
    }


def keys_values(params: dict[str, jax.Array], inputs_BKM: jax.Array, rotation: Rotation | None = None) -> KeysValues:
    """Projects inputs to keys and values, and rotates keys by their positions if there is a rotation."""
    dtype = inputs_BKM.dtype
    return KeysValues(
        turned(jnp.einsum("BKM,MND->BKND", inputs_BKM, params["key"].astype(dtype)), rotation),
        jnp.einsum("BKM,MND->BKND", inputs_BKM, params["value"].astype(dtype)),
    )


def attend(
    params: dict[str, jax.Array],
    inputs_BLM: jax.Array,
    memory: KeysValues,
    mask_BLK: jax.Array,
    *,
    rate: float = 0.0,
    key: jax.Array | None = None,
    rotation: Rotation | None = None,
) -> jax.Array:
    """Attention of each position of ``inputs_BLM`` over the positions of ``memory``."""
    dtype = inputs_BLM.dtype
    queries_BLND = turned(jnp.einsum("BLM,MND->BLND", inputs_BLM, params["query"].astype(dtype)), rotation)
    B, L, N, D = queries_BLND.shape
    shared = memory.keys_BKND.shape[2]
    if shared == N:
        scores_BNLK = jnp.einsum("BLND,BKND->BNLK", queries_BLND, memory.keys_BKND, preferred_element_type=jnp.float32)
    else:  # N / shared heads of queries read each head of keys and values, which is not repeated
        queries = queries_BLND.reshape(B, L, shared, N // shared, D)
        scores = jnp.einsum("blgrd,bkgd->bgrlk", queries, memory.keys_BKND, preferred_element_type=jnp.float32)
        scores_BNLK = scores.reshape(B, N, L, -1)
    scores_BNLK = jnp.where(mask_BLK[:, None, :, :], scores_BNLK, jnp.float32(-1e30))
    weights_BNLK = dropout(jax.nn.softmax(scores_BNLK, axis=-1), rate, key).astype(dtype)
    if shared == N:
        read_BLND = jnp.einsum("BNLK,BKND->BLND", weights_BNLK, memory.values_BKND)
    else:
        weights = weights_BNLK.reshape(B, shared, N // shared, L, -1)
        read_BLND = jnp.einsum("bgrlk,bkgd->blgrd", weights, memory.values_BKND).reshape(B, L, N, D)
    return jnp.einsum("BLND,NDM->BLM", read_BLND, params["output"].astype(dtype))
