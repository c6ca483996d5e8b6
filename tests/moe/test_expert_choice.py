"""Experts that choose their tokens, against a loop over experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.moe import TransformerConfig, encode, expert_layer, expert_specs, forward, param_specs
from moe import naive

CONFIG = TransformerConfig(20, 18, model_dim=8, hidden_dim=10, heads=2, head_dim=4, encoder_layers=2, decoder_layers=2,
    experts=4, group_size=8, capacity_factor=1.5, routing="expert_choice", decoder_routing="top_k")  # fmt: skip
layer = jax.jit(expert_layer, static_argnums=0, compiler_options=naive.FAST)


def case(seed=0):
    x_BLM = naive.normal(seed + 1, 4, 6, CONFIG.model_dim)
    valid_BL = naive.normal(seed + 2, 4, 6) > -0.5
    return naive.values(expert_specs(CONFIG), seed), x_BLM, valid_BL


def by_hand(params, x_SM, valid_S, capacity):
    params = naive.float64(params)
    gates_SE = naive.softmax(x_SM @ params["wg"])
    out, chosen = np.zeros_like(x_SM), np.zeros(len(x_SM), bool)
    for e in range(gates_SE.shape[1]):
        order = [s for s in np.argsort(-gates_SE[:, e], kind="stable") if valid_S[s]][:capacity]
        for s in order:
            own = {name: params[name][e] for name in ("wi", "wo")}
            out[s] += gates_SE[s, e] * naive.feed_forward(own, x_SM[s], "relu")
            chosen[s] = True
    return out, chosen


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
def test_equals_a_loop_over_experts(dispatch):
    for seed in range(3):
        params, x_BLM, valid_BL = case(seed)
        got, metrics = layer(dataclasses.replace(CONFIG, dispatch=dispatch), params, x_BLM, valid_BL)
        groups = np.asarray(x_BLM, np.float64).reshape(-1, 8, 8)
        valid = np.asarray(valid_BL).reshape(-1, 8)
        pairs = [by_hand(params, x, v, 3) for x, v in zip(groups, valid, strict=True)]
        np.testing.assert_allclose(np.asarray(got).reshape(-1, 8, 8), [out for out, _ in pairs], rtol=1e-4, atol=1e-5)
        chosen = np.array([of_group for _, of_group in pairs])
        assert float(metrics["dropped_share"]) == pytest.approx((valid & ~chosen).sum() / valid.sum(), abs=1e-6)
        assert not chosen[~valid].any()
        assert float(metrics["aux_loss"]) == 1.0
        assert float(metrics["load_entropy"]) == pytest.approx(1.0, abs=1e-6), "every expert has the same load"


def test_a_model_whose_encoder_chooses():
    """The decoder routes by token and sees nothing later; encoding knows of its groups alone."""
    params = naive.values(param_specs(CONFIG))
    source, target = jnp.asarray(naive.ids(1, 20, 4, 8)), jnp.asarray(naive.ids(2, 18, 4, 6))
    run = jax.jit(forward, static_argnums=0, compiler_options=naive.FAST)
    roomy = dataclasses.replace(CONFIG, dispatch="gather", capacity_factor=4.0)
    logits, metrics = run(roomy, params, source, target)
    changed, _ = run(roomy, params, source, target.at[:, 5].set(2))
    np.testing.assert_allclose(changed[:, :5], logits[:, :5], rtol=1e-5, atol=1e-5)
    assert {"aux_loss", "dropped_share", "kept_share"} <= set(metrics)
    memory = jax.eval_shape(lambda params, source: encode(CONFIG, params, source), params, source)
    assert memory.shape == (4, 8, 8)
