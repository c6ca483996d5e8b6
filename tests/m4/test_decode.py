"""Flat beam search against plain Python that re-reads every prefix."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard import moe
from gshard_m4.decode import (
    EOS,
    FORBIDDEN,
    PAD,
    DecodeConfig,
    begin_beam,
    extend_beam,
    ids_of,
    length_normaliser,
    unfinished,
)
from moe import naive

CONFIG = moe.TransformerConfig(
    23, 11, model_dim=16, hidden_dim=24, heads=2, head_dim=8, encoder_layers=2, decoder_layers=2, experts=4,
    group_size=None, partitions=2,
)  # fmt: skip


class Decoded(NamedTuple):
    """The n best translations of each sentence, and their scores; as in `gshard_m4.decode.Beam`."""

    tokens_BNT: Any
    score_BN: Any


def flat_beam_search(step, cache, sentences, longest, options):
    """All sentences to their ends; ``step`` and ``options`` as for `gshard_m4.decode.extend_beam`."""
    found = jax.lax.while_loop(
        lambda beam: jnp.any(unfinished(beam, options)),
        lambda beam: extend_beam(step, beam, options),
        begin_beam(sentences, longest, options, cache),
    )
    return Decoded(found.best_BNT, found.best_BN)


@functools.partial(jax.jit, static_argnames=("config", "options"))
def decode(config, params, source_BL, options):
    """Translations by a model on one device."""
    config = dataclasses.replace(config, partitions=1).dropless()
    valid_BL = source_BL != PAD
    sentences, longest = len(source_BL), options.longest(source_BL.shape[1])
    memory = moe.project_memory(config, params, moe.encode(config, params, source_BL))

    def step(cache, tokens_BK, position_B, seen_BKP):
        return moe.decode_flat_step(config, params, cache, tokens_BK, position_B, memory, valid_BL, seen_BKP)

    cache = moe.init_cache(config, sentences, longest * options.beam)
    return flat_beam_search(step, cache, sentences, longest, options)


def random_model(seed, sharpness=6.0):
    """Random weights whose predictions are decided enough that hypotheses end at different lengths."""
    params = naive.values(moe.param_specs(CONFIG), seed)
    params["target_embedding"] = sharpness * params["target_embedding"]
    return params


def random_source(rng, sentences=5, length=7):
    source = rng.integers(3, CONFIG.source_vocabulary, (sentences, length)).astype(np.int32)
    for i, real in enumerate(rng.integers(1, length + 1, sentences)):
        source[i, real - 1] = EOS
        source[i, real:] = PAD
    return source


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling costs more than running
def forward(params, source_BL, inputs_BL):
    return moe.forward(dataclasses.replace(CONFIG, partitions=1).dropless(), params, source_BL, inputs_BL)[0]


def next_log_probabilities(params, source_L, length):
    """prefix -> log-probabilities, from the full forward pass of the model without drops."""

    def score(prefix):
        inputs = np.zeros((1, length), np.int32)
        inputs[0, 1 : len(prefix) + 1] = prefix
        logits = np.asarray(forward(params, source_L[None], inputs), np.float64)[0, len(prefix)]
        logp = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        logp[list(FORBIDDEN)] = -np.inf
        return logp

    return score


def reference_beam(score, options):
    """The n best translations of a sentence, and their scores; of equal ones that come first which were found first."""
    live, best = [([], np.float32(0))], []
    for t in range(options.max_length):
        candidates = [(prefix, total + score(prefix)) for prefix, total in live]
        normaliser = np.float32(1) / length_normaliser(t + 1, options.alpha)  # XLA multiplies by it
        ended = [(prefix, of[EOS] * normaliser) for prefix, of in candidates]
        best = sorted(best + ended, key=lambda c: -c[1])[: options.n_best]
        longer = [([*prefix, v], of[v]) for prefix, of in candidates for v in range(len(of)) if v != EOS]
        live = sorted(longer, key=lambda c: -c[1])[: options.beam]
    return [(prefix, total) for prefix, total in best if total > -np.inf]


@pytest.mark.parametrize(("beam", "alpha", "seed"), [
    (1, 0.6, 2), pytest.param(2, 0.0, 0, marks=pytest.mark.slow), (7, 2.0, 3),
])  # fmt: skip
def test_beam_search_equals_the_reference(beam, alpha, seed, rng):
    params, source = random_model(seed), random_source(rng)
    options = DecodeConfig(beam=beam, alpha=alpha, max_length=6)
    found = decode(CONFIG, params, source, options)
    for i in range(len(source)):
        ((want, want_score),) = reference_beam(next_log_probabilities(params, source[i], 6), options)
        assert ids_of(np.asarray(found.tokens_BNT[i, 0])) == want
        np.testing.assert_allclose(found.score_BN[i, 0], want_score, rtol=1e-4)


def listed(found):
    """(ids, score) of each translation of each sentence."""
    tokens, scores = np.asarray(found.tokens_BNT), np.asarray(found.score_BN)
    return [[(ids_of(t), s) for t, s in zip(*of, strict=True) if s > -np.inf] for of in zip(tokens, scores)]


class ExactModel:
    """Attention whose every sum is exact, so that searches can be compared bit for bit.

    A hypothesis adds up the integer vectors of its tokens, each times its position; the sum, modulo 3, picks one
    of three rows of logits that are 0 or 1/2: ties everywhere. ``slope`` makes the end likelier with
    every step.
    """

    def __init__(self, rng, sentences, vocabulary, slope):
        self.words_VD = jnp.asarray(rng.integers(-8, 9, (vocabulary, 3)), jnp.float32)
        self.first_BD = jnp.asarray(rng.integers(-8, 9, (sentences, 3)), jnp.float32)
        self.table_XV = jnp.asarray(rng.integers(0, 2, (3, vocabulary)) / 2, jnp.float32)
        self.table_XV = self.table_XV.at[:, EOS].set(-4.0)
        self.slope = slope

    def logits(self, sum_XD, position):
        row = (sum_XD @ jnp.array([1.0, 2.0, 4.0])).astype(jnp.int32) % 3
        return self.table_XV[row].at[..., EOS].add(self.slope * position)

    def flat(self, cache_BPD, tokens_BK, position, seen_BKP):
        K = tokens_BK.shape[1]
        new_BKD = self.words_VD[tokens_BK] * (position[:, None, None] + 1)
        cache_BPD = jax.lax.dynamic_update_slice(cache_BPD, new_BKD, (0, position[0] * K, 0))
        sum_BKD = jnp.einsum("BKP,BPD->BKD", seen_BKP.astype(jnp.float32), cache_BPD) + self.first_BD[:, None]
        return self.logits(sum_BKD, position[0]), cache_BPD

    def score(self, first_D, prefix):
        tokens_T = np.array([PAD, *prefix])
        sum_D = first_D + self.words_VD[tokens_T].T @ np.arange(1.0, 1 + len(tokens_T))
        return np.array(log_probabilities(self.logits(sum_D, len(prefix))))


@jax.jit
def log_probabilities(logits_V):
    return jax.nn.log_softmax(logits_V).at[jnp.array(FORBIDDEN)].set(-jnp.inf)


@pytest.mark.parametrize(("alpha", "slope"), [(0.0, 0.0), (0.6, 0.5)])
@pytest.mark.parametrize("beam", [3, 16, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 7))])
def test_it_equals_the_reference_to_the_bit_with_ties(beam, alpha, slope, rng):
    """Ties, and hypotheses of several lengths: without them this would prove little."""
    B, V, T = 9, 7, 8
    model = ExactModel(rng, B, V, slope)
    options = DecodeConfig(beam=beam, alpha=alpha, max_length=T, n_best=max(1, beam // 2))
    found = jax.jit(lambda cache: flat_beam_search(model.flat, cache, B, T, options))(jnp.zeros((B, T * beam, 3)))
    want = [reference_beam(functools.partial(model.score, first_D), options) for first_D in model.first_BD]
    assert listed(found) == want
    if (alpha, beam) == (0.6, 16):
        assert sum(len({s for _, s in of}) < len(of) for of in want) >= 3
        assert len({len(ids) for of in want for ids, _ in of}) >= 3


def test_the_neighbours_of_a_sentence_do_not_matter(rng):
    """In a batch of one shape, not even the last bit of a score depends on who else is in it, or where."""
    params, source = random_model(5), random_source(rng, sentences=8)
    options = DecodeConfig(beam=3, n_best=3, max_length=6)
    together = decode(CONFIG, params, source, options)
    order = rng.permutation(8)
    shuffled = decode(CONFIG, params, source[order], options)
    together = jax.tree.map(np.asarray, together)
    np.testing.assert_array_equal(shuffled.tokens_BNT, together.tokens_BNT[order])
    np.testing.assert_array_equal(shuffled.score_BN, together.score_BN[order])
    for i in range(8):
        others, at = random_source(rng, sentences=8), (i + 3) % 8
        others[at] = source[i]
        found = decode(CONFIG, params, others, options)
        np.testing.assert_array_equal(found.tokens_BNT[at], together.tokens_BNT[i])
        np.testing.assert_array_equal(found.score_BN[at], together.score_BN[i])
    # Alone, the products have other shapes and round otherwise.
    alone = [decode(CONFIG, params, source[i : i + 1], options) for i in range(8)]
    np.testing.assert_array_equal(together.tokens_BNT, np.concatenate([a.tokens_BNT for a in alone]))
    np.testing.assert_allclose(together.score_BN, np.concatenate([a.score_BN for a in alone]), rtol=1e-4)


def test_the_loop_stops_when_every_sentence_has_ended():
    """A model that would end at once: a continuation falls behind for good long before the 1000 steps are over."""
    steps = []

    def step(cache, tokens_BK, position, seen_BKP):
        jax.debug.callback(lambda t: steps.append(int(t[0])), position)
        return jnp.zeros((*tokens_BK.shape, 5)).at[:, :, EOS].set(8.0), cache

    result = flat_beam_search(step, jnp.zeros((3, 6, 2)), 3, 1000, DecodeConfig(beam=2, alpha=1.0))
    jax.effects_barrier()
    assert not np.asarray(result.tokens_BNT).any()
    assert len(set(steps)) < 250  # ((5 + 1000) / 6) * log P(end) is what a continuation must fall below
