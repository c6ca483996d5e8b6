"""Gating against a sequential transcription of Algorithm 1, and what the paper promises of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.moe import top2_gating
from moe.oracle import algorithm_1
from sampled import crossed

# Small programs: compiling them costs more than running them.
FAST = {"xla_backend_optimization_level": 0}
gate = jax.jit(top2_gating, static_argnums=1, static_argnames=("routing", "second_expert"), compiler_options=FAST)

SIZES = [(1, 1, 2, 1), (3, 8, 2, 3), (2, 16, 4, 8), (2, 33, 8, 5), (4, 16, 16, 2), (1, 64, 5, 64)]


def random_case(seed, size, skew):
    """Logits of both signs, with a preference for some experts and some padding."""
    rng = np.random.default_rng(seed)
    G, S, E, _ = size
    logits = rng.normal(size=(G, S, E)) * rng.choice([0.5, 2.0, 20.0]) + skew * rng.normal(size=E)
    padding = rng.random((G, S)) < rng.choice([0.0, 0.3, 1.0], p=[0.5, 0.4, 0.1])
    return logits.astype(np.float32), ~padding


@pytest.mark.parametrize(
    "routing, second_expert, size", crossed(["paper", "lingvo"], ["random", "all"], SIZES, one_in=4)
)
@pytest.mark.one_in(2)
def test_equals_algorithm_1(routing, second_expert, size):
    G, S, E, capacity = size
    for seed in range(8):
        logits, valid = random_case(seed, size, skew=seed % 3)
        key = jax.random.key(seed)
        gating = gate(logits, capacity, routing=routing, second_expert=second_expert, key=key, valid_GS=valid)
        gating = jax.tree.map(np.asarray, gating)
        rnd = np.asarray(jax.random.uniform(key, (G, S))) if second_expert == "random" else -np.ones((G, S))
        expected_aux, tokens = 0.0, max(valid.sum(), 1)
        for g in range(G):
            expected = algorithm_1(logits[g], capacity, rnd[g], valid[g], routing)
            for k, choice in enumerate((gating.first, gating.second)):
                kept = np.asarray(choice.kept_GS[g])
                np.testing.assert_array_equal(kept, expected.kept[:, k])
                # What a token does not take means nothing.
                np.testing.assert_array_equal(choice.expert_GS[g][valid[g]], expected.expert[valid[g], k])
                np.testing.assert_array_equal(choice.position_GS[g][valid[g]], expected.position[valid[g], k])
                np.testing.assert_allclose(choice.weight_GS[g], expected.weight[:, k], rtol=1e-5, atol=1e-6)
            expected_aux += expected.aux * E**2 * valid[g].sum() / tokens
        np.testing.assert_allclose(gating.aux_loss, expected_aux, rtol=1e-5, atol=1e-6)
        sent = np.asarray(gating.first.kept_GS).astype(int) + np.asarray(gating.second.kept_GS)
        shares = [((sent == n) & valid).sum() / tokens for n in range(3)]
        names = ("dropped_share", "one_expert_share", "two_expert_share")
        np.testing.assert_allclose([gating.metrics[name] for name in names], shares, atol=1e-6)


def test_ties_go_to_the_first_expert():
    gating = gate(jnp.zeros((1, 4, 5)), 4)
    assert gating.first.expert_GS.tolist() == [[0] * 4]
    assert gating.second.expert_GS.tolist() == [[1] * 4]
    np.testing.assert_allclose(gating.first.weight_GS, 0.5)


@pytest.mark.parametrize("experts", [2, 8, pytest.param(64, marks=pytest.mark.slow)])
def test_aux_loss_is_one_when_balanced(experts):
    """Whatever the number of experts, and however much of the batch is padding."""
    logits = np.tile(np.eye(experts, dtype=np.float32), (2, 3, 1)) * 3
    for real in (3 * experts, experts):
        valid = np.tile(np.arange(3 * experts) < real, (2, 1))
        assert float(gate(jnp.asarray(logits), 6, valid_GS=valid).aux_loss) == pytest.approx(1.0, abs=1e-5)


def test_aux_loss_of_a_collapsed_router_is_the_number_of_experts():
    logits = jnp.zeros((2, 16, 8)).at[:, :, 3].set(30.0)
    gating = gate(logits, 16, second_expert="all")
    assert float(gating.aux_loss) == pytest.approx(8.0, abs=1e-4)
    assert float(gating.metrics["dead_experts"]) == 6
    assert float(gating.metrics["load_entropy"]) == pytest.approx(np.log(2) / np.log(8), abs=1e-5)


def test_gradient_of_the_aux_loss_balances():
    """It flows through mean gates to the router, and a step against it lowers the loss."""
    inputs = jax.random.normal(jax.random.key(0), (2, 64, 8))
    wg = jax.random.normal(jax.random.key(1), (8, 4))

    def aux(wg):
        return top2_gating(jnp.einsum("GSM,ME->GSE", inputs, wg), 32).aux_loss

    value_and_gradient = jax.jit(jax.value_and_grad(aux), compiler_options=FAST)
    before, gradient = value_and_gradient(wg)
    assert float(jnp.abs(gradient).max()) > 1e-3
    assert float(value_and_gradient(wg - 0.5 * gradient)[0]) < float(before)


def test_without_a_key_every_second_choice_that_fits_is_kept():
    logits = jax.random.normal(jax.random.key(0), (2, 16, 4)) * 5
    gating = gate(logits, 16)
    assert bool(gating.second.kept_GS.all())
    assert not bool(gate(logits, 16, key=jax.random.key(1)).second.kept_GS.all())


def test_gates_of_extreme_logits_are_finite():
    """The second gate underflows: its weight is 0, and nothing is divided by 0."""
    logits = jnp.array([[[1e4, -1e4, -2e4], [-1e4, 1e4, 0.0]]])
    weights, gradient = jax.jit(
        jax.value_and_grad(lambda x: jnp.sum(top2_gating(x, 2).first.weight_GS)), compiler_options=FAST
    )(logits)
    assert float(weights) == 2.0
    assert bool(jnp.isfinite(gradient).all())
