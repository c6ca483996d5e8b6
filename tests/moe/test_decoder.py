"""Decoders: against a plain program in numpy, step by step, and no sentence depends on its batch mates."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.moe import (
    ModelError,
    TransformerConfig,
    decode_flat_step,
    decode_step,
    encode,
    forward,
    init_cache,
    loss,
    param_specs,
    project_memory,
)
from moe import naive

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


run = jax.jit(forward, static_argnums=0, compiler_options=naive.FAST)
run_loss = jax.jit(loss, static_argnums=0, static_argnames="label_smoothing", compiler_options=naive.FAST)
step = jax.jit(decode_step, static_argnums=0, compiler_options=naive.FAST)


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
    params, ids_BL = case(PLAIN)
    with pytest.raises(ModelError, match="a memory if the model has an encoder"):
        decode_step(PLAIN, params, init_cache(PLAIN, 3, 4), ids_BL[:, 0], 0, jnp.ones((3, 2, 12)), ids_BL[:, :2] != 0)


# Training capacities of this model drop tokens; decoding must not.
MOE = TransformerConfig(20, 18, model_dim=16, hidden_dim=24, heads=2, head_dim=8, encoder_layers=2, decoder_layers=4,
    experts=4, group_size=4, capacity_factor=1.0)  # fmt: skip
MARKED = dataclasses.replace(MOE, partitions=2)

run_encoder = jax.jit(encode, static_argnums=0, compiler_options=naive.FAST)


def translation(config, sentences=4):
    params = naive.values(param_specs(config))
    source_BL, target_in_BL = naive.ids(1, 20, sentences, 6), naive.ids(2, 18, sentences, 5)
    source_BL[1, 3:] = target_in_BL[:, 0] = 0
    return params, source_BL, target_in_BL


def decode(config, params, source_BL, target_in_BL):
    """Logits of all positions, one step after the other, in a cache longer than needed."""
    memory = project_memory(config, params, run_encoder(config, params, source_BL))
    cache = init_cache(config, source_BL.shape[0], 7)
    rows = []
    for position in range(target_in_BL.shape[1]):
        logits_BV, cache = step(
            config, params, cache, target_in_BL[:, position], jnp.int32(position), memory, source_BL != 0
        )
        rows.append(logits_BV)
    return np.stack(rows, axis=1)


@pytest.mark.parametrize("config", [MOE, pytest.param(MARKED, marks=pytest.mark.slow)])
def test_equals_forward_and_batch_mates_do_not_matter(config):
    """Neither who they are nor how many."""
    params, source_BL, target_in_BL = translation(config)
    roomy = dataclasses.replace(config, capacity_factor=math.inf, group_size=None)
    expected, _ = run(roomy, params, source_BL, target_in_BL)
    together = decode(config, params, source_BL, target_in_BL)
    np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-4)
    others, their_targets = np.roll(source_BL, 1, axis=0), target_in_BL[::-1].copy()
    others[0], their_targets[0] = source_BL[0], target_in_BL[0]
    with_others = decode(config, params, others, their_targets)
    alone = decode(config, params, source_BL[:1], target_in_BL[:1])
    np.testing.assert_allclose(with_others[0], together[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(alone[0], together[0], rtol=1e-5, atol=1e-5)


def test_under_scan_and_reordered():
    """A greedy loop in one program; sentences of the cache can be exchanged by indexing dimension 1."""
    params, source_BL, target_in_BL = translation(MOE)
    memory = project_memory(MOE, params, run_encoder(MOE, params, source_BL))
    order = jnp.array([2, 0, 3, 1])

    def body(carry, position):
        cache, tokens_B = carry
        logits_BV, cache = decode_step(MOE, params, cache, tokens_B, position, memory, source_BL != 0)
        return (cache, jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)), logits_BV

    start = (init_cache(MOE, 4, 6), jnp.zeros(4, jnp.int32))
    (cache, tokens_B), _ = jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(3)))(start)
    expected, _ = step(MOE, params, cache, tokens_B, 3, memory, source_BL != 0)
    moved_cache, moved_memory = jax.tree.map(lambda x: x[:, order], (cache, memory))
    moved, _ = step(MOE, params, moved_cache, tokens_B[order], 3, moved_memory, source_BL[order] != 0)
    np.testing.assert_allclose(moved, expected[order], rtol=1e-5, atol=1e-5)


def test_hypotheses_of_a_sentence_share_one_cache():
    """Each sees its own ancestors only, wherever they lie: the same as each alone in a cache of its own."""
    params, source_BL, _ = translation(MOE)
    memory = project_memory(MOE, params, run_encoder(MOE, params, source_BL))
    B, Q, T = 4, 3, 3
    tokens_TBQ = naive.ids(3, 18, T, B, Q)
    tokens_TBQ[0] = 0
    flat = jax.jit(decode_flat_step, static_argnums=0, compiler_options=naive.FAST)
    parents = [[0, 1, 2], [0, 2, 0], [1, 1, 0]]  # of the hypotheses of steps 0, 1, 2
    seen_QP = np.zeros((Q, T * Q), bool)
    cache = init_cache(MOE, B, T * Q)
    paths = [[] for _ in range(Q)]
    for t in range(T):
        seen_QP, paths = seen_QP[parents[t]], [list(paths[p]) if t else [] for p in parents[t]]
        for q in range(Q):
            seen_QP[q, t * Q + q] = True
            paths[q].append((t, q))
        seen_BQP = jnp.broadcast_to(jnp.asarray(seen_QP), (B, Q, T * Q))
        logits_BQV, cache = flat(MOE, params, cache, tokens_TBQ[t], t, memory, source_BL != 0, seen_BQP)
    for q in range(Q):  # now each alone
        own = init_cache(MOE, B, T)
        for t, column in paths[q]:
            logits_BV, own = step(MOE, params, own, tokens_TBQ[t, :, column], t, memory, source_BL != 0)
        np.testing.assert_allclose(logits_BQV[:, q], logits_BV, rtol=1e-4, atol=1e-4)
