"""The encoder-decoder Transformer: parameters, forward pass and loss.

    config = TransformerConfig(source_vocabulary=64_000, target_vocabulary=32_000, experts=128)
    params = init(config, jax.random.key(0))
    value, metrics = loss(config, params, {"source": source_BL, "target": target_BL}, key=step_key)

Ids: 0 pads and is the decoder's first input, 1 ends a sentence. Positions are sinusoidal, added to the
embeddings: no parameters and no largest length. Embeddings start as N(0, 1); the target embedding is
also the softmax (its input times M^-0.5, as in Lingvo). Source and target have embeddings of their own.

What dropout and coins draw is decided by ``key``. Without one the model is deterministic: nothing is
dropped out, and every second expert that fits is used.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gshard.moe.block import Metrics, block_specs, norm, norm_spec, stack
from gshard.moe.config import TransformerConfig
from gshard.moe.dropout import dropout, split_key
from gshard.moe.param import Param, init_params

PAD, EOS = 0, 1


def param_specs(config: TransformerConfig) -> dict[str, Any]:
    """The tree of ``Param`` of a model; layers of a kind are stacked in one leading dimension.

    >>> from gshard.moe.config import TABLE_1
    >>> param_specs(TABLE_1["MoE(128E, 12L)"])["encoder"]["blocks"]["sparse"]["experts"]["wi"].shape
    (3, 128, 1024, 8192)
    """
    M = config.model_dim

    def embedding(vocabulary: int) -> Param:
        return Param((vocabulary, M), ("vocabulary", "model"), "normal", 1.0)

    def half(layers: int, decoder: bool) -> dict[str, Any]:
        number = layers // len(config.layer_kinds)
        blocks = jax.tree.map(lambda spec: spec.stacked(number), block_specs(config, decoder=decoder))
        return {"blocks": blocks, "norm": norm_spec(config)}

    return {
        "source_embedding": embedding(config.source_vocabulary),
        "target_embedding": embedding(config.target_vocabulary),
        "encoder": half(config.encoder_layers, decoder=False),
        "decoder": half(config.decoder_layers, decoder=True),
    }


def init(config: TransformerConfig, key: jax.Array) -> dict[str, Any]:
    """Initial parameters, float32; the same nested dict as ``param_specs``.

    Under ``jax.eval_shape`` it allocates nothing.

    >>> config = TransformerConfig(9, 7, model_dim=8, hidden_dim=16, heads=2, head_dim=4)
    >>> init(config, jax.random.key(0))["target_embedding"].shape
    (7, 8)
    """
    return init_params(param_specs(config), key)


def positions(config: TransformerConfig, position_L: jax.Array) -> jax.Array:
    """Sinusoidal encodings, float32 [L, M]: sines of M/2 wavelengths from 2 pi to 10000 * 2 pi, then cosines."""
    half = config.model_dim // 2
    power_X = jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1)
    angle_LX = position_L[:, None].astype(jnp.float32) * jnp.exp(-jnp.log(jnp.float32(10000.0)) * power_X)
    return jnp.concatenate([jnp.sin(angle_LX), jnp.cos(angle_LX)], axis=-1)


def embed(
    config: TransformerConfig,
    table_VM: jax.Array,
    ids_BL: jax.Array,
    position_L: jax.Array,
    key: jax.Array | None = None,
) -> jax.Array:
    """The stream that enters a stack. An id outside the vocabulary gives NaN, not another word's row."""
    x_BLM = jnp.take(table_VM, ids_BL, axis=0, mode="fill") + positions(config, position_L)
    return dropout(x_BLM.astype(config.dtype), config.dropout, key)


def logits(config: TransformerConfig, params: dict[str, Any], x_BLM: jax.Array) -> jax.Array:
    """Final norm of the decoder and the tied softmax's input, logits_BLV in float32."""
    x_BLM = norm(params["decoder"]["norm"], x_BLM) * config.model_dim**-0.5
    table_VM = params["target_embedding"].astype(x_BLM.dtype)
    return jnp.einsum("BLM,VM->BLV", x_BLM, table_VM, preferred_element_type=jnp.float32)


def encoder(
    config: TransformerConfig, params: dict[str, Any], source_BL: jax.Array, key: jax.Array | None = None
) -> tuple[jax.Array, Metrics]:
    """memory_BLM, the encoder's final normalised stream, and metrics of each MoE layer."""
    embed_key, stack_key = split_key(key, 2)
    valid_BL = source_BL != PAD
    x_BLM = embed(config, params["source_embedding"], source_BL, jnp.arange(source_BL.shape[1]), embed_key)
    x_BLM, metrics = stack(
        config, params["encoder"]["blocks"], x_BLM, mask_BLK=valid_BL[:, None, :], valid_BL=valid_BL, key=stack_key
    )
    return norm(params["encoder"]["norm"], x_BLM), metrics


def forward(
    config: TransformerConfig,
    params: dict[str, Any],
    source_BL: jax.Array,
    target_in_BL: jax.Array,
    *,
    key: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Logits for every target position.

    Position 0 of the decoder's input is 0; after it, positions whose input is padding or the end of the
    sentence have nothing to predict and are not routed to experts.

    Args:
        config: the model.
        params: see ``param_specs``.
        source_BL: int32 ids, 0 for padding.
        target_in_BL: int32 ids of the target, shifted right by one; its length may differ from the source's.
        key: for dropout and coins; None means no dropout, and second experts always used if they fit.

    Returns:
        logits_BLV in float32, and float32 scalars, means over the MoE layers: ``aux_loss``, ``dropped_share``,
        ``one_expert_share``, ``two_expert_share``, ``load_entropy`` and ``dead_experts``. A dense model has none.

    Raises:
        ModelError: the batch does not fill groups.
    """
    encoder_key, embed_key, stack_key = split_key(key, 3)
    memory_BKM, encoder_metrics = encoder(config, params, source_BL, encoder_key)
    L = target_in_BL.shape[1]
    source_valid_BL = source_BL != PAD
    first_BL = (jnp.arange(L) == 0) & jnp.any(source_valid_BL, axis=1, keepdims=True)
    valid_BL = first_BL | ((target_in_BL != PAD) & (target_in_BL != EOS))
    x_BLM = embed(config, params["target_embedding"], target_in_BL, jnp.arange(L), embed_key)
    x_BLM, decoder_metrics = stack(
        config,
        params["decoder"]["blocks"],
        x_BLM,
        mask_BLK=jnp.tril(jnp.ones((1, L, L), bool)),
        valid_BL=valid_BL,
        memory_BKM=memory_BKM,
        memory_mask_BLK=source_valid_BL[:, None, :],
        key=stack_key,
    )
    metrics = {
        name: jnp.mean(jnp.concatenate([encoder_metrics[name], decoder_metrics[name]])) for name in decoder_metrics
    }
    return logits(config, params, x_BLM), metrics


def loss(
    config: TransformerConfig,
    params: dict[str, Any],
    batch: dict[str, jax.Array],
    *,
    key: jax.Array | None = None,
    label_smoothing: float = 0.1,
) -> tuple[jax.Array, Metrics]:
    """What training minimises: smoothed cross entropy plus the load-balancing loss.

    Cross entropy is added over the real target tokens and divided by their number; the auxiliary loss
    is ``aux_weight`` times the *sum* over MoE layers (as in Lingvo), so that each layer is balanced with
    the same force in models of any depth.

    Args:
        config: the model.
        params: see ``param_specs``.
        batch: ``source`` and ``target``, int32 [B, L]; targets end in 1, padding is 0.
        key: see ``forward``.
        label_smoothing: share of the probability spread evenly over the vocabulary.

    Returns:
        the loss, float32 scalar, and float32 scalars: ``loss``, ``cross_entropy`` (without smoothing and without
        aux), ``tokens`` (real target tokens), ``aux_loss`` (mean over MoE layers, 1.0 is balanced), and the metrics
        of ``forward``. For a dense model aux_loss and dropped_share are 0 and load_entropy is 1.
    """
    target_BL = batch["target"]
    target_in_BL = jnp.pad(target_BL, ((0, 0), (1, 0)))[:, :-1]
    logits_BLV, metrics = forward(config, params, batch["source"], target_in_BL, key=key)
    metrics = metrics or {"aux_loss": jnp.float32(0), "dropped_share": jnp.float32(0), "load_entropy": jnp.float32(1)}

    real_BL = target_BL != PAD
    tokens = jnp.sum(real_BL).astype(jnp.float32)
    normaliser_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    picked_BL = jnp.take_along_axis(logits_BLV, target_BL[:, :, None], axis=-1)[:, :, 0]

    def mean(x_BL: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(real_BL, x_BL, 0.0)) / jnp.maximum(tokens, 1.0)

    cross_entropy = mean(normaliser_BL - picked_BL)
    value = cross_entropy
    if label_smoothing:
        spread = mean(normaliser_BL - jnp.mean(logits_BLV, axis=-1))
        value = (1.0 - label_smoothing) * cross_entropy + label_smoothing * spread
    if config.experts:
        value = value + config.aux_weight * config.moe_layers * metrics["aux_loss"]
    return value, {"loss": value, "cross_entropy": cross_entropy, "tokens": tokens, **metrics}
