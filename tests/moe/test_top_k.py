"""Any number of experts: gates of both kinds, capacities, biases, and the default bit for bit as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.moe import top_k_gating
from moe import naive
from sampled import crossed

# Small programs: compiling them costs more than running them.
FAST = {"xla_backend_optimization_level": 0}
OPTIONS = ("k", "routing", "second_expert", "gates", "normalise", "scale")
gate = jax.jit(top_k_gating, static_argnums=1, static_argnames=OPTIONS, compiler_options=FAST)


def case(seed, G, S, E):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(G, S, E)) * rng.choice([0.5, 3.0]) + seed % 3 * rng.normal(size=E)
    return logits.astype(np.float32), rng.random((G, S)) < 0.8


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
        logits, valid = case(seed, G, S, E)
        bias_E = np.random.default_rng(seed).normal(size=E).astype(np.float32) * 0.3 if biased else None
        gating = gate(logits, capacity, k=k, routing="top_k", gates=gates, normalise=normalise, scale=scale,
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
        np.testing.assert_allclose(gating.metrics["kept_share"], kept_number / (k * valid.sum()), rtol=1e-6)


@pytest.mark.parametrize("gates", ["softmax", "sigmoid"])
def test_balanced_is_one_whatever_k(gates):
    for k in (1, 2, 4):
        logits = np.stack([np.roll(np.arange(8) < k, i) for i in range(8)])[None] * 4.0
        got = gate(jnp.asarray(logits, jnp.float32), 8, k=k, routing="top_k", gates=gates, normalise=k > 1)
        assert float(got.aux_loss) == pytest.approx(1.0, abs=1e-5)
        assert float(got.metrics["load_entropy"]) == pytest.approx(1.0, abs=1e-6)


def test_a_bias_decides_who_and_not_how_much():
    logits = jnp.array([[[0.0, 1.0, -1.0]]])
    plain, biased = (
        gate(logits, 1, k=2, routing="top_k", gates="sigmoid", normalise=False, bias_E=np.array([0.0, 0.0, bias]))
        for bias in (0.0, 9.0)
    )
    assert [int(c.expert_GS[0, 0]) for c in plain.choices] == [1, 0]
    assert [int(c.expert_GS[0, 0]) for c in biased.choices] == [2, 1]
    np.testing.assert_allclose(biased.first.weight_GS, jax.nn.sigmoid(-1.0), rtol=1e-6)

    def weight(bias_E):
        routed = top_k_gating(logits, 1, k=2, routing="top_k", gates="sigmoid", bias_E=bias_E)
        return sum(c.weight_GS.sum() * (i + 1) for i, c in enumerate(routed.choices)) + routed.aux_loss

    gradient = jax.jit(jax.grad(weight), compiler_options=FAST)
    np.testing.assert_array_equal(gradient(np.array([0.1, 0.0, 0.2])), np.zeros(3))


def test_sigmoids_that_vanish_together_are_finite():
    def weights(logits):
        return sum(c.weight_GS.sum() for c in top_k_gating(logits, 1, k=2, routing="top_k", gates="sigmoid").choices)

    value, gradient = jax.jit(jax.value_and_grad(weights), compiler_options=FAST)(jnp.full((1, 1, 4), -300.0))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
