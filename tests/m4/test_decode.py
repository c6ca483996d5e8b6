"""Greedy and beam search against plain Python that re-reads the whole prefix at every step."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard import moe
from m4.decode import EOS, PAD, UNK, DecodeConfig, beam_search, decode, ids_of

CONFIG = moe.TransformerConfig(
    source_vocabulary=23,
    target_vocabulary=11,
    model_dim=16,
    hidden_dim=24,
    heads=2,
    head_dim=8,
    encoder_layers=2,
    decoder_layers=2,
    experts=4,
    group_size=None,
    partitions=2,
)


def random_model(seed: int, sharpness: float = 6.0) -> dict:
    """Random weights whose predictions are decided enough that hypotheses end at different lengths."""
    params = moe.init(CONFIG, jax.random.key(seed))
    params["target_embedding"] = sharpness * params["target_embedding"]
    return params


def random_source(rng: np.random.Generator, sentences: int = 5, length: int = 7) -> np.ndarray:
    source = rng.integers(3, CONFIG.source_vocabulary, (sentences, length)).astype(np.int32)
    for i, real in enumerate(rng.integers(1, length + 1, sentences)):
        source[i, real - 1] = EOS
        source[i, real:] = PAD
    return source


@jax.jit
def forward(params: dict, source_BL: jax.Array, inputs_BL: jax.Array) -> jax.Array:
    return moe.forward(dataclasses.replace(CONFIG, partitions=1).dropless(), params, source_BL, inputs_BL)[0]


def next_log_probabilities(params: dict, source_L: np.ndarray, length: int):
    """prefix -> log-probabilities, from the full forward pass of the model without drops."""

    def score(prefix: list[int]) -> np.ndarray:
        inputs = np.zeros((1, length), np.int32)
        inputs[0, 1 : len(prefix) + 1] = prefix
        logits = np.asarray(forward(params, source_L[None], inputs), np.float64)[0, len(prefix)]
        logp = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        logp[[PAD, UNK]] = -np.inf
        return logp

    return score


def reference_beam(score, beam: int, alpha: float, length: int) -> tuple[list[int], float]:
    live, best, best_score = [([], 0.0)], [], -math.inf
    for t in range(length):
        candidates = []
        for prefix, total in live:
            logp = score(prefix)
            ending = (total + logp[EOS]) / ((5 + t + 1) / 6) ** alpha
            if ending > best_score:
                best, best_score = prefix, ending
            candidates += [(prefix + [v], total + logp[v]) for v in range(len(logp)) if v != EOS]
        live = sorted(candidates, key=lambda c: -c[1])[:beam]
    return best, best_score


@pytest.mark.parametrize(("beam", "alpha", "seed"), [(2, 0.0, 0), (4, 0.6, 1), (7, 2.0, 3)])
def test_beam_search_equals_the_reference(beam: int, alpha: float, seed: int, rng: np.random.Generator) -> None:
    params, source = random_model(seed), random_source(rng)
    options = DecodeConfig(beam=beam, alpha=alpha, max_length=6)
    found = decode(CONFIG, params, source, options)
    for i in range(len(source)):
        want, want_score = reference_beam(next_log_probabilities(params, source[i], 6), beam, alpha, 6)
        assert ids_of(np.asarray(found.tokens_BT[i])) == want
        np.testing.assert_allclose(found.score_B[i], want_score, rtol=1e-4)


@pytest.mark.parametrize(("beam", "alpha"), [(1, 0.0), (2, 0.0), (4, 0.6), (9, 1.3)])
def test_beam_search_follows_hypotheses_that_differ_in_length(
    beam: int, alpha: float, rng: np.random.Generator
) -> None:
    """A recurrent model, whose state must move with its hypothesis, that ends more readily the longer it goes on."""
    B, V, D, T = 12, 9, 6, 10
    mix_DD, words_VD, out_DV = rng.normal(0, 0.9, (D, D)), rng.normal(0, 1, (V, D)), rng.normal(0, 1.5, (D, V))
    first_BD = rng.normal(0, 2, (B, D))

    def bias(position: int) -> np.ndarray:
        return jnp.zeros(V).at[EOS].set(position - 4.0)

    def step(state, tokens_N, position):
        state = jnp.tanh(state @ mix_DD + jnp.asarray(words_VD)[tokens_N])
        return (state[0] @ out_DV + bias(position)), state

    def score_of(first_D: np.ndarray):
        def score(prefix: list[int]) -> np.ndarray:
            state = first_D
            for token in [PAD, *prefix]:
                state = np.tanh(state @ mix_DD + words_VD[token])
            logp = np.array(jax.nn.log_softmax(state @ out_DV + np.asarray(bias(len(prefix)))))
            logp[[PAD, UNK]] = -np.inf
            return logp

        return score

    options = DecodeConfig(beam=beam, alpha=alpha, max_length=T)
    cache = jnp.repeat(jnp.asarray(first_BD, jnp.float32), beam, axis=0)[None]
    found = jax.jit(lambda cache: beam_search(step, cache, B, options))(cache)
    lengths = set()
    for i in range(B):
        want, want_score = reference_beam(score_of(first_BD[i]), beam, alpha, T)
        assert ids_of(np.asarray(found.tokens_BT[i])) == want
        np.testing.assert_allclose(found.score_B[i], want_score, rtol=1e-4)
        lengths.add(len(want))
    assert len(lengths) > 2, "the test should see hypotheses of several lengths"


def test_greedy_equals_the_reference(rng: np.random.Generator) -> None:
    params, source = random_model(4), random_source(rng)
    found = decode(CONFIG, params, source, DecodeConfig(beam=1, max_length=8))
    for i in range(len(source)):
        score, prefix, total = next_log_probabilities(params, source[i], 8), [], 0.0
        for _ in range(8):
            logp = score(prefix)
            token = int(logp.argmax())
            total += logp[token]
            if token == EOS:
                break
            prefix.append(token)
        assert ids_of(np.asarray(found.tokens_BT[i])) == prefix
        np.testing.assert_allclose(found.score_B[i], total, rtol=1e-4)


def test_the_neighbours_of_a_sentence_do_not_matter(rng: np.random.Generator) -> None:
    params, source = random_model(5), random_source(rng)
    options = DecodeConfig(beam=3, max_length=6)
    together = decode(CONFIG, params, source, options)
    alone = [decode(CONFIG, params, source[i : i + 1], options).tokens_BT[0] for i in range(len(source))]
    np.testing.assert_array_equal(together.tokens_BT, jnp.stack(alone))


def test_the_loop_stops_when_every_sentence_has_ended() -> None:
    """A model that would end at once: a continuation falls behind for good long before the 1000 steps are over."""
    steps = []

    def step(cache: jax.Array, tokens_N: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(lambda t: steps.append(int(t)), position)
        return jnp.zeros((tokens_N.shape[0], 5)).at[:, EOS].set(8.0), cache

    result = beam_search(step, jnp.zeros((1, 6, 2)), 3, DecodeConfig(beam=2, alpha=1.0, max_length=1000))
    jax.effects_barrier()
    assert not np.asarray(result.tokens_BT).any()
    assert len(set(steps)) < 250  # ((5 + 1000) / 6) * log P(end) is what a continuation must fall below


@pytest.mark.parametrize("wrong", [{"beam": 0}, {"max_length": 0}, {"alpha": -0.1}])
def test_impossible_options_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DecodeConfig(**wrong)
