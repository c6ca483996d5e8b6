"""Decoding step by step equals the forward pass, and no sentence depends on its batch mates."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.moe import (
    TransformerConfig,
    decode_flat_step,
    decode_step,
    encode,
    forward,
    init_cache,
    param_specs,
    project_memory,
)
from moe import naive

DENSE = TransformerConfig(20, 18, model_dim=16, hidden_dim=24, heads=2, head_dim=8, encoder_layers=2, decoder_layers=4)
# Training capacities of this model drop tokens; decoding must not.
MOE = dataclasses.replace(DENSE, experts=4, group_size=4, capacity_factor=1.0)
MARKED = dataclasses.replace(MOE, partitions=2)
MODELS = pytest.mark.parametrize(
    "config",
    [
        pytest.param(DENSE, id="dense", marks=pytest.mark.slow),
        pytest.param(MOE, id="moe"),
        pytest.param(MARKED, id="marked", marks=pytest.mark.slow),
    ],
)

# Small programs: compiling them costs more than running them.
FAST = {"xla_backend_optimization_level": 0}
step = jax.jit(decode_step, static_argnums=0, static_argnames="dropless", compiler_options=FAST)
run = jax.jit(forward, static_argnums=0, compiler_options=FAST)
run_encoder = jax.jit(encode, static_argnums=0, static_argnames="dropless", compiler_options=FAST)


def case(config, sentences=4):
    params = naive.values(param_specs(config))
    source_BL, target_in_BL = naive.ids(1, 20, sentences, 6), naive.ids(2, 18, sentences, 5)
    source_BL[1, 3:] = target_in_BL[:, 0] = 0
    return params, source_BL, target_in_BL


def decode(config, params, source_BL, target_in_BL, project=True):
    """Logits of all positions, one step after the other, in a cache longer than needed."""
    memory = run_encoder(config, params, source_BL)
    memory = project_memory(config, params, memory) if project else memory
    cache = init_cache(config, source_BL.shape[0], 7)
    rows = []
    for position in range(target_in_BL.shape[1]):
        logits_BV, cache = step(
            config, params, cache, target_in_BL[:, position], jnp.int32(position), memory, source_BL != 0
        )
        rows.append(logits_BV)
    return np.stack(rows, axis=1)


@MODELS
def test_equals_forward(config):
    params, source_BL, target_in_BL = case(config)
    roomy = dataclasses.replace(config, capacity_factor=math.inf, group_size=None) if config.experts else config
    expected, _ = run(roomy, params, source_BL, target_in_BL)
    got = decode(config, params, source_BL, target_in_BL)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@MODELS
def test_batch_mates_do_not_matter(config):
    """Neither who they are nor how many."""
    params, source_BL, target_in_BL = case(config)
    together = decode(config, params, source_BL, target_in_BL)
    others, their_targets = np.roll(source_BL, 1, axis=0), target_in_BL[::-1].copy()
    others[0], their_targets[0] = source_BL[0], target_in_BL[0]
    with_others = decode(config, params, others, their_targets)
    alone = decode(config, params, source_BL[:1], target_in_BL[:1])
    np.testing.assert_allclose(with_others[0], together[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(alone[0], together[0], rtol=1e-5, atol=1e-5)


def test_capacities_of_training_on_request():
    """They drop, so the result differs; the groups must fit."""
    params, source_BL, _ = case(MOE)
    kept, dropping = run_encoder(MOE, params, source_BL), run_encoder(MOE, params, source_BL, dropless=False)
    assert float(jnp.abs(kept - dropping).max()) > 1e-2
    cache, memory = init_cache(MOE, 4, 3), kept
    given = params, cache, np.zeros(4, np.int32), 0, memory, source_BL != 0
    logits_BV, _ = jax.eval_shape(lambda *given: decode_step(MOE, *given, dropless=False), *given)
    assert logits_BV.shape == (4, 18)


def test_under_scan_and_reordered():
    """A greedy loop in one program; sentences of the cache can be exchanged by indexing dimension 1."""
    params, source_BL, target_in_BL = case(MOE)
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
    params, source_BL, _ = case(MOE)
    memory = project_memory(MOE, params, run_encoder(MOE, params, source_BL))
    B, Q, T = 4, 3, 3
    tokens_TBQ = naive.ids(3, 18, T, B, Q)
    tokens_TBQ[0] = 0
    flat = jax.jit(decode_flat_step, static_argnums=0, compiler_options=FAST)
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
