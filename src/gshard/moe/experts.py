"""The MoE layer: position-wise Mixture of Experts (Algorithm 2), with the marks of section 3.2.

The layer is written for one device. With ``config.partitions`` D above 1 it carries the paper's marks:
tokens split by group, router weights replicated, dispatched tokens and experts split by expert. The
change of the split dimension from G to E is the layer's AllToAll; the way back follows by propagation.
With one partition the same arrays have names, for which a layout says the same:
``gshard.Layout(groups="x", experts="x", tokens=None, model=None, gates=None)``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gshard.api.marks import name, replicate, split
from gshard.moe.blocks import blocks_expert_layer
from gshard.moe.config import TransformerConfig
from gshard.moe.dispatch import (
    combine_einsum,
    combine_gather,
    dispatch_einsum,
    dispatch_gather,
    one_hot_weights,
    token_of_slot,
)
from gshard.moe.gating import top2_gating
from gshard.moe.param import Param


def expert_specs(config: TransformerConfig) -> dict[str, Param]:
    """Router and experts of one layer: wg [M, E], wi [E, M, H] and wo [E, H, M], no biases.

    >>> expert_specs(TransformerConfig(9, 9, experts=4, model_dim=8, hidden_dim=16))["wi"].shape
    (4, 8, 16)
    """
    E, M, H = config.experts, config.model_dim, config.hidden_dim
    return {
        "wg": Param((M, E), ("model", "gates"), "uniform", (3 / M) ** 0.5),
        "wi": Param((E, M, H), ("experts", "model", "hidden"), "normal", M**-0.5),
        "wo": Param((E, H, M), ("experts", "hidden", "model"), "normal", H**-0.5),
    }


def expert_layer(
    config: TransformerConfig,
    params: dict[str, jax.Array],
    inputs_BLM: jax.Array,
    valid_BL: jax.Array | None = None,
    *,
    key: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sends each token to its experts and adds what they return.

    Tokens form groups in row-major order: ``inputs_BLM.reshape(G, S, M)``. A token that no expert took
    gets zero, so the residual connection around the layer passes it on unchanged.

    Args:
        config: routing, dispatch and marks.
        params: see ``expert_specs``; float32.
        inputs_BLM: tokens, in the dtype of activations.
        valid_BL: bool, False for padding; None means all True.
        key: key of the coins for second choices; None keeps all that fit.

    Returns:
        outputs_BLM in the dtype of the inputs, and the metrics of the gating with its ``aux_loss``.

    Raises:
        ModelError: the group size does not divide the tokens, or the capacity is below 1.

    >>> from gshard.moe.param import init_params
    >>> config = TransformerConfig(9, 9, experts=4, model_dim=8, hidden_dim=16, group_size=6)
    >>> params = init_params(expert_specs(config), jax.random.key(0))
    >>> outputs, metrics = expert_layer(config, params, jnp.ones((2, 3, 8)))
    >>> outputs.shape
    (2, 3, 8)
    """
    B, L, M = inputs_BLM.shape
    S = config.tokens_of_a_group(B * L)
    G = B * L // S
    capacity = S if config.dispatch == "blocks" else config.capacity(S)

    inputs_GSM = _split(config, inputs_BLM.reshape(G, S, M), "groups tokens model")
    wg_ME = replicate(params["wg"]) if config.partitions > 1 else name(params["wg"], "model gates")
    # The router is float32 throughout: a rounded logit changes the route, not just a value.
    logits_GSE = jnp.einsum("GSM,ME->GSE", inputs_GSM.astype(jnp.float32), wg_ME)
    gating = top2_gating(
        logits_GSE,
        capacity,
        routing=config.routing,
        second_expert=config.second_expert,
        key=key,
        valid_GS=None if valid_BL is None else valid_BL.reshape(G, S),
    )
    outputs_GSM = _run_experts(config, params, inputs_GSM, gating, capacity)
    outputs_BLM = outputs_GSM.astype(inputs_BLM.dtype).reshape(B, L, M)
    return outputs_BLM, {"aux_loss": gating.aux_loss, **gating.metrics}


def _run_experts(
    config: TransformerConfig, params: dict[str, jax.Array], inputs_GSM: jax.Array, gating: Any, capacity: int
) -> jax.Array:
    """Dispatch, the two products of the experts and combine: outputs_GSM in float32."""
    wi_EMH = _split(config, params["wi"], "experts model hidden").astype(inputs_GSM.dtype)
    wo_EHM = _split(config, params["wo"], "experts hidden model").astype(inputs_GSM.dtype)
    if config.dispatch == "blocks":
        return blocks_expert_layer(gating, inputs_GSM, wi_EMH, wo_EHM)

    if config.dispatch == "einsum":
        combine_GSEC, dispatch_GSEC = one_hot_weights(gating, config.experts, capacity)
        dispatched_EGCM = dispatch_einsum(dispatch_GSEC, inputs_GSM)
    else:
        dispatched_EGCM = dispatch_gather(token_of_slot(gating, config.experts, capacity), inputs_GSM)
    # G has no name here: the axes over which groups are split are those of the experts now.
    dispatched_EGCM = _split(config, dispatched_EGCM, "experts _ capacity model")
    hidden_EGCH = jax.nn.relu(jnp.einsum("EGCM,EMH->EGCH", dispatched_EGCM, wi_EMH))
    outputs_EGCM = jnp.einsum("EGCH,EHM->EGCM", hidden_EGCH, wo_EHM)
    if config.dispatch == "einsum":
        return combine_einsum(combine_GSEC, outputs_EGCM)
    return combine_gather(gating, outputs_EGCM)


def _split(config: TransformerConfig, x: jax.Array, names: str) -> jax.Array:
    """Split by the dimension in front, as ``config`` says, or as a layout says of these names."""
    return split(x, 0, config.partitions) if config.partitions > 1 else name(x, names)
