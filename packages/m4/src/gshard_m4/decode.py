"""Decoding: the most likely translations, token after token.

Hypotheses are compared by ``log P(Y) / ((5 + |Y|) / 6)**alpha``, where |Y| counts the end token (Wu et al., 2016,
equation 14). The search is flat (GShard, appendix A.1): the K hypotheses of a sentence share one sequence in which
their tokens lie interleaved, token k of step t in slot t*K + k. Keys and values stay in the slot where they were
written. A hypothesis is a row of a mask that says which slots it sees, so going on with some hypotheses twice and with
others not at all moves a few bits, and not the cache; and the source is never repeated K times.

Ending costs no place in the beam: at every step each live hypothesis is also scored as if it ended here, the best
such endings of a sentence are remembered, and the beam goes on with the best continuations. A sentence is finished
when no continuation can displace a remembered ending: log-probabilities only fall, so a live hypothesis of score s
ends with at most ``s / ((5 + T) / 6)**alpha`` for the longest length T. Stopping early therefore never changes the
result.

This module has the step of the search; `gshard_m4.stream` runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gshard_m4.errors import OptionError

PAD, EOS, UNK = 0, 1, 2
FORBIDDEN = (PAD, UNK)
"""Ids that are never written: they stand for no text."""
# Of 100 languages' held-out sentences one in 7,000 has an English side that is longer than the other by more than this.
_MORE = 16

Step = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(cache, tokens_BK, position_B, seen_BKP) -> (logits_BKV, cache); P = T*K slots, see `moe.decode_flat_step`."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How to search.

    Attributes:
        beam: hypotheses that are kept for each sentence.
        alpha: exponent of the length normalisation; 0 compares plain log-probabilities.
        max_length: longest translation in tokens, end token included; by default 16 more than the row that holds the
            source, which has 16, 32, 64, ... tokens.
        n_best: translations that are wanted for each sentence, at most as many as the beam holds.
        placeholders: whether placeholders, tags and accelerators (%s, {name}, <b>, &File) are carried over as they are.
    """

    beam: int = 4
    alpha: float = 0.6
    max_length: int | None = None
    n_best: int = 1
    placeholders: bool = True

    def __post_init__(self) -> None:
        for name in ("beam", "max_length", "n_best"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise OptionError(f"{name} must be at least 1, got {given}")
        if not self.alpha >= 0:
            raise OptionError(f"alpha must not be negative, got {self.alpha}")
        if self.n_best > self.beam:
            raise OptionError(f"n_best must be at most the beam, {self.beam}, got {self.n_best}")

    def longest(self, width: int) -> int:
        """Tokens of the longest translation of sources in rows of ``width`` tokens.

        >>> DecodeConfig().longest(32), DecodeConfig(max_length=40).longest(32)
        (48, 40)
        """
        return width + _MORE if self.max_length is None else self.max_length


class Beam(NamedTuple):
    """How far the search is in B sentences.

    Attributes:
        position_B: tokens that are written.
        live_BK: log-probabilities of the hypotheses that go on, best first.
        live_BKT: their tokens.
        seen_BKP: the slots that they see.
        best_BN: scores (normalised log-probabilities) of the best endings, best first; minus infinity where a sentence
            has fewer than N.
        best_BNT: their tokens without the end token, followed by zeros.
        cache: keys and values.
    """

    position_B: jax.Array
    live_BK: jax.Array
    live_BKT: jax.Array
    seen_BKP: jax.Array
    best_BN: jax.Array
    best_BNT: jax.Array
    cache: Any


def begin_beam(sentences: int, longest: int, options: DecodeConfig, cache: Any = None) -> Beam:
    """A beam in which nothing is written yet.

    Args:
        sentences: B.
        longest: tokens T of the longest translation, end token included.
        options: beam size K, normalisation and number of translations N.
        cache: empty keys and values.
    """
    B, K, T, N = sentences, options.beam, longest, options.n_best
    return Beam(
        jnp.zeros(B, jnp.int32),
        # All beams start equal; only the first may be continued, or the beam would hold K copies of one hypothesis.
        jnp.where(jnp.arange(K) == 0, 0.0, -jnp.inf) + jnp.zeros((B, 1)),
        jnp.zeros((B, K, T), jnp.int32),
        jnp.zeros((B, K, T * K), bool),
        jnp.zeros((B, N)) - jnp.inf,
        jnp.zeros((B, N, T), jnp.int32),
        cache,
    )


def unfinished(beam: Beam, options: DecodeConfig) -> jax.Array:
    """For each sentence whether a continuation can displace one of its best endings."""
    T = beam.live_BKT.shape[2]
    last = jnp.asarray(length_normaliser(np.array([T]), options.alpha))[0]
    can_improve_B = jnp.max(beam.live_BK, axis=1) / last > beam.best_BN[:, -1]
    return can_improve_B & (beam.position_B < T)


def extend_beam(step: Step, beam: Beam, options: DecodeConfig) -> Beam:
    """One more token for every hypothesis of every sentence that is not finished.

    Of equals, the one found first, and in the better place, wins.

    Args:
        step: scores the next token of K hypotheses of each of B sentences.
        beam: how far the search is.
        options: beam size K, normalisation and number of translations N.
    """
    position_B, live_BK, live_BKT, seen_BKP, best_BN, best_BNT, cache = beam
    B, K, T = live_BKT.shape
    now_BT = jnp.arange(T) == position_B[:, None]
    running_B = unfinished(beam, options)
    normal_T = jnp.asarray(length_normaliser(np.arange(1, T + 1), options.alpha))
    own_KP = jnp.arange(K)[:, None] == jnp.arange(T * K) % K  # slots that hypothesis k writes, over all steps

    before_B11 = jnp.maximum(position_B - 1, 0)[:, None, None]
    last_BK = jnp.take_along_axis(live_BKT, before_B11, axis=2, mode="clip")[:, :, 0]
    seen_BKP = seen_BKP | (own_KP & jnp.repeat(now_BT, K, axis=1)[:, None])
    logits_BKV, cache = step(cache, last_BK, position_B, seen_BKP)
    total_BKV = live_BK[:, :, None] + _log_probabilities(logits_BKV)

    # Every live hypothesis could end here, with |Y| = position + 1.
    ending_BK = total_BKV[:, :, EOS] / jnp.take(normal_T, position_B, mode="clip")[:, None]
    endings_BX = jnp.concatenate([best_BN, jnp.where(running_B[:, None], ending_BK, -jnp.inf)], axis=1)
    endings_BXT = jnp.concatenate([best_BNT, live_BKT], axis=1)
    best_BN, winner_BN = jax.lax.top_k(endings_BX, options.n_best)
    best_BNT = jnp.take_along_axis(endings_BXT, winner_BN[:, :, None], axis=1)

    # Or go on: the K best of all continuations.
    V = total_BKV.shape[-1]
    going_on = total_BKV.at[:, :, EOS].set(-jnp.inf).reshape(B, K * V)
    live_BK, chosen_BK = jax.lax.top_k(going_on, K)
    parent_BK, token_BK = chosen_BK // V, (chosen_BK % V).astype(jnp.int32)
    live_BKT = jnp.take_along_axis(live_BKT, parent_BK[:, :, None], axis=1)
    live_BKT = jnp.where(now_BT[:, None], token_BK[:, :, None], live_BKT)
    seen_BKP = jnp.take_along_axis(seen_BKP, parent_BK[:, :, None], axis=1)
    return Beam(position_B + 1, live_BK, live_BKT, seen_BKP, best_BN, best_BNT, cache)


def length_normaliser(length: np.ndarray, alpha: float) -> np.ndarray:
    """What log-probabilities of hypotheses of so many tokens, end included, are divided by; float32.

    >>> length_normaliser(np.array([1, 7]), 1.0).tolist()
    [1.0, 2.0]
    """
    return np.asarray(((5.0 + length) / 6.0) ** alpha, np.float32)


def ids_of(tokens_T: np.ndarray) -> list[int]:
    """The ids of one translation in `Beam.best_BNT`, without its padding."""
    return [int(token) for token in tokens_T if token != PAD]


def _log_probabilities(logits: jax.Array) -> jax.Array:
    """Log-softmax in float32, minus infinity for what must not be written."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return logp.at[..., jnp.array(FORBIDDEN)].set(-jnp.inf)
