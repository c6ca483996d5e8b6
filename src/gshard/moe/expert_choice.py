"""Expert choice: each expert chooses its tokens, so that all experts have the same load (Zhou et al. 2022).

    routed = expert_choice_gating(logits_GSE, capacity=4)
    routed.token_GEC, routed.weight_GEC

No expert overflows, and no loss has to balance the load. Several experts or none may choose a token. Which ones do
depends on the other tokens of its group, also on later ones, so this routing is for encoders.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gshard.moe.gating import load_metrics


class ExpertChoice(NamedTuple):
    """What each expert chose.

    Attributes:
        token_GEC: int32, the token in each slot, the best first; S where the group has no token left.
        weight_GEC: float32, the combine weight; 0 where there is no token.
        chosen_GS: bool, whether some expert chose the token.
        load_E: int32, tokens of each expert.
        aux_loss: float32 scalar, always 1.0.
        metrics: float32 scalars: ``dropped_share`` of the valid tokens that no expert chose; ``kept_share``, the
            slots that hold a token; ``load_entropy`` and ``dead_experts`` as of ``Gating``.
    """

    token_GEC: jax.Array
    weight_GEC: jax.Array
    chosen_GS: jax.Array
    load_E: jax.Array
    aux_loss: jax.Array
    metrics: dict[str, jax.Array]


def expert_choice_gating(
    logits_GSE: jax.Array,
    capacity: int,
    *,
    gates: str = "softmax",
    scale: float = 1.0,
    valid_GS: jax.Array | None = None,
) -> ExpertChoice:
    """Gives each expert the C tokens of its group that have the largest gates for it.

    The weight is the gate itself: over the experts of a token, weights do not add up to 1. Of equal gates the first
    token wins.

    Args:
        logits_GSE: router logits; float32 is computed with whatever the dtype.
        capacity: C, tokens of each expert and group, at most S.
        gates: ``softmax`` over experts or ``sigmoid``.
        scale: what the weights are multiplied by.
        valid_GS: bool, False for tokens that are not to be chosen; None means that all are valid.

    Returns:
        an ``ExpertChoice``.

    >>> routed = expert_choice_gating(jnp.array([[[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]]]), 1)
    >>> routed.token_GEC.tolist()
    [[[0], [2]]]
    """
    logits_GSE = logits_GSE.astype(jnp.float32)
    G, S, _ = logits_GSE.shape
    valid_GS = jnp.ones((G, S), bool) if valid_GS is None else valid_GS
    gates_GSE = jax.nn.softmax(logits_GSE, axis=-1) if gates == "softmax" else jax.nn.sigmoid(logits_GSE)
    # Gates are not negative, so the -1 of invalid tokens comes last.
    gates_GES = jnp.where(valid_GS[:, None, :], jnp.transpose(gates_GSE, (0, 2, 1)), -1.0)
    best_GEC, token_GEC = jax.lax.top_k(gates_GES, capacity)
    real_GEC = best_GEC >= 0
    token_GEC = jnp.where(real_GEC, token_GEC, S).astype(jnp.int32)
    weight_GEC = scale * jnp.where(real_GEC, best_GEC, 0.0)

    def chosen(token_EC: jax.Array) -> jax.Array:
        return jnp.zeros((S,), bool).at[token_EC].set(True, mode="drop", wrap_negative_indices=False)

    chosen_GS = jax.vmap(chosen)(token_GEC)
    tokens = jnp.maximum(jnp.sum(valid_GS), 1).astype(jnp.float32)
    dropped = jnp.sum(valid_GS & ~chosen_GS).astype(jnp.float32) / tokens
    kept = jnp.sum(real_GEC).astype(jnp.float32) / real_GEC.size
    load_E = jnp.sum(real_GEC, axis=(0, 2), dtype=jnp.int32)
    metrics = {"dropped_share": dropped, "kept_share": kept} | load_metrics(load_E)
    return ExpertChoice(token_GEC, weight_GEC, chosen_GS, load_E, jnp.float32(1.0), metrics)
