"""Decoding: the most likely translation, token after token.

`greedy` takes the best token each time. `beam_search` keeps the `beam` best unfinished hypotheses and compares the
finished ones by ``log P(Y) / ((5 + |Y|) / 6)**alpha``, where |Y| counts the end token (Wu et al., 2016, equation 14).

Ending costs no place in the beam: at every step each live hypothesis is also scored as if it ended here, the best
such ending of a sentence is remembered, and the beam goes on with the best continuations. A sentence is finished
when no continuation can beat its best ending any more: log-probabilities only fall, so a live hypothesis of score s
ends with at most ``s / ((5 + T) / 6)**alpha`` for the longest length T. Stopping early therefore never changes the
result, and all of it is one compiled loop that ends when every sentence of the batch has.

Experts have no capacity limit here (`TransformerConfig.dropless`), so what a sentence becomes does not depend on its
neighbours in the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gshard import moe

PAD, EOS, UNK = 0, 1, 2
FORBIDDEN = (PAD, UNK)
"""Ids that are never written: they stand for no text."""

Step = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(cache, tokens_N, position) -> (logits_NV, cache)"""


class Decoded(NamedTuple):
    """The best translation of each sentence.

    Attributes:
        tokens_BT: ids without the end token, followed by zeros.
        score_B: the normalised log-probability that it was chosen by; for `greedy` that of ``alpha = 0``.
    """

    tokens_BT: jax.Array
    score_B: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How to search.

    Attributes:
        beam: hypotheses that are kept for each sentence; 1 decodes greedily.
        alpha: exponent of the length normalisation; 0 compares plain log-probabilities.
        max_length: longest translation in tokens, end token included.
    """

    beam: int = 4
    alpha: float = 0.6
    max_length: int = 48

    def __post_init__(self) -> None:
        for name in ("beam", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.alpha < 0:
            raise ValueError(f"alpha must not be negative, got {self.alpha}")


@partial(jax.jit, static_argnames=("config", "options"))
def decode(config: moe.TransformerConfig, params: Any, source_BL: jax.Array, options: DecodeConfig) -> Decoded:
    """Translates a batch of padded source sentences on one device.

    Args:
        config: the model; its routing is replaced by one that drops nothing.
        params: its parameters.
        source_BL: source ids, 0 where padded.
        options: beam size, normalisation and longest length T.

    Returns:
        The translations, ``tokens_BT`` and ``score_B``.
    """
    config = dataclasses.replace(config, partitions=1).dropless()
    sentences = source_BL.shape[0]
    memory = moe.project_memory(config, params, moe.encode(config, params, source_BL))
    memory = jax.tree.map(lambda x: jnp.repeat(x, options.beam, axis=1), memory)
    valid_NL = jnp.repeat(source_BL != PAD, options.beam, axis=0)

    def step(cache: Any, tokens_N: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
        return moe.decode_step(config, params, cache, tokens_N, position, memory, valid_NL)

    cache = moe.init_cache(config, sentences * options.beam, options.max_length)
    if options.beam == 1:
        return greedy(step, cache, sentences, options.max_length)
    return beam_search(step, cache, sentences, options)


def greedy(step: Step, cache: Any, sentences: int, max_length: int) -> Decoded:
    """The most likely token each time, until every sentence has ended or `max_length` is reached."""

    def unfinished(carry: tuple[Any, ...]) -> jax.Array:
        position, ended_B = carry[0], carry[2]
        return (position < max_length) & ~jnp.all(ended_B)

    def extend(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        position, last_B, ended_B, score_B, tokens_BT, cache = carry
        logits_BV, cache = step(cache, last_B, position)
        logp_BV = _log_probabilities(logits_BV)
        next_B = jnp.argmax(logp_BV, axis=-1).astype(jnp.int32)
        gained_B = jnp.take_along_axis(logp_BV, next_B[:, None], axis=-1)[:, 0]
        score_B = score_B + jnp.where(ended_B, 0.0, gained_B)
        ended_B = ended_B | (next_B == EOS)
        next_B = jnp.where(ended_B, PAD, next_B)
        tokens_BT = jax.lax.dynamic_update_slice(tokens_BT, next_B[:, None], (0, position))
        return position + 1, next_B, ended_B, score_B, tokens_BT, cache

    start = (
        jnp.int32(0),
        jnp.zeros(sentences, jnp.int32),
        jnp.zeros(sentences, bool),
        jnp.zeros(sentences, jnp.float32),
        jnp.zeros((sentences, max_length), jnp.int32),
        cache,
    )
    _, _, _, score_B, tokens_BT, _ = jax.lax.while_loop(unfinished, extend, start)
    return Decoded(tokens_BT, score_B)


def beam_search(step: Step, cache: Any, sentences: int, options: DecodeConfig) -> Decoded:
    """The best finished hypothesis of each sentence.

    Args:
        step: scores the next token of N = sentences * beam hypotheses, beams of one sentence side by side.
        cache: what `step` starts from, a tree of arrays of [layers, N, ...].
        sentences: B.
        options: beam size K, normalisation and longest length T.
    """
    B, K, T = sentences, options.beam, options.max_length

    def normal(length: jax.Array | int) -> jax.Array:
        return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** options.alpha

    def unfinished(carry: tuple[Any, ...]) -> jax.Array:
        position, live_BK, _, best_B, _, _ = carry
        can_improve_B = jnp.max(live_BK, axis=1) / normal(T) > best_B
        return (position < T) & jnp.any(can_improve_B)

    def extend(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        position, live_BK, live_BKT, best_B, best_BT, cache = carry
        last_BK = jnp.where(
            position == 0, PAD, jax.lax.dynamic_index_in_dim(live_BKT, jnp.maximum(position - 1, 0), 2, keepdims=False)
        )
        logits_NV, cache = step(cache, last_BK.reshape(B * K), position)
        total_BKV = live_BK[:, :, None] + _log_probabilities(logits_NV).reshape(B, K, -1)

        # Every live hypothesis could end here, with |Y| = position + 1.
        ending_BK = total_BKV[:, :, EOS] / normal(position + 1)
        winner_B = jnp.argmax(ending_BK, axis=1)
        ending_B = jnp.take_along_axis(ending_BK, winner_B[:, None], axis=1)[:, 0]
        ending_BT = jnp.take_along_axis(live_BKT, winner_B[:, None, None], axis=1)[:, 0]
        better_B = ending_B > best_B
        best_B = jnp.where(better_B, ending_B, best_B)
        best_BT = jnp.where(better_B[:, None], ending_BT, best_BT)

        # Or go on: the K best of all continuations.
        V = total_BKV.shape[-1]
        going_on = total_BKV.at[:, :, EOS].set(-jnp.inf).reshape(B, K * V)
        live_BK, chosen_BK = jax.lax.top_k(going_on, K)
        parent_BK, token_BK = chosen_BK // V, (chosen_BK % V).astype(jnp.int32)
        live_BKT = jnp.take_along_axis(live_BKT, parent_BK[:, :, None], axis=1)
        live_BKT = jax.lax.dynamic_update_slice(live_BKT, token_BK[:, :, None], (0, 0, position))
        parent_N = (jnp.arange(B)[:, None] * K + parent_BK).reshape(B * K)
        cache = jax.tree.map(lambda x: jnp.take(x, parent_N, axis=1), cache)
        return position + 1, live_BK, live_BKT, best_B, best_BT, cache

    # All beams start equal; only the first may be continued, or the beam would hold K copies of one hypothesis.
    first_BK = jnp.where(jnp.arange(K) == 0, 0.0, -jnp.inf) + jnp.zeros((B, 1))
    start = (
        jnp.int32(0),
        first_BK,
        jnp.zeros((B, K, T), jnp.int32),
        jnp.full(B, -jnp.inf),
        jnp.zeros((B, T), jnp.int32),
        cache,
    )
    _, _, _, best_B, best_BT, _ = jax.lax.while_loop(unfinished, extend, start)
    return Decoded(best_BT, best_B)


def ids_of(tokens_T: np.ndarray) -> list[int]:
    """The ids of one row of `Decoded.tokens_BT`, without its padding."""
    return [int(token) for token in tokens_T if token != PAD]


def _log_probabilities(logits: jax.Array) -> jax.Array:
    """Log-softmax in float32, minus infinity for what must not be written."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return logp.at[..., jnp.array(FORBIDDEN)].set(-jnp.inf)
