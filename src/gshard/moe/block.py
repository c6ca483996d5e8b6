"""Block: the layers that are stacked, a pair with experts and without, or one dense layer.

Each branch (attention, feed-forward or experts) reads a normalised copy of the stream and adds its
result to it: pre-norm, with a norm that only scales (no mean, no bias). All blocks of a stack have
the same parameters, one after the other in a leading ``layers`` dimension, and run in one ``scan``.

With ``config.remat`` the backward pass recomputes a whole block from the stream that enters it. With
``remat="branches"`` it recomputes each branch from the stream that enters the branch, and keeps what experts were sent
and returned. So no dispatch and no combine is communicated a third time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gshard.moe.attention import KeysValues, attend, attention_specs, keys_values
from gshard.moe.config import TransformerConfig
from gshard.moe.dropout import dropout, split_key
from gshard.moe.experts import SENT, expert_layer, expert_specs
from gshard.moe.feed_forward import feed_forward, feed_forward_specs
from gshard.moe.param import Param
from gshard.moe.rotary import Rotation

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


def block_specs(config: TransformerConfig, kinds: tuple[str, ...], *, decoder: bool) -> dict[str, Any]:
    """Parameters of one block: a layer for each of ``kinds``, not stacked.

    A decoder without an encoder has no attention over a memory.
    """
    return {kind: _layer_specs(config, kind, decoder) for kind in kinds}


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
