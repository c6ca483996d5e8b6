"""Gating: which two experts a token goes to, in which slots, with which weights (Algorithm 1).

Routing is decided within a group of S tokens, so groups (the dimension that is split over devices)
never look at each other. All first choices take their slots before any second choice does; a choice
that finds its expert full is dropped.

    gating = top2_gating(logits_GSE, capacity=4)
    gating.first.expert_GS, gating.first.position_GS, gating.first.weight_GS

Everything is a cumulative sum over S and comparisons with an iota over E: no sorting and no indexing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Choice(NamedTuple):
    """What became of each token's first, or second, choice.

    Attributes:
        expert_GS: int32, the chosen expert.
        position_GS: int32, its slot in that expert's buffer, counted over the group; it may be past the capacity.
        kept_GS: bool, whether the token is sent there. Two kept choices never share expert and position.
        weight_GS: float32, the combine weight; 0 where not kept.
    """

    expert_GS: jax.Array
    position_GS: jax.Array
    kept_GS: jax.Array
    weight_GS: jax.Array


class Gating(NamedTuple):
    """The outcome of routing, in the form both dispatches start from.

    Attributes:
        first, second: the two choices of each token.
        slots_GE: int32, slots asked of each expert before the capacity cut, burnt ones included.
        aux_loss: float32 scalar, 1.0 when balanced (see ``top2_gating``).
        metrics: float32 scalars: ``dropped_share``, ``one_expert_share`` and ``two_expert_share`` of the valid
            tokens reach 0, 1 and 2 experts; ``load_entropy`` of what is asked of the experts (1.0 is even, 0.0 is
            a single expert); ``dead_experts`` that no token asked for.
    """

    first: Choice
    second: Choice
    slots_GE: jax.Array
    aux_loss: jax.Array
    metrics: dict[str, jax.Array]


def top2_gating(
    logits_GSE: jax.Array,
    capacity: int,
    *,
    routing: str = "paper",
    second_expert: str = "random",
    key: jax.Array | None = None,
    valid_GS: jax.Array | None = None,
) -> Gating:
    """Routes each token to at most two experts (Algorithm 1, all groups at once).

    Gates g1 and g2 are divided by g1+g2 (lines 6 and 16) before capacity and coin, and not again after
    a drop. The coin keeps a second choice if 2*g2 > rnd (line 19). ``routing`` says whether one that it
    rejects has used up a slot: ``paper``, line 22, it has; ``lingvo``, it has not. Of equal logits the
    first expert wins.

    The auxiliary loss is E * sum_e (c_e/S)(m_e), the mean over groups weighted by their tokens: 1.0 when
    all experts get the same, whatever E. Line 13 has 1/E in place of E, so the paper's value is 1/E^2 of
    this one (and its k is E^2 times our weight). c_e counts first choices before the capacity cut and
    carries no gradient; m_e, the mean gate, does.

    Departure: tokens that are not valid (padding) take no slot, are sent nowhere and count in no mean.

    Args:
        logits_GSE: router logits; float32 is computed with whatever the dtype.
        capacity: C, slots of each expert and group.
        routing: ``paper`` or ``lingvo``.
        second_expert: ``random`` or ``all``, which throws no coin.
        key: key of the coins; None keeps every second choice that fits.
        valid_GS: bool; None means that all tokens are.

    Returns:
        a ``Gating``.

    >>> logits = jnp.array([[[2.0, 1.0, 0.0], [3.0, 0.0, 1.0]]])
    >>> gating = top2_gating(logits, capacity=1)
    >>> gating.first.expert_GS.tolist(), gating.first.kept_GS.tolist()
    ([[0, 0]], [[True, False]])
    >>> gating.second.expert_GS.tolist(), gating.second.kept_GS.tolist()
    ([[1, 2]], [[True, True]])
    """
    logits_GSE = logits_GSE.astype(jnp.float32)
    G, S, E = logits_GSE.shape
    valid_GS = jnp.ones((G, S), bool) if valid_GS is None else valid_GS
    gates_GSE = jax.nn.softmax(logits_GSE, axis=-1)

    # Chosen by logits, whose order gates share except where they underflow to equal zeros.
    expert_1_GS, chosen_1_GSE = _best(logits_GSE)
    expert_2_GS, chosen_2_GSE = _best(jnp.where(chosen_1_GSE, -jnp.inf, logits_GSE))
    gate_1_GS = jnp.sum(jnp.where(chosen_1_GSE, gates_GSE, 0.0), axis=-1)
    gate_2_GS = jnp.sum(jnp.where(chosen_2_GSE, gates_GSE, 0.0), axis=-1)
    both_GS = gate_1_GS + gate_2_GS
    gate_1_GS, gate_2_GS = gate_1_GS / both_GS, gate_2_GS / both_GS

    wanted_GS = valid_GS
    if second_expert == "random" and key is not None:
        wanted_GS = valid_GS & (2.0 * gate_2_GS > jax.random.uniform(key, (G, S), jnp.float32))
    slots_1_GSE = (chosen_1_GSE & valid_GS[:, :, None]).astype(jnp.int32)
    counted_2_GS = valid_GS if routing == "paper" else wanted_GS
    slots_2_GSE = (chosen_2_GSE & counted_2_GS[:, :, None]).astype(jnp.int32)

    # Second choices queue up behind all first ones, the overflowed included: past C nothing fits anyway.
    first_GE = jnp.sum(slots_1_GSE, axis=1)
    before_1_GSE = jnp.cumsum(slots_1_GSE, axis=1) - slots_1_GSE
    before_2_GSE = jnp.cumsum(slots_2_GSE, axis=1) - slots_2_GSE + first_GE[:, None, :]
    position_1_GS = jnp.sum(jnp.where(chosen_1_GSE, before_1_GSE, 0), axis=-1)
    position_2_GS = jnp.sum(jnp.where(chosen_2_GSE, before_2_GSE, 0), axis=-1)
    kept_1_GS = valid_GS & (position_1_GS < capacity)
    kept_2_GS = wanted_GS & (position_2_GS < capacity)

    slots_GE = first_GE + jnp.sum(slots_2_GSE, axis=1)
    asked_E = jnp.sum(first_GE, axis=0) + jnp.sum(chosen_2_GSE & wanted_GS[:, :, None], axis=(0, 1), dtype=jnp.int32)
    return Gating(
        Choice(expert_1_GS, position_1_GS, kept_1_GS, jnp.where(kept_1_GS, gate_1_GS, 0.0)),
        Choice(expert_2_GS, position_2_GS, kept_2_GS, jnp.where(kept_2_GS, gate_2_GS, 0.0)),
        slots_GE,
        _aux_loss(gates_GSE, first_GE, valid_GS),
        _metrics(kept_1_GS, kept_2_GS, valid_GS, asked_E),
    )


def _best(logits_GSE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first of the largest, as an index and as a mask over E."""
    expert_GS = jnp.argmax(logits_GSE, axis=-1).astype(jnp.int32)
    return expert_GS, expert_GS[:, :, None] == jnp.arange(logits_GSE.shape[-1], dtype=jnp.int32)


def _aux_loss(gates_GSE: jax.Array, first_GE: jax.Array, valid_GS: jax.Array) -> jax.Array:
    """E * sum_e (c_e/n)(m_e) of each group of n valid tokens, averaged over tokens.

    With m_e = (sum of gates)/n and groups weighted by n, one n cancels: sum_g sum_e c_e (sum of gates) / n,
    divided by all tokens. An empty group adds 0.
    """
    E = gates_GSE.shape[-1]
    tokens_G = jnp.sum(valid_GS, axis=1).astype(jnp.float32)
    gates_GE = jnp.sum(jnp.where(valid_GS[:, :, None], gates_GSE, 0.0), axis=1)
    of_group_G = jnp.sum(first_GE.astype(jnp.float32) * gates_GE, axis=-1) / jnp.maximum(tokens_G, 1.0)
    return E * jnp.sum(of_group_G) / jnp.maximum(jnp.sum(tokens_G), 1.0)


def _metrics(
    kept_1_GS: jax.Array, kept_2_GS: jax.Array, valid_GS: jax.Array, asked_E: jax.Array
) -> dict[str, jax.Array]:
    tokens = jnp.maximum(jnp.sum(valid_GS), 1).astype(jnp.float32)
    both = jnp.sum(kept_1_GS & kept_2_GS).astype(jnp.float32) / tokens
    any_ = jnp.sum(kept_1_GS | kept_2_GS).astype(jnp.float32) / tokens
    none = jnp.sum(valid_GS & ~kept_1_GS & ~kept_2_GS).astype(jnp.float32) / tokens
    load_E = asked_E.astype(jnp.float32) / jnp.maximum(jnp.sum(asked_E), 1).astype(jnp.float32)
    entropy = -jnp.sum(jnp.where(load_E > 0, load_E * jnp.log(jnp.maximum(load_E, 1e-30)), 0.0))
    return {
        "dropped_share": none,
        "one_expert_share": any_ - both,
        "two_expert_share": both,
        "load_entropy": entropy / jnp.log(jnp.float32(asked_E.shape[0])),
        "dead_experts": jnp.sum(asked_E == 0).astype(jnp.float32),
    }
