"""The textbook beam search that the flat one must equal: after every step the cache is reordered by hypothesis.

And the flat one for a batch whose sentences begin and end together, which `gshard_m4.stream` must equal.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gshard import moe
from gshard_m4.decode import EOS, FORBIDDEN, PAD, begin_beam, extend_beam, length_normaliser, unfinished


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


def reordering_beam_search(step, cache, sentences, options, stop_early=False):
    """The n best translations of each sentence.

    ``step(cache, tokens_N, position)`` scores N = sentences * beam hypotheses, those of a sentence side by side; the
    cache is a tree of [layers, N, ...]. Without ``stop_early`` every sentence is searched to the longest length.
    """
    B, K, T, N = sentences, options.beam, options.max_length, options.n_best
    normal_T = jnp.asarray(length_normaliser(np.arange(1, T + 1), options.alpha))

    def unfinished(carry):
        position, live_BK, _, best_BN, _, _ = carry
        hopeful = jnp.any(live_BK.max(1) / normal_T[-1] > best_BN[:, -1])
        return (position < T) & (hopeful | (not stop_early))

    def extend(carry):
        position, live_BK, live_BKT, best_BN, best_BNT, cache = carry
        last_BK = live_BKT[:, :, jnp.maximum(position - 1, 0)]
        logits_NV, cache = step(cache, last_BK.reshape(B * K), position)
        logp_BKV = jax.nn.log_softmax(logits_NV.reshape(B, K, -1)).at[..., jnp.array(FORBIDDEN)].set(-jnp.inf)
        total_BKV = live_BK[:, :, None] + logp_BKV
        endings_BX = jnp.concatenate([best_BN, total_BKV[:, :, EOS] / normal_T[position]], axis=1)
        order_BX = jnp.argsort(-endings_BX, axis=1, stable=True)[:, :N]
        best_BN = jnp.take_along_axis(endings_BX, order_BX, 1)
        best_BNT = jnp.take_along_axis(jnp.concatenate([best_BNT, live_BKT], 1), order_BX[:, :, None], 1)
        going_on_BX = total_BKV.at[:, :, EOS].set(-jnp.inf).reshape(B, -1)
        chosen_BK = jnp.argsort(-going_on_BX, axis=1, stable=True)[:, :K]
        live_BK = jnp.take_along_axis(going_on_BX, chosen_BK, 1)
        parent_BK, token_BK = jnp.divmod(chosen_BK, total_BKV.shape[-1])
        live_BKT = jnp.take_along_axis(live_BKT, parent_BK[:, :, None], 1).at[:, :, position].set(token_BK)
        parent_N = (jnp.arange(B)[:, None] * K + parent_BK).reshape(-1)
        return position + 1, live_BK, live_BKT, best_BN, best_BNT, jax.tree.map(lambda x: x[:, parent_N], cache)

    start = (
        jnp.int32(0),
        jnp.where(jnp.arange(K) == 0, 0.0, -jnp.inf) + jnp.zeros((B, 1)),
        jnp.zeros((B, K, T), jnp.int32),
        jnp.full((B, N), -jnp.inf),
        jnp.zeros((B, N, T), jnp.int32),
        cache,
    )
    _, _, _, best_BN, best_BNT, _ = jax.lax.while_loop(unfinished, extend, start)
    return Decoded(best_BNT, best_BN)
