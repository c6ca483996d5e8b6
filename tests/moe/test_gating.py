"""Gating against transcriptions of the papers, one token after the other, and what the papers promise of it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.moe import top_k_gating
from moe import naive
from sampled import crossed

gate = jax.jit(top_k_gating, static_argnums=1, static_argnames="routing", compiler_options=naive.FAST)

SIZES = [(1, 1, 2, 1), (3, 8, 2, 3), (2, 16, 4, 8), (2, 33, 8, 5), (4, 16, 16, 2), (1, 64, 5, 64)]


def random_case(seed, size, skew):
    """Logits of both signs, with a preference for some experts and some padding."""
    rng = np.random.default_rng(seed)
    G, S, E, _ = size
    logits = rng.normal(size=(G, S, E)) * rng.choice([0.5, 2.0, 20.0]) + skew * rng.normal(size=E)
    padding = rng.random((G, S)) < rng.choice([0.0, 0.3, 1.0], p=[0.5, 0.4, 0.1])
    return logits.astype(np.float32), ~padding


@pytest.mark.parametrize("routing, has_coin, size", crossed(["paper", "lingvo"], [True, False], SIZES, one_in=4))
@pytest.mark.one_in(2)
def test_equals_algorithm_1(routing, has_coin, size):
    G, S, E, capacity = size
    for seed in range(8):
        logits, valid = random_case(seed, size, skew=seed % 3)
        key = jax.random.key(seed)
        gating = gate(logits, capacity, routing=routing, key=key if has_coin else None, valid_GS=valid)
        gating = jax.tree.map(np.asarray, gating)
        rnd = np.asarray(jax.random.uniform(key, (G, S))) if has_coin else -np.ones((G, S))
        expected_aux, tokens = 0.0, max(valid.sum(), 1)
        for g in range(G):
            expected = algorithm_1(logits[g], capacity, rnd[g], valid[g], routing)
            for k, choice in enumerate((gating.first, gating.choices[1])):
                kept = np.asarray(choice.kept_GS[g])
                np.testing.assert_array_equal(kept, expected.kept[:, k])
                # What a token does not take means nothing.
                np.testing.assert_array_equal(choice.expert_GS[g][valid[g]], expected.expert[valid[g], k])
                np.testing.assert_array_equal(choice.position_GS[g][valid[g]], expected.position[valid[g], k])
                np.testing.assert_allclose(choice.weight_GS[g], expected.weight[:, k], rtol=1e-5, atol=1e-6)
            expected_aux += expected.aux * E**2 * valid[g].sum() / tokens
        np.testing.assert_allclose(gating.aux_loss, expected_aux, rtol=1e-5, atol=1e-6)
        sent = np.asarray(gating.first.kept_GS).astype(int) + np.asarray(gating.choices[1].kept_GS)
        shares = ((sent == 0) & valid).sum() / tokens, (sent * valid).sum() / (2 * tokens)
        names = ("dropped_share", "kept_share")
        np.testing.assert_allclose([gating.metrics[name] for name in names], shares, atol=1e-6)


def test_routers_that_know_nothing_are_balanced_or_collapsed():
    ties = gate(jnp.zeros((1, 4, 5)), 4)
    assert ties.first.expert_GS.tolist() == [[0] * 4], "ties go to the first expert"
    assert ties.choices[1].expert_GS.tolist() == [[1] * 4]
    np.testing.assert_allclose(ties.first.weight_GS, 0.5)
    logits = np.tile(np.eye(8, dtype=np.float32), (2, 3, 1)) * 3
    for real in (24, 8):  # however much of the batch is padding
        valid = np.tile(np.arange(24) < real, (2, 1))
        assert float(gate(jnp.asarray(logits), 6, valid_GS=valid).aux_loss) == pytest.approx(1.0, abs=1e-5)
    collapsed = gate(jnp.zeros((2, 16, 8)).at[:, :, 3].set(30.0), 16)
    assert (float(collapsed.aux_loss), float(collapsed.metrics["dead_experts"])) == (pytest.approx(8.0, abs=1e-4), 6)
    assert float(collapsed.metrics["load_entropy"]) == pytest.approx(np.log(2) / np.log(8), abs=1e-5)


def test_gradient_of_the_aux_loss_balances():
    """It flows through mean gates to the router, and a step against it lowers the loss."""
    inputs = jax.random.normal(jax.random.key(0), (2, 64, 8))
    wg = jax.random.normal(jax.random.key(1), (8, 4))

    def aux(wg):
        return top_k_gating(jnp.einsum("GSM,ME->GSE", inputs, wg), 32).aux_loss

    value_and_gradient = jax.jit(jax.value_and_grad(aux), compiler_options=naive.FAST)
    before, gradient = value_and_gradient(wg)
    assert float(jnp.abs(gradient).max()) > 1e-3
    assert float(value_and_gradient(wg - 0.5 * gradient)[0]) < float(before)


def test_without_a_key_every_second_choice_that_fits_is_kept():
    logits = jax.random.normal(jax.random.key(0), (2, 16, 4)) * 5
    gating = gate(logits, 16)
    assert bool(gating.choices[1].kept_GS.all())
    assert not bool(gate(logits, 16, key=jax.random.key(1)).choices[1].kept_GS.all())


def test_gates_of_extreme_logits_are_finite():
    """The second gate underflows: its weight is 0, and nothing is divided by 0."""
    logits = jnp.array([[[1e4, -1e4, -2e4], [-1e4, 1e4, 0.0]]])
    weights, gradient = jax.jit(
        jax.value_and_grad(lambda x: jnp.sum(top_k_gating(x, 2).first.weight_GS)), compiler_options=naive.FAST
    )(logits)
    assert float(weights) == 2.0
    assert bool(jnp.isfinite(gradient).all())


OPTIONS = ("k", "routing", "gates", "normalise", "scale")
gate_k = jax.jit(top_k_gating, static_argnums=1, static_argnames=OPTIONS, compiler_options=naive.FAST)


@pytest.mark.parametrize(
    "sizes, gates, weights",
    crossed(
        [(1, 4, 3), (2, 5, 4), (3, 4, 16), (4, 4, 7), (6, 9, 5)],
        ["softmax", "sigmoid"],
        [(True, 1.0, False), (False, 2.5, True), (True, 0.5, True)],
        one_in=6,
    ),
)
def test_equals_a_loop_over_tokens(sizes, gates, weights):
    (k, E, capacity), (normalise, scale, biased) = sizes, weights
    for seed in range(3):
        G, S = 2, 16
        logits, valid = random_case(seed, (G, S, E, capacity), skew=seed % 3)
        bias_E = np.random.default_rng(seed).normal(size=E).astype(np.float32) * 0.3 if biased else None
        gating = gate_k(logits, capacity, k=k, routing="top_k", gates=gates, normalise=normalise, scale=scale,
            bias_E=bias_E, valid_GS=valid)  # fmt: skip
        aux, load_E, kept_number = 0.0, np.zeros(E, int), 0
        for g in range(G):
            choices = naive.routed(logits[g], k, gates, normalise, scale, bias_E)
            kept, position, taken_E = naive.with_capacity(choices, valid[g], E, capacity)
            for j in range(k):
                expert = np.array([chosen[j] for chosen, _ in choices])
                weight = np.array([weights[j] for _, weights in choices]) * kept[:, j]
                got = gating.choices[j]
                np.testing.assert_array_equal(np.asarray(got.expert_GS[g])[valid[g]], expert[valid[g]])
                np.testing.assert_array_equal(got.kept_GS[g], kept[:, j])
                np.testing.assert_array_equal(np.asarray(got.position_GS[g])[valid[g]], position[valid[g], j])
                np.testing.assert_allclose(got.weight_GS[g], weight, rtol=2e-5, atol=1e-6)
            np.testing.assert_array_equal(gating.slots_GE[g], taken_E)
            share_SE = naive.softmax(logits[g]) if gates == "softmax" else naive.sigmoid(logits[g])
            share_SE = share_SE / share_SE.sum(-1, keepdims=True)
            tokens = max(valid[g].sum(), 1)
            mean_E = share_SE[valid[g]].sum(0) / tokens
            aux += E * np.sum(taken_E / k / tokens * mean_E) * valid[g].sum() / max(valid.sum(), 1)
            load_E += taken_E
            kept_number += kept.sum()
        np.testing.assert_allclose(gating.aux_loss, aux, rtol=1e-5)
        np.testing.assert_array_equal(gating.load_E, load_E)
        np.testing.assert_allclose(gating.metrics["kept_share"], kept_number / max(k * valid.sum(), 1), rtol=1e-6)


def test_a_bias_decides_who_and_not_how_much():
    logits = jnp.array([[[0.0, 1.0, -1.0]]])
    plain, biased = (
        gate_k(logits, 1, k=2, routing="top_k", gates="sigmoid", normalise=False, bias_E=np.array([0.0, 0.0, bias]))
        for bias in (0.0, 9.0)
    )
    assert [int(c.expert_GS[0, 0]) for c in plain.choices] == [1, 0]
    assert [int(c.expert_GS[0, 0]) for c in biased.choices] == [2, 1]
    np.testing.assert_allclose(biased.first.weight_GS, jax.nn.sigmoid(-1.0), rtol=1e-6)

    def weight(bias_E):
        routed = top_k_gating(logits, 1, k=2, routing="top_k", gates="sigmoid", bias_E=bias_E)
        return sum(c.weight_GS.sum() * (i + 1) for i, c in enumerate(routed.choices)) + routed.aux_loss

    gradient = jax.jit(jax.grad(weight), compiler_options=naive.FAST)
    np.testing.assert_array_equal(gradient(np.array([0.1, 0.0, 0.2])), np.zeros(3))


def algorithm_1(logits_SE, capacity, rnd_S, valid_S, routing):
    """Routes one group: each choice as [S, 2] arrays; weights are 0 where a choice is not kept.

    ``rnd_S`` holds the uniform numbers of line 17; -1 makes every coin say yes. Tokens that are not valid are skipped.
    ``lingvo`` skips line 22 where the coin said no.
    """
    logits_SE = np.asarray(logits_SE, np.float32)
    S, E = logits_SE.shape
    c_E = np.zeros(E, int)  # line 1
    exp_SE = np.exp(logits_SE - logits_SE.max(-1, keepdims=True))
    g_SE = exp_SE / exp_SE.sum(-1, keepdims=True)  # line 2
    tokens = max(valid_S.sum(), 1)
    m_E = g_SE[valid_S].sum(0) / tokens  # line 3
    expert, position, kept, weight = (np.zeros((S, 2), kind) for kind in (int, int, bool, float))

    def top_2(s):
        order = np.argsort(-logits_SE[s], kind="stable")
        e1, e2 = order[0], order[1]
        return g_SE[s, e1], e1, g_SE[s, e2], e2

    for s in range(S):  # line 4
        if not valid_S[s]:
            continue
        g1, e1, g2, e2 = top_2(s)  # line 5
        g1 = g1 / (g1 + g2)  # line 6
        c = c_E[e1]  # line 7
        if c < capacity:  # line 8
            kept[s, 0], weight[s, 0] = True, g1  # line 9
        expert[s, 0], position[s, 0] = e1, c
        c_E[e1] = c + 1  # line 11
    aux = float(np.mean(c_E / tokens * m_E))  # line 13, to the letter: 1/E^2 when balanced
    for s in range(S):  # line 14
        if not valid_S[s]:
            continue
        g1, e1, g2, e2 = top_2(s)  # line 15
        g2 = g2 / (g1 + g2)  # line 16
        rnd = rnd_S[s]  # line 17
        c = c_E[e2]  # line 18
        if c < capacity and 2 * g2 > rnd:  # line 19
            kept[s, 1], weight[s, 1] = True, g2  # line 20
        expert[s, 1], position[s, 1] = e2, c
        if routing == "paper" or 2 * g2 > rnd:
            c_E[e2] = c + 1  # line 22
    return SimpleNamespace(expert=expert, position=position, kept=kept, weight=weight, aux=aux)
