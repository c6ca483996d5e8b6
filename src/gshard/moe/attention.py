"""Multi-head attention as four products and a softmax.

Heads of queries may share heads of keys and values (grouped queries, Ainslie et al. 2023). No biases.
Queries are not divided by sqrt(D) at run time. Instead their initial weights are smaller, as in Lingvo, so that scores
also start with a variance of 1.

Keys and values are computed by a function of their own, because a decoder keeps them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gshard.moe.config import TransformerConfig
from gshard.moe.dropout import dropout
from gshard.moe.param import Param
from gshard.moe.rotary import Rotation, turned


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
