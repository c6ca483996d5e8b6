"""Decoding: runs the model one target position at a time, and keeps keys and values.

    memory = encode(config, params, source_BL)
    cache = init_cache(config, batch=B, length=64)
    logits_BV, cache = decode_step(config, params, cache, tokens_B, position, memory, source_BL != 0)

`decode_flat_step` does the same for several hypotheses of each sentence, which share one cache (appendix A.1 of the
paper). Only the mask differs between hypotheses: it has the slots of the cache that belong to each.

Routing drops nothing here. With the capacities of training, a small batch would lose experts
for many of its tokens, and the result for a sentence would depend on the other sentences of its batch.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from gshard.moe.attention import KeysValues, attend, keys_values, rotation
from gshard.moe.config import TransformerConfig, require
from gshard.moe.transformer import embed, encoder, feed_forward_branch, logits, norm, positions

Cache = dict[str, KeysValues]


def encode(config: TransformerConfig, params: dict[str, Any], source_BL: jax.Array) -> jax.Array:
    """The encoder's result for a batch of sources.

    Args:
        config: the model.
        params: see ``transformer.param_specs``.
        source_BL: int32 ids, 0 for padding.

    Returns:
        memory_BLM in the dtype of activations.
    """
    return encoder(config.dropless(), params, source_BL)[0]


def project_memory(config: TransformerConfig, params: dict[str, Any], memory_BLM: jax.Array) -> Cache:
    """Keys and values of the memory for each decoder layer, so that they are computed once and not in each step.

    Returns:
        for each kind of layer ``KeysValues`` of [layers, B, L, N, D]; B is dimension 1.
    """

    def block(_: None, layers: dict[str, Any]) -> tuple[None, Cache]:
        return None, {kind: keys_values(layer["memory_attention"], memory_BLM) for kind, layer in layers.items()}

    return _by_layer({name: jax.lax.scan(block, None, params["decoder"][name])[1] for name in _parts(config)})


def _parts(config: TransformerConfig) -> dict[str, tuple[tuple[str, ...], int]]:
    return config.parts(config.decoder_layers)


def _by_layer(by_part: dict[str, Cache]) -> Cache:
    """The cache in its public form: ``first`` has the layers at the bottom without experts."""
    return by_part["blocks"] | ({"first": by_part["first"]["dense"]} if "first" in by_part else {})


def _of_part(name: str, kinds: tuple[str, ...], cache: Cache) -> Cache:
    return {"dense": cache["first"]} if name == "first" else {kind: cache[kind] for kind in kinds}


def init_cache(config: TransformerConfig, batch: int, length: int) -> Cache:
    """Empty keys and values for ``length`` target positions.

    Returns:
        for each kind of layer ``KeysValues`` of [layers, batch, length, N, D], N being ``kv_heads``; to reorder
        sentences, index dimension 1 of every array.

    >>> config = TransformerConfig(9, 7, model_dim=8, heads=2, head_dim=4, decoder_layers=3)
    >>> init_cache(config, 5, 10)["dense"].keys_BKND.shape
    (3, 5, 10, 2, 4)
    """

    def empty(layers: int) -> KeysValues:
        zeros = jnp.zeros((layers, batch, length, config.kv_heads or config.heads, config.head_dim), config.dtype)
        return KeysValues(zeros, zeros)

    return _by_layer(
        {name: {kind: empty(number) for kind in kinds} for name, (kinds, number) in _parts(config).items()}
    )


def decode_step(
    config: TransformerConfig,
    params: dict[str, Any],
    cache: Cache,
    tokens_B: jax.Array,
    position: jax.Array | int,
    memory: jax.Array | Cache | None = None,
    source_valid_BL: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Logits of the token after ``tokens_B``.

    Without drops they equal those of ``forward`` at ``position`` for the same inputs.

    Args:
        config: the model.
        params: see ``transformer.param_specs``.
        cache: keys and values of the positions before; see ``init_cache``.
        tokens_B: int32, the decoder's input at ``position``: 0 at position 0, then the token chosen last.
        position: int scalar, the same for all sentences, below the cache's length.
        memory: the result of ``encode``, or, faster, of ``project_memory``; None for a decoder alone.
        source_valid_BL: bool, False where the source is padding; None for a decoder alone.

    Returns:
        logits_BV in float32, and the cache with this position filled in.
    """
    length = jax.tree.leaves(cache)[0].shape[2]
    seen_BQK = jnp.broadcast_to(jnp.arange(length) <= position, (tokens_B.shape[0], 1, length))
    logits_BQV, cache = decode_flat_step(
        config, params, cache, tokens_B[:, None], position, memory, source_valid_BL, seen_BQK
    )
    return logits_BQV[:, 0, :], cache


def decode_flat_step(
    config: TransformerConfig,
    params: dict[str, Any],
    cache: Cache,
    tokens_BQ: jax.Array,
    position: jax.Array | int,
    memory: jax.Array | Cache | None,
    source_valid_BL: jax.Array | None,
    seen_BQK: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Logits of the token after each of Q hypotheses of each sentence, in one flat sequence (appendix A.1).

    The tokens of position t fill the slots t*Q to t*Q + Q - 1 of the cache, and are not moved later. A beam search that
    continues some hypotheses twice and drops others changes ``seen_BQK`` only. The memory is not repeated for each
    hypothesis.

    Args:
        config: the model.
        params: see ``transformer.param_specs``.
        cache: keys and values of the positions before; see ``init_cache``, with a length of T*Q.
        tokens_BQ: int32, the decoder's input at ``position`` for each hypothesis.
        position: int scalar, below T; or int32 [B] where sentences did not begin together, each below T.
        memory: the result of ``encode``, or, faster, of ``project_memory``; None for a decoder alone.
        source_valid_BL: bool, False where the source is padding; None for a decoder alone.
        seen_BQK: bool, the slots each hypothesis attends to: those of its ancestors and its own, t*Q + q.

    Returns:
        logits_BQV in float32, and the cache with this position filled in.
    """
    config = config.dropless()
    require(
        (memory is None) == (config.encoder_layers == 0) == (source_valid_BL is None),
        "a decoder has a memory if the model has an encoder.",
        f"encoder_layers={config.encoder_layers}, memory {'is None' if memory is None else 'given'},"
        f" source_valid_BL {'is None' if source_valid_BL is None else 'given'}",
    )
    if isinstance(memory, jax.Array):
        memory = project_memory(config, params, memory)
    hypotheses = tokens_BQ.shape[1]
    slot = position * hypotheses
    memory_BQK = None if source_valid_BL is None else source_valid_BL[:, None, :]
    position_B = jnp.reshape(jnp.asarray(position, jnp.int32), (-1,))  # B is 1 where all are at the same one
    position_BQ = jnp.broadcast_to(position_B[:, None], (position_B.size, hypotheses))
    turn = rotation(config, position_BQ)

    def write(old_BKND: jax.Array, new_BQND: jax.Array) -> jax.Array:
        if jnp.ndim(slot) == 0:
            return jax.lax.dynamic_update_slice_in_dim(old_BKND, new_BQND, slot, axis=1)
        of_sentence = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        return jax.vmap(of_sentence)(old_BKND, new_BQND, slot)

    def block(
        kinds: tuple[str, ...], x_BLM: jax.Array, of_block: tuple[Any, Cache, Cache | None]
    ) -> tuple[jax.Array, Cache]:
        layers, cache, memory = of_block
        filled: Cache = {}
        for kind in kinds:
            layer = layers[kind]
            inputs_BLM = norm(layer["attention_norm"], x_BLM)
            new = keys_values(layer["attention"], inputs_BLM, turn)
            filled[kind] = jax.tree.map(write, cache[kind], new)
            x_BLM = x_BLM + attend(layer["attention"], inputs_BLM, filled[kind], seen_BQK, rotation=turn)
            if memory is not None and memory_BQK is not None:
                inputs_BLM = norm(layer["memory_attention_norm"], x_BLM)
                x_BLM = x_BLM + attend(layer["memory_attention"], inputs_BLM, memory[kind], memory_BQK)
            x_BLM, _ = feed_forward_branch(config, layer, x_BLM, None, None)
        return x_BLM, filled

    position_BLM = None if turn is not None else positions(config, position_BQ[:, 0])[:, None]
    x_BLM = embed(config, params["target_embedding"], tokens_BQ, position_BLM)
    filled: dict[str, Cache] = {}
    for name, (kinds, _) in _parts(config).items():
        remembered = None if memory is None else _of_part(name, kinds, memory)
        x_BLM, filled[name] = jax.lax.scan(
            functools.partial(block, kinds), x_BLM, (params["decoder"][name], _of_part(name, kinds, cache), remembered)
        )
    return logits(config, params, x_BLM), _by_layer(filled)
