"""The Transformer, an encoder and a decoder or a decoder alone: blocks of layers, parameters and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gshard.moe.attention import (
    KeysValues,
    Rotation,
    attend,
    attention_specs,
    dropout,
    keys_values,
    rotation,
    split_key,
)
from gshard.moe.config import ModelError, TransformerConfig
from gshard.moe.experts import SENT, expert_layer, expert_specs
from gshard.moe.feed_forward import feed_forward, feed_forward_specs
from gshard.moe.param import Param, init_params

# Block: the layers that are stacked, a pair with experts and without, or one dense layer.

# By name: scalars of a layer, or one value for each MoE layer of a stack; see ``transformer.forward`` for ``load``.
Metrics = dict[str, Any]


def norm_spec(config: TransformerConfig) -> Param:
    """The scale [M] of a norm."""
    return Param((config.model_dim,), ("model",), "constant", 1.0)


def norm(scale_M: jax.Array, x_BLM: jax.Array) -> jax.Array:
    """Divides by the root of the mean square over M, in float32, and scales.

    >>> norm(jnp.ones(2), jnp.array([[[3.0, -3.0]]])).round(3).tolist()
    [[[1.0, -1.0]]]
    """
    x = x_BLM.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean_square + 1e-6) * scale_M).astype(x_BLM.dtype)


def _layer_specs(config: TransformerConfig, kind: str, decoder: bool) -> dict[str, Any]:
    specs: dict[str, Any] = {"attention_norm": norm_spec(config), "attention": attention_specs(config)}
    if decoder and config.encoder_layers:
        specs |= {"memory_attention_norm": norm_spec(config), "memory_attention": attention_specs(config)}
    if kind == "sparse":
        return specs | {"experts_norm": norm_spec(config), "experts": expert_specs(config)}
    feed_forward = feed_forward_specs(config, config.dense_hidden_dim or config.hidden_dim)
    return specs | {"feed_forward_norm": norm_spec(config), "feed_forward": feed_forward}


def feed_forward_branch(
    config: TransformerConfig,
    params: dict[str, Any],
    x_BLM: jax.Array,
    valid_BL: jax.Array | None,
    key: jax.Array | None,
) -> tuple[jax.Array, Metrics]:
    """The stream after the experts or the dense feed-forward of a layer, and the metrics of the experts."""
    coin_key, drop_key = split_key(key, 2)
    if "experts" in params:
        inputs_BLM = norm(params["experts_norm"], x_BLM)
        outputs_BLM, metrics = expert_layer(config, params["experts"], inputs_BLM, valid_BL, key=coin_key)
    else:
        inputs_BLM = norm(params["feed_forward_norm"], x_BLM)
        outputs_BLM, metrics = feed_forward(config.activation, params["feed_forward"], inputs_BLM), {}
    return x_BLM + dropout(outputs_BLM, config.dropout, drop_key), metrics


def attention_branch(
    config: TransformerConfig,
    params: dict[str, Any],
    name: str,
    x_BLM: jax.Array,
    memory_BKM: jax.Array | None,
    mask_BLK: jax.Array,
    key: jax.Array | None,
    rotation: Rotation | None = None,
) -> jax.Array:
    """The stream after an attention over ``memory_BKM``, or over the stream itself if that is None."""
    weights_key, drop_key = split_key(key, 2)
    inputs_BLM = norm(params[f"{name}_norm"], x_BLM)
    seen: KeysValues = keys_values(params[name], inputs_BLM if memory_BKM is None else memory_BKM, rotation)
    rate = config.attention_dropout
    outputs_BLM = attend(params[name], inputs_BLM, seen, mask_BLK, rate=rate, key=weights_key, rotation=rotation)
    return x_BLM + dropout(outputs_BLM, config.dropout, drop_key)


def stack(
    config: TransformerConfig,
    params: dict[str, Any],
    kinds: tuple[str, ...],
    x_BLM: jax.Array,
    *,
    mask_BLK: jax.Array,
    valid_BL: jax.Array,
    memory_BKM: jax.Array | None = None,
    memory_mask_BLK: jax.Array | None = None,
    key: jax.Array | None = None,
    rotation: Rotation | None = None,
) -> tuple[jax.Array, Metrics]:
    """All blocks of one form, of an encoder or of a decoder, in one ``scan``."""

    def block(x_BLM: jax.Array, of_block: tuple[dict[str, Any], jax.Array | None]) -> tuple[jax.Array, Metrics]:
        layers, block_key = of_block
        metrics: Metrics = {}
        keys = split_key(block_key, 3 * len(kinds))
        for kind in kinds:
            layer = layers[kind]
            x_BLM = attend_to(config, layer, "attention", x_BLM, None, mask_BLK, keys.pop(), rotation)
            if memory_BKM is not None:
                assert memory_mask_BLK is not None, "a memory comes with a mask"
                x_BLM = attend_to(config, layer, "memory_attention", x_BLM, memory_BKM, memory_mask_BLK, keys.pop())
            x_BLM, of_layer = feed(config, layer, x_BLM, valid_BL, keys.pop())
            metrics |= of_layer
        return x_BLM, metrics

    attend_to, feed = _branch(config, attention_branch, 0, 2), _branch(config, feed_forward_branch, 0)
    blocks = jax.tree.leaves(params)[0].shape[0]
    keys = None if key is None else jax.random.split(key, blocks)
    return jax.lax.scan(jax.checkpoint(block) if config.remat is True else block, x_BLM, (params, keys))


def _branch(config: TransformerConfig, branch: Callable[..., Any], *static: int) -> Callable[..., Any]:
    """A branch as it runs in a block. ``remat="branches"`` recomputes it, except what experts are sent and return."""
    if config.remat != "branches":
        return branch
    policy = jax.checkpoint_policies.save_only_these_names(*SENT)
    return jax.checkpoint(branch, policy=policy, static_argnums=static)


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

    def stacked(kinds: tuple[str, ...], number: int, decoder: bool) -> dict[str, Any]:
        return jax.tree.map(
            lambda spec: spec.stacked(number), {kind: _layer_specs(config, kind, decoder) for kind in kinds}
        )

    def half(layers: int, decoder: bool) -> dict[str, Any]:
        parts = {name: stacked(*part, decoder) for name, part in config.parts(layers).items()}
        return parts | {"norm": norm_spec(config)}

    specs = {"target_embedding": embedding(config.target_vocabulary), "decoder": half(config.decoder_layers, True)}
    if config.encoder_layers:
        specs |= {
            "source_embedding": embedding(config.source_vocabulary),
            "encoder": half(config.encoder_layers, False),
        }
    return specs if config.tied_softmax else specs | {"softmax": embedding(config.target_vocabulary)}


def init(config: TransformerConfig, key: jax.Array) -> dict[str, Any]:
    """Initial parameters, float32; the same nested dict as ``param_specs``.

    Under ``jax.eval_shape`` it allocates nothing.

    >>> config = TransformerConfig(9, 7, model_dim=8, hidden_dim=16, heads=2, head_dim=4)
    >>> init(config, jax.random.key(0))["target_embedding"].shape
    (7, 8)
    """
    return init_params(param_specs(config), key)


def begins(before_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each token the number of its sentence in the row, and its position there: int32 [B, L], both from 0 on.

    >>> [found.tolist() for found in begins(jnp.array([[0, 7, 1, 5, 6, 1]]))]
    [[[0, 0, 1, 1, 1, 2]], [[0, 1, 0, 1, 2, 0]]]
    """
    begin_BL = before_BL == EOS
    at_L = jnp.arange(before_BL.shape[1], dtype=jnp.int32)
    sentence_BL = jnp.cumsum(begin_BL.astype(jnp.int32), axis=1)
    first_BL = jax.lax.cummax(jnp.where(begin_BL, at_L, 0), axis=1)
    return sentence_BL, at_L - first_BL


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
    position_BLM: jax.Array | None,
    key: jax.Array | None = None,
) -> jax.Array:
    """The stream that enters a stack. An id outside the vocabulary gives NaN, not another word's row."""
    x_BLM = jnp.take(table_VM, ids_BL, axis=0, mode="fill")
    x_BLM = x_BLM if position_BLM is None else x_BLM + position_BLM
    return dropout(x_BLM.astype(config.dtype), config.dropout, key)


def logits(config: TransformerConfig, params: dict[str, Any], x_BLM: jax.Array) -> jax.Array:
    """Final norm of the decoder and the softmax's input, logits_BLV in float32."""
    x_BLM = norm(params["decoder"]["norm"], x_BLM) * config.model_dim**-0.5
    table_VM = params["target_embedding" if config.tied_softmax else "softmax"].astype(x_BLM.dtype)
    return jnp.einsum("BLM,VM->BLV", x_BLM, table_VM, preferred_element_type=jnp.float32)


def encoder(
    config: TransformerConfig, params: dict[str, Any], source_BL: jax.Array, key: jax.Array | None = None
) -> tuple[jax.Array, Metrics]:
    """memory_BLM, the encoder's final normalised stream, and metrics of each MoE layer."""
    embed_key, stack_key = split_key(key, 2)
    valid_BL = source_BL != PAD
    sentence_BL, position_BL = begins(_shifted(source_BL))
    x_BLM = embed(config, params["source_embedding"], source_BL, _encodings(config, position_BL), embed_key)
    mask_BLK = (sentence_BL[:, :, None] == sentence_BL[:, None, :]) & valid_BL[:, None, :]
    turn = rotation(config, position_BL)
    x_BLM, metrics = _stacks(
        config, params["encoder"], config.encoder_layers, x_BLM, stack_key,
        mask_BLK=mask_BLK, valid_BL=valid_BL, rotation=turn,
    )  # fmt: skip
    return norm(params["encoder"]["norm"], x_BLM), metrics


def _stacks(
    config: TransformerConfig, params: dict[str, Any], layers: int, x_BLM: jax.Array, key: jax.Array | None, **rest: Any
) -> tuple[jax.Array, Metrics]:
    """The stream after all layers of a stack, and metrics of those with experts; ``rest`` is for ``stack``."""
    parts = config.parts(layers)
    keys = [key] if len(parts) == 1 else split_key(key, len(parts))
    metrics: Metrics = {}
    for (name, (kinds, _)), own_key in zip(parts.items(), keys, strict=True):
        x_BLM, metrics = stack(config, params[name], kinds, x_BLM, key=own_key, **rest)
    return x_BLM, metrics


def _shifted(ids_BL: jax.Array) -> jax.Array:
    """The id before each one, 0 at the start of a row."""
    return jnp.pad(ids_BL, ((0, 0), (1, 0)))[:, :-1]


def _encodings(config: TransformerConfig, position_BL: jax.Array) -> jax.Array | None:
    """Encodings of positions below L, float32 [B, L, M], looked up in a table; None if positions are rotary."""
    if config.positions == "rotary":
        return None
    return jnp.take(positions(config, jnp.arange(position_BL.shape[1])), position_BL, axis=0)


def forward(
    config: TransformerConfig,
    params: dict[str, Any],
    source_BL: jax.Array | None,
    target_in_BL: jax.Array,
    *,
    key: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Logits for every target position.

    A sentence begins at the start of a row, and where the input is the end of the sentence before; there the decoder's
    input is 0. Positions whose input is padding, and those after the last sentence, predict nothing and are not routed
    to experts.

    Args:
        config: the model.
        params: see ``param_specs``.
        source_BL: int32 ids, 0 for padding; None for a decoder alone.
        target_in_BL: int32 ids of the target, shifted right by one, 0 at the start of each row; its length may differ
            from the source's.
        key: for dropout and coins; None means no dropout, and second experts always used if they fit.

    Returns:
        logits_BLV in float32, and float32 scalars, means over the MoE layers: ``aux_loss``, ``dropped_share``,
        ``kept_share`` (see ``Gating``), ``load_entropy`` and ``dead_experts``. A dense model has none. With
        ``balance="bias"`` there is also ``load``: for ``encoder`` and ``decoder`` int32 [layers, E], the tokens that
        asked for each expert.

    Raises:
        ModelError: the batch does not fill groups.
    """
    encoder_key, embed_key, stack_key = split_key(key, 3)
    memory: dict[str, Any] = {}
    of_stacks: dict[str, Metrics] = {}
    sentence_BL, position_BL = begins(target_in_BL)
    begin_BL = position_BL == 0
    L = target_in_BL.shape[1]
    if not config.encoder_layers:
        valid_BL = begin_BL | (target_in_BL != PAD)
    else:
        if source_BL is None:
            raise ModelError("a model with an encoder needs a source.", None, "source_BL=None")
        memory_BKM, of_stacks["encoder"] = encoder(config, params, source_BL, encoder_key)
        source_valid_BL = source_BL != PAD
        source_sentence_BK, _ = begins(_shifted(source_BL))
        sentences_B = jnp.max(jnp.where(source_valid_BL, source_sentence_BK + 1, 0), axis=1, keepdims=True)
        valid_BL = jnp.where(begin_BL, sentence_BL < sentences_B, target_in_BL != PAD)
        from_BLK = sentence_BL[:, :, None] == source_sentence_BK[:, None, :]
        memory = {"memory_BKM": memory_BKM, "memory_mask_BLK": from_BLK & source_valid_BL[:, None, :]}
    input_BL = jnp.where(begin_BL, PAD, target_in_BL)
    x_BLM = embed(config, params["target_embedding"], input_BL, _encodings(config, position_BL), embed_key)
    same_BLL = sentence_BL[:, :, None] == sentence_BL[:, None, :]
    x_BLM, of_stacks["decoder"] = _stacks(
        config,
        params["decoder"],
        config.decoder_layers,
        x_BLM,
        stack_key,
        mask_BLK=jnp.tril(jnp.ones((1, L, L), bool)) & same_BLL,
        valid_BL=valid_BL,
        rotation=rotation(config, position_BL),
        **memory,
    )
    return logits(config, params, x_BLM), _means(of_stacks)


def _means(of_stacks: dict[str, Metrics]) -> Metrics:
    """Means of the metrics over all MoE layers; loads stay as they are."""
    means = {
        name: jnp.mean(jnp.concatenate([of_stack[name] for of_stack in of_stacks.values()]))
        for name in of_stacks["decoder"]
        if name != "load"
    }
    loads = {half: of_stack["load"] for half, of_stack in of_stacks.items() if "load" in of_stack}
    return means | ({"load": loads} if loads else {})


def loss(
    config: TransformerConfig,
    params: dict[str, Any],
    batch: dict[str, jax.Array],
    *,
    key: jax.Array | None = None,
    label_smoothing: float = 0.1,
) -> tuple[jax.Array, Metrics]:
    """The loss of training: smoothed cross entropy plus the load-balancing loss.

    The cross entropy is the mean over the real target tokens. The auxiliary loss is ``aux_weight`` times the *sum* over
    MoE layers, as in Lingvo, so that its weight for each layer does not depend on the depth. With ``balance="bias"`` it
    is not a part of the loss.

    Args:
        config: the model.
        params: see ``param_specs``.
        batch: ``source`` (but for a decoder alone) and ``target``, int32 [B, L]; targets end in 1, padding is 0. The
            lengths may differ, and a row may hold several sentences.
        key: see ``forward``.
        label_smoothing: share of the probability spread evenly over the vocabulary.

    Returns:
        the loss, float32 scalar, and float32 scalars: ``loss``, ``cross_entropy`` (without smoothing and without
        aux), ``tokens`` (real target tokens), ``aux_loss`` (mean over MoE layers, 1.0 is balanced), and the metrics
        of ``forward``. For a dense model aux_loss and dropped_share are 0 and load_entropy is 1.
    """
    target_BL = batch["target"]
    logits_BLV, metrics = forward(config, params, batch.get("source"), _shifted(target_BL), key=key)
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
    if config.experts and config.balance == "loss":
        value = value + config.aux_weight * config.moe_layers * metrics["aux_loss"]
    return value, {"loss": value, "cross_entropy": cross_entropy, "tokens": tokens, **metrics}
