"""The MoE layer: position-wise Mixture of Experts (Algorithm 2), with the marks of section 3.2.

The layer is written for one device. With more than one of ``config.partitions`` it has the paper's marks: tokens are
split by group, router weights replicated, dispatched tokens and experts split by expert. The change of the split
dimension from G to E is the layer's AllToAll; the one back follows by propagation. With ``config.expert_axis`` and
``data_axis`` the marks name mesh axes: groups are split over both, experts over the first, and the groups of
dispatched tokens stay split over the second. With one partition and no axes the same arrays have dimension names, and a
layout splits them in the same way: ``gshard.Layout(groups="x", experts="x", tokens=None, model=None, gates=None)``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from gshard.api.marks import name, replicate, shard, split
from gshard.moe.config import TransformerConfig, as_axes
from gshard.moe.dispatch import (
    combine_einsum,
    combine_gather,
    dispatch_einsum,
    dispatch_gather,
    one_hot_weights,
    token_of_slot,
)
from gshard.moe.feed_forward import feed_forward, feed_forward_specs, hidden
from gshard.moe.gating import Gating, top_k_gating
from gshard.moe.param import Param
from gshard.moe.ragged import blocks_expert_layer, ragged_expert_layer, within_room

# The names, for policies of ``jax.checkpoint``, of the arrays that experts receive and return.
SENT = ("dispatched", "returned")
# The dimensions that marks split and a layout has no rows for.
_PLACES = ("replicas", "partitions")


def expert_specs(config: TransformerConfig) -> dict[str, Any]:
    """Router and experts of one layer: wg [M, E], wi [E, M, H] and wo [E, H, M], no biases.

    With SwiGLU there is also wi_gate [E, M, H]. ``shared`` is the feed-forward layer of shared experts. ``bias`` [E] is
    added to the gates with ``balance="bias"``.

    >>> expert_specs(TransformerConfig(9, 9, experts=4, model_dim=8, hidden_dim=16))["wi"].shape
    (4, 8, 16)
    """
    E, M, H = config.experts, config.model_dim, config.hidden_dim
    specs: dict[str, Any] = {"wg": Param((M, E), ("model", "gates"), "uniform", (3 / M) ** 0.5)}
    specs |= feed_forward_specs(config, H, E)
    if config.balance == "bias":
        specs["bias"] = Param((E,), ("gates",), "constant", 0.0)
    if config.shared_experts:
        specs["shared"] = feed_forward_specs(config, config.shared_experts * H)
    return specs


def expert_layer(
    config: TransformerConfig,
    params: dict[str, Any],
    inputs_BLM: jax.Array,
    valid_BL: jax.Array | None = None,
    *,
    key: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sends each token to its experts, and adds up their weighted results.

    Tokens form groups in row-major order: ``inputs_BLM.reshape(G, S, M)``. The result for a token without an expert is
    zero, so the residual connection around the layer leaves it unchanged.

    Args:
        config: routing, dispatch and marks.
        params: see ``expert_specs``; float32.
        inputs_BLM: tokens, in the dtype of activations.
        valid_BL: bool, False for padding; None means all True.
        key: key of the coins for second choices; None keeps all that fit.

    Returns:
        outputs_BLM in the dtype of the inputs, and the metrics of the gating with its ``aux_loss``. With
        ``balance="bias"`` they include the ``load`` [E] for ``balanced``.

    Raises:
        ModelError: the group size does not divide the tokens, or the capacity or the room of a partition is below 1.

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
    capacity = config.capacity(S) if config.has_slots else S

    inputs_GSM = _split(config, inputs_BLM.reshape(G, S, M), "groups tokens model")
    wg_ME = replicate(params["wg"]) if _is_marked(config) else name(params["wg"], "model gates")
    # The router computes in float32: a rounded logit could change the route of a token.
    logits_GSE = jnp.einsum("GSM,ME->GSE", inputs_GSM.astype(jnp.float32), wg_ME)
    valid_GS = None if valid_BL is None else valid_BL.reshape(G, S)
    gating = top_k_gating(
        logits_GSE,
        capacity,
        k=config.top_k,
        routing=config.routing,
        gates=config.gates,
        normalise=config.normalise_gates,
        scale=config.gate_scale,
        bias_E=params.get("bias"),
        key=key,
        valid_GS=valid_GS,
    )
    if config.dispatch == "ragged_all_to_all":
        room = config.room(B * L)
        gating = within_room(gating, config.partitions, room, valid_GS, replicas=config.replicas)
    outputs_GSM = _run_experts(config, params, inputs_GSM, gating, capacity)
    outputs_BLM = outputs_GSM.astype(inputs_BLM.dtype).reshape(B, L, M)
    if config.shared_experts:
        outputs_BLM = outputs_BLM + feed_forward(config.activation, params["shared"], inputs_BLM)
    metrics = {"aux_loss": gating.aux_loss, **gating.metrics}
    return outputs_BLM, metrics | ({"load": gating.load_E} if config.balance == "bias" else {})


def _run_experts(
    config: TransformerConfig,
    params: dict[str, Any],
    inputs_GSM: jax.Array,
    gating: Gating,
    capacity: int,
) -> jax.Array:
    """Dispatch, the two or three products of the experts and combine: outputs_GSM in float32."""
    weights = {
        name: _split(config, params[name], f"experts {dims}").astype(inputs_GSM.dtype)
        for name, dims in (("wi", "model hidden"), ("wi_gate", "model hidden"), ("wo", "hidden model"))
        if name in params
    }
    if config.dispatch == "blocks":
        return blocks_expert_layer(gating, inputs_GSM, weights, config.activation)
    if config.dispatch == "ragged_all_to_all":
        tokens = inputs_GSM.shape[0] * inputs_GSM.shape[1]
        outputs_GSM = ragged_expert_layer(
            gating, inputs_GSM, weights, activation=config.activation, partitions=config.partitions,
            replicas=config.replicas, room=config.room(tokens), mark=functools.partial(_split, config),
        )  # fmt: skip
        return _split(config, outputs_GSM, "groups tokens model")

    if config.dispatch == "einsum":
        combine_GSEC, dispatch_GSEC = one_hot_weights(gating, config.experts, capacity)
        dispatched_EGCM = dispatch_einsum(dispatch_GSEC, inputs_GSM)
    else:
        dispatched_EGCM = dispatch_gather(token_of_slot(gating, config.experts, capacity), inputs_GSM)
    # G has another name here, because the axes of the groups now split the experts.
    dispatched_EGCM = _sent(config, _split(config, dispatched_EGCM, "experts replicas capacity model"), SENT[0])
    hidden_EGCH = hidden(config.activation, lambda name: jnp.einsum("EGCM,EMH->EGCH", dispatched_EGCM, weights[name]))
    outputs_EGCM = _sent(config, jnp.einsum("EGCH,EHM->EGCM", hidden_EGCH, weights["wo"]), SENT[1])
    if config.dispatch == "einsum":
        return combine_einsum(combine_GSEC, outputs_EGCM)
    return combine_gather(gating, outputs_EGCM)


def _is_marked(config: TransformerConfig) -> bool:
    """Whether the layer has marks, and not names of dimensions."""
    return config.partitions > 1 or config.expert_axis is not None or config.data_axis is not None


def _split(config: TransformerConfig, x: jax.Array, names: str) -> jax.Array:
    """Splits groups and experts over their mesh axes, or the first dimension over ``config.partitions``.

    Without either it names the dimensions for a layout.
    """
    if not _is_marked(config):
        return name(x, " ".join("_" if dim in _PLACES else dim for dim in names.split()))
    if config.expert_axis is None and config.data_axis is None:
        return split(x, 0, config.partitions)
    expert, data = as_axes(config.expert_axis), as_axes(config.data_axis)
    axes_of = {
        "groups": (*data, *expert), "experts": expert, "partitions": (*data, *expert), "replicas": data,
    }  # fmt: skip
    return shard(x, PartitionSpec(*(axes_of.get(dim) or PartitionSpec.UNCONSTRAINED for dim in names.split())))


def _sent(config: TransformerConfig, x: jax.Array, called: str) -> jax.Array:
    """Names an array that ``remat="branches"`` keeps."""
    return checkpoint_name(x, called) if config.remat == "branches" else x
