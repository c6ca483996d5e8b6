"""Decoders alone: against a plain program in numpy, step by step, in parts, and on eight devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.moe import ModelError, TransformerConfig, decode_step, forward, init_cache, loss, param_specs
from moe import naive

FAST = {"xla_backend_optimization_level": 0}
PLAIN = TransformerConfig.decoder_only(20, 2, model_dim=12, hidden_dim=14, heads=4, kv_heads=2, head_dim=6)
MIXTRAL = dataclasses.replace(PLAIN, experts=4, top_k=2, capacity_factor=math.inf, group_size=None)
DEEPSEEK = dataclasses.replace(MIXTRAL, decoder_layers=4, experts=6, top_k=3, shared_experts=2, dense_first=1,
    dense_hidden_dim=20, gates="sigmoid", gate_scale=2.5, balance="bias", kv_heads=None, rotary_base=100.0)  # fmt: skip
THIRDS = dataclasses.replace(MIXTRAL, decoder_layers=6, experts_every=3, tied_softmax=True, kv_heads=1)
MODELS = {"dense": PLAIN, "mixtral": MIXTRAL, "deepseek": DEEPSEEK, "thirds": THIRDS}


def models(*fast):
    """A test of all models; those that are not named here are slow."""
    cases = [pytest.param(c, id=name, marks=() if name in fast else pytest.mark.slow) for name, c in MODELS.items()]
    return pytest.mark.parametrize("config", cases)


run = jax.jit(forward, static_argnums=0, compiler_options=FAST)
run_loss = jax.jit(loss, static_argnums=0, static_argnames="label_smoothing", compiler_options=FAST)
step = jax.jit(decode_step, static_argnums=0, static_argnames="dropless", compiler_options=FAST)


def case(config, rows=3, length=7):
    params = naive.values(param_specs(config))
    if config.balance == "bias":  # not what it starts with
        experts = params["decoder"]["blocks"]["sparse"]["experts"]
        experts["bias"] = 0.2 * naive.normal(4, *experts["bias"].shape)
    return params, jnp.asarray(naive.ids(1, 20, rows, length)).at[:, 0].set(0)


@models("dense", "deepseek", "thirds")
def test_equals_a_plain_program(config):
    params, ids_BL = case(config)
    logits_BLV, _ = run(config, params, None, ids_BL)
    expected = [naive.decoder(config, params, np.asarray(ids_L)) for ids_L in ids_BL]
    np.testing.assert_allclose(logits_BLV, expected, rtol=2e-4, atol=2e-4)


@models("deepseek", "thirds")
def test_step_by_step_equals_forward(config):
    params, ids_BL = case(config)
    expected, _ = run(config, params, None, ids_BL)
    cache = init_cache(config, 3, 9)
    assert jax.tree.leaves(cache)[0].shape[3] == (config.kv_heads or config.heads)
    for position in range(ids_BL.shape[1]):
        logits_BV, cache = step(config, params, cache, ids_BL[:, position], jnp.int32(position))
        np.testing.assert_allclose(logits_BV, expected[:, position], rtol=2e-4, atol=2e-4)


@models("deepseek")
def test_no_position_sees_a_later_one(config):
    params, ids_BL = case(config)
    logits_BLV, _ = run(config, params, None, ids_BL)
    changed_BLV, _ = run(config, params, None, ids_BL.at[:, 5].set(2 + (ids_BL[:, 5] + 1) % 16))
    np.testing.assert_allclose(changed_BLV[:, :5], logits_BLV[:, :5], rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(changed_BLV[:, 5:] - logits_BLV[:, 5:]).max()) > 1e-2


def test_texts_of_a_row_do_not_see_each_other():
    """Two texts in a row have the loss of two rows, with positions from 0 on."""
    params, _ = case(MIXTRAL)
    apart = np.array([[5, 6, 7, 1, 0, 0, 0, 0, 0], [8, 9, 10, 11, 1, 0, 0, 0, 0]], np.int32)
    together = np.array([[5, 6, 7, 1, 8, 9, 10, 11, 1], [0] * 9], np.int32)
    values = [run_loss(MIXTRAL, params, {"target": ids})[1]["cross_entropy"] for ids in (apart, together)]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_a_rotary_encoder():
    """An encoder-decoder may have all of it too: positions turn self-attention and not that over the memory."""
    config = TransformerConfig(20, 20, model_dim=12, hidden_dim=14, heads=4, kv_heads=2, head_dim=6, encoder_layers=2,
        decoder_layers=2, positions="rotary", activation="swiglu", tied_softmax=False, dropout=0.0)  # fmt: skip
    params, ids_BL = case(config)
    logits_BLV, _ = run(config, params, ids_BL.at[:, 0].set(3), ids_BL)
    moved_BLV, _ = run(config, params, jnp.flip(ids_BL.at[:, 0].set(3), 1), ids_BL)
    assert float(jnp.abs(moved_BLV - logits_BLV).max()) > 1e-3
    with pytest.raises(ModelError, match="needs a source"):
        forward(config, params, None, ids_BL)


def test_a_memory_comes_with_an_encoder():
    params, ids_BL = case(PLAIN)
    with pytest.raises(ModelError, match="a memory if the model has an encoder"):
        decode_step(PLAIN, params, init_cache(PLAIN, 3, 4), ids_BL[:, 0], 0, jnp.ones((3, 2, 12)), ids_BL[:, :2] != 0)


def test_there_is_no_trace_of_an_encoder():
    specs = param_specs(MIXTRAL)
    assert set(specs) == {"target_embedding", "softmax", "decoder"}
    assert set(specs["decoder"]["blocks"]["sparse"]) == {"attention", "attention_norm", "experts", "experts_norm"}
    assert set(param_specs(THIRDS)["decoder"]["blocks"]) == {"sparse", "dense", "dense_2"}
    assert param_specs(DEEPSEEK)["decoder"]["first"]["dense"]["feed_forward"]["wi"].shape == (1, 12, 20)
