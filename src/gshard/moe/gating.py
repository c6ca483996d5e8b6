"""Gating: chooses the experts of each token, their slots and weights (Algorithm 1)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The least sum that gates are divided by: the square, which the gradient divides by, is a normal float32 too.
_LEAST = 1e-18


class Choice(NamedTuple):
    """The first, second or a later choice of each token.

    Attributes:
        expert_GS: int32, the chosen expert.
        position_GS: int32, its slot in that expert's buffer, counted over the group; it may exceed the capacity.
        kept_GS: bool, whether the token is sent there. No two kept choices have the same expert and position.
        weight_GS: float32, the combine weight; 0 where not kept.
    """

    expert_GS: jax.Array
    position_GS: jax.Array
    kept_GS: jax.Array
    weight_GS: jax.Array


class Gating(NamedTuple):
    """The result of routing, which all dispatches take.

    Attributes:
        choices: the k choices of each token, the best first.
        slots_GE: int32, the slots that choices of each expert would take without a capacity, burnt ones included.
        load_E: int32, the tokens that chose each expert.
        aux_loss: float32 scalar, 1.0 when balanced (see ``top_k_gating``).
        metrics: float32 scalars: ``dropped_share`` of the valid tokens reach no expert, ``kept_share`` of all choices
            are kept; ``load_entropy`` of the load of experts (1.0 if it is even, 0.0 for a single expert);
            ``dead_experts`` that no token chose.
    """

    choices: tuple[Choice, ...]
    slots_GE: jax.Array
    load_E: jax.Array
    aux_loss: jax.Array
    metrics: dict[str, jax.Array]

    @property
    def first(self) -> Choice:
        """The best expert of each token."""
        return self.choices[0]


def top_k_gating(
    logits_GSE: jax.Array,
    capacity: int,
    *,
    k: int = 2,
    routing: str = "paper",
    gates: str = "softmax",
    normalise: bool = True,
    scale: float = 1.0,
    bias_E: jax.Array | None = None,
    key: jax.Array | None = None,
    valid_GS: jax.Array | None = None,
) -> Gating:
    """Routes each token to at most k experts.

    ``paper`` is Algorithm 1 for all groups at once: gates g1 and g2 are divided by g1+g2 (lines 6 and 16) before
    capacity and coin, and not again after a drop. The coin keeps a second choice if 2*g2 > rnd (line 19). A second
    choice that it rejects uses up a slot with ``paper`` (line 22), and none with ``lingvo``. With ``top_k`` there is no
    coin. Of equal logits the first expert is chosen.

    The auxiliary loss is E * sum_e (c_e/S)(m_e), the mean over groups weighted by their tokens: 1.0 when
    all experts get the same, whatever E. Line 13 has 1/E in place of E, so the paper's value is 1/E^2 of
    this one (and its k is E^2 times our weight). c_e counts choices before the capacity cut, the first ones only or,
    with ``top_k``, all of them divided by k, and carries no gradient; m_e, the mean gate, does. Gates of a sigmoid are
    divided by their sum over experts there.

    Departure from the paper: tokens that are not valid (padding) take no slot, are not sent, and count in no mean.

    Args:
        logits_GSE: router logits of any floating dtype; the function computes in float32.
        capacity: C, slots of each expert and group.
        k: experts of a token; 2 unless ``routing`` is ``top_k``.
        routing: ``paper``, ``lingvo`` or ``top_k``.
        gates: ``softmax`` or ``sigmoid``.
        normalise: whether weights are divided by their sum over the k chosen experts.
        scale: a factor of the weights.
        bias_E: added to the gates for the choice of experts, and not for the weights (Wang et al. 2024,
            "Auxiliary-Loss-Free Load Balancing"). It has no gradient.
        key: key of the coins; None keeps every second choice that fits.
        valid_GS: bool; None means that all tokens are.

    Returns:
        a ``Gating``.

    >>> gating = top_k_gating(jnp.array([[[2.0, 1.0, 0.0, 1.5]]]), 1, k=3, routing="top_k", gates="sigmoid")
    >>> [choice.expert_GS.tolist() for choice in gating.choices]
    [[[0]], [[3]], [[1]]]
    """
    logits_GSE = logits_GSE.astype(jnp.float32)
    G, S, _ = logits_GSE.shape
    valid_GS = jnp.ones((G, S), bool) if valid_GS is None else valid_GS
    gates_GSE = jax.nn.softmax(logits_GSE, axis=-1) if gates == "softmax" else jax.nn.sigmoid(logits_GSE)

    # Logits have the order of the gates, and differ where gates underflow to equal zeros.
    ranked_GSE = logits_GSE if bias_E is None else jax.lax.stop_gradient(gates_GSE + bias_E)
    experts_GS, chosen_GSE = _largest(ranked_GSE, k)
    gates_GS = [jnp.sum(jnp.where(mask_GSE, gates_GSE, 0.0), axis=-1) for mask_GSE in chosen_GSE]
    if normalise:
        sum_GS = functools.reduce(operator.add, gates_GS)
        # Gates of a softmax never vanish together.
        sum_GS = sum_GS if gates == "softmax" else jnp.maximum(sum_GS, _LEAST)
        gates_GS = [gate_GS / sum_GS for gate_GS in gates_GS]

    wanted_GS = [valid_GS] * k
    if routing != "top_k" and key is not None:
        wanted_GS[1] = valid_GS & (2.0 * gates_GS[1] > jax.random.uniform(key, (G, S), jnp.float32))
    counted_GS = wanted_GS if routing == "lingvo" else [valid_GS] * k
    pairs = zip(chosen_GSE, counted_GS, strict=True)
    slots_GSE = [(mask_GSE & taken_GS[:, :, None]).astype(jnp.int32) for mask_GSE, taken_GS in pairs]

    # Later choices follow all earlier ones, also those that overflow: beyond C there is no slot.
    slots_GE = first_GE = jnp.sum(slots_GSE[0], axis=1)
    load_E = jnp.sum(first_GE, axis=0)
    choices = []
    for number, mask_GSE in enumerate(chosen_GSE):
        before_GSE = jnp.cumsum(slots_GSE[number], axis=1) - slots_GSE[number]
        if number:
            before_GSE = before_GSE + slots_GE[:, None, :]
            slots_GE = slots_GE + jnp.sum(slots_GSE[number], axis=1)
            load_E = load_E + jnp.sum(mask_GSE & wanted_GS[number][:, :, None], axis=(0, 1), dtype=jnp.int32)
        position_GS = jnp.sum(jnp.where(mask_GSE, before_GSE, 0), axis=-1)
        kept_GS = wanted_GS[number] & (position_GS < capacity)
        weight_GS = jnp.where(kept_GS, gates_GS[number] if scale == 1.0 else scale * gates_GS[number], 0.0)
        choices.append(Choice(experts_GS[number], position_GS, kept_GS, weight_GS))

    counts_GE = first_GE.astype(jnp.float32) if routing != "top_k" else slots_GE.astype(jnp.float32) / k
    shares_GSE = gates_GSE
    if gates == "sigmoid":
        shares_GSE = gates_GSE / jnp.maximum(jnp.sum(gates_GSE, axis=-1, keepdims=True), _LEAST)
    metrics = _shares(choices, valid_GS) | load_metrics(load_E)
    return Gating(tuple(choices), slots_GE, load_E, _aux_loss(shares_GSE, counts_GE, valid_GS), metrics)


def _largest(ranked_GSE: jax.Array, k: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """The k experts with the largest numbers, and each as a mask over the experts. Of equal ones the first wins."""
    experts_GS: list[jax.Array] = []
    chosen_GSE: list[jax.Array] = []
    for _ in range(k):
        if chosen_GSE:
            ranked_GSE = jnp.where(chosen_GSE[-1], -jnp.inf, ranked_GSE)
        experts_GS.append(jnp.argmax(ranked_GSE, axis=-1).astype(jnp.int32))
        chosen_GSE.append(experts_GS[-1][:, :, None] == jnp.arange(ranked_GSE.shape[2], dtype=jnp.int32))
    return experts_GS, chosen_GSE


def keep(gating: Gating, kept: list[jax.Array], valid_GS: jax.Array | None) -> Gating:
    """The gating with some choices dropped, in its weights and its metrics too.

    Args:
        gating: the outcome of routing.
        kept: bool [G, S] for each choice, whether it is kept if it was.
        valid_GS: bool; None means that all tokens are.
    """
    choices = tuple(
        choice._replace(kept_GS=choice.kept_GS & kept_GS, weight_GS=jnp.where(kept_GS, choice.weight_GS, 0.0))
        for choice, kept_GS in zip(gating.choices, kept, strict=True)
    )
    valid_GS = jnp.ones(kept[0].shape, bool) if valid_GS is None else valid_GS
    shares = _shares(choices, valid_GS)
    return gating._replace(choices=choices, metrics=gating.metrics | shares)


def _aux_loss(gates_GSE: jax.Array, counts_GE: jax.Array, valid_GS: jax.Array) -> jax.Array:
    """E * sum_e (c_e/n)(m_e) of each group of n valid tokens, averaged over tokens.

    With m_e = (sum of gates)/n and groups weighted by n, one n cancels: sum_g sum_e c_e (sum of gates) / n,
    divided by all tokens. An empty group adds 0.
    """
    E = gates_GSE.shape[-1]
    tokens_G = jnp.sum(valid_GS, axis=1).astype(jnp.float32)
    gates_GE = jnp.sum(jnp.where(valid_GS[:, :, None], gates_GSE, 0.0), axis=1)
    of_group_G = jnp.sum(counts_GE * gates_GE, axis=-1) / jnp.maximum(tokens_G, 1.0)
    return E * jnp.sum(of_group_G) / jnp.maximum(jnp.sum(tokens_G), 1.0)


def _shares(choices: Sequence[Choice], valid_GS: jax.Array) -> dict[str, jax.Array]:
    """How many of the valid tokens reach no expert, and how many of all their choices are kept."""
    kept = [choice.kept_GS for choice in choices]
    tokens = jnp.maximum(jnp.sum(valid_GS), 1).astype(jnp.float32)
    none = jnp.sum(valid_GS & ~functools.reduce(operator.or_, kept)).astype(jnp.float32)
    sent = functools.reduce(operator.add, map(jnp.sum, kept)).astype(jnp.float32)
    return {"dropped_share": none / tokens, "kept_share": sent / (len(kept) * tokens)}


def load_metrics(load_E: jax.Array) -> dict[str, jax.Array]:
    """How even the load is: its entropy, 1.0 if all experts have the same, and how many have none.

    >>> {name: float(value) for name, value in load_metrics(jnp.array([3, 3])).items()}
    {'load_entropy': 1.0, 'dead_experts': 0.0}
    """
    share_E = load_E.astype(jnp.float32) / jnp.maximum(jnp.sum(load_E), 1).astype(jnp.float32)
    entropy = -jnp.sum(jnp.where(share_E > 0, share_E * jnp.log(jnp.maximum(share_E, 1e-30)), 0.0))
    return {
        "load_entropy": entropy / jnp.log(jnp.float32(load_E.shape[0])),
        "dead_experts": jnp.sum(load_E == 0).astype(jnp.float32),
    }


# Balance without a loss: a bias of each expert moves against its load (Wang et al. 2024, DeepSeek-V3).


def balanced(params: dict[str, Any], load: dict[str, jax.Array], rate: float = 1e-3) -> dict[str, Any]:
    """The parameters, with a lower bias for each expert whose load is above the mean, and a higher one below it.

    Args:
        params: see ``param_specs``; of a model with ``balance="bias"``.
        load: ``metrics["load"]`` of ``loss`` or ``forward``: for ``encoder`` and ``decoder`` int32 [layers, E].
        rate: the size of the change. If a load is exactly the mean of its layer, its bias stays.

    Returns:
        the same tree; arrays that are no bias are the same objects.

    >>> layer = {"blocks": {"sparse": {"experts": {"bias": jnp.zeros((1, 3))}}}}
    >>> moved = balanced({"decoder": layer}, {"decoder": jnp.array([[5, 3, 1]])}, rate=0.5)
    >>> moved["decoder"]["blocks"]["sparse"]["experts"]["bias"].tolist()
    [[-0.5, 0.0, 0.5]]
    """
    moved = dict(params)
    for half, load_XE in load.items():
        blocks = params[half]["blocks"]
        experts = blocks["sparse"]["experts"]
        bias_XE = experts["bias"] - rate * _above_mean(load_XE).astype(experts["bias"].dtype)
        sparse = {**blocks["sparse"], "experts": {**experts, "bias": bias_XE}}
        moved[half] = {**params[half], "blocks": {**blocks, "sparse": sparse}}
    return moved


def _above_mean(load_XE: jax.Array) -> jax.Array:
    """1 where a load is above the mean of its layer, -1 where it is below, 0 where it is the mean, in integers."""
    all_X1, E = jnp.sum(load_XE, axis=-1, keepdims=True), load_XE.shape[-1]
    is_mean_XE = (load_XE == all_X1 // E) & (all_X1 % E == 0)
    return jnp.where(is_mean_XE, 0, jnp.where(load_XE > all_X1 // E, 1, -1))
