"""Sampling over a split vocabulary: from the logits of a step to tokens."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from families.case import GRID, LINE, Family, Whole, on

CASES = Family("sampling")

B, V, LARGE, LOW = 16, 32_768, 151_936, -1e12
SEED = Whole((), 1 << 30)
LOGITS, OF_BOTH = on((B, V), None, "x"), on((B, V), "x", "y")
MANY = on((B, LARGE), None, "x")
HISTORY = Whole((B, 256), V)


def rows(logits):
    return jnp.arange(logits.shape[0])[:, None]


def drawn(seed, logits):
    return jax.random.categorical(jax.random.key(seed), logits)


@CASES.add(LINE, MANY, results=P())
def greedy(logits):
    return jnp.argmax(logits, -1)


@CASES.add(GRID, on((B, 256), "x"), on((256, V), None, "y"), results=P("x"))
def greedy_of_hidden(x, unembedding):
    return jnp.argmax(x @ unembedding, -1)


@CASES.add(GRID, on((3, V), None, ("x", "y")), results=P(), name="greedy_of_three_over_both")
def greedy_of_few(logits):
    return jnp.argmax(logits, -1)


@CASES.add(LINE, MANY, SEED, (B,), results=P())
def greedy_or_drawn(logits, seed, temperature):
    """Each request has a temperature; at none it is greedy."""
    hot = temperature > 0.0
    scaled = logits / jnp.where(hot, temperature, 1.0)[:, None]
    return jnp.where(hot, drawn(seed, scaled), jnp.argmax(logits, -1))


def top_k(logits, seed, k=64):
    values, ids = lax.top_k(logits, k)
    return jnp.take_along_axis(ids, drawn(seed, values)[:, None], -1)[:, 0]


CASES.add(LINE, MANY, SEED, results=P())(top_k)
CASES.add(GRID, OF_BOTH, SEED, results=P("x"), name="top_k_of_both")(top_k)
CASES.add(LINE, on((4, V), "x"), SEED, results=P(), name="top_k_of_four_rows")(top_k)


@CASES.add(LINE, LOGITS, SEED, results=P())
def top_k_mask(logits, seed):
    least = lax.top_k(logits, 50)[0][:, -1:]
    return drawn(seed, jnp.where(logits < least, LOW, logits))


@CASES.add(LINE, LOGITS, SEED, (B,), results=P())
def top_k_then_top_p(logits, seed, p):
    values, ids = lax.top_k(logits, 64)
    before = jnp.cumsum(jax.nn.softmax(values), -1) - jax.nn.softmax(values)
    place = drawn(seed, jnp.where(before < jax.nn.sigmoid(p)[:, None], values, LOW))
    return jnp.take_along_axis(ids, place[:, None], -1)[:, 0]


def top_p(logits, seed, p):
    """Sorts all, and draws among the sorted."""
    order = jnp.argsort(logits, -1, descending=True)
    values = jnp.take_along_axis(logits, order, -1)
    shares = jax.nn.softmax(values)
    kept = jnp.cumsum(shares, -1) - shares < jax.nn.sigmoid(p)[:, None]
    place = drawn(seed, jnp.where(kept, values, LOW))
    return jnp.take_along_axis(order, place[:, None], -1)[:, 0]


CASES.add(LINE, LOGITS, SEED, (B,), results=P())(top_p)
CASES.add(GRID, OF_BOTH, SEED, on((B,), "x"), results=P("x"), name="top_p_of_both")(top_p)


@CASES.add(LINE, LOGITS, SEED, (B,), results=P())
def top_p_threshold(logits, seed, p):
    """Sorts values only, and masks below the least that is kept."""
    shares = jax.nn.softmax(logits)
    ordered = jnp.sort(shares, -1, descending=True)
    count = jnp.sum(jnp.cumsum(ordered, -1) < jax.nn.sigmoid(p)[:, None], -1, keepdims=True)
    least = jnp.take_along_axis(ordered, jnp.minimum(count, V - 1), -1)
    return drawn(seed, jnp.where(shares < least, LOW, logits))


@CASES.add(LINE, LOGITS, SEED, (B,), results=P())
def top_p_unsorted(logits, seed, p):
    """Brings the mask of the sorted back to the order of the vocabulary."""
    order = jnp.argsort(logits, -1, descending=True)
    shares = jnp.take_along_axis(jax.nn.softmax(logits), order, -1)
    kept = jnp.cumsum(shares, -1) - shares < jax.nn.sigmoid(p)[:, None]
    mask = jnp.take_along_axis(kept, jnp.argsort(order, -1), -1)
    return drawn(seed, jnp.where(mask, logits, LOW))


@CASES.add(LINE, LOGITS, SEED, (B,), results=P())
def top_p_by_bisection(logits, seed, p):
    """No sort: halves the interval of thresholds, with a sum over the vocabulary in each round."""
    shares, wanted = jax.nn.softmax(logits), jax.nn.sigmoid(p)[:, None]

    def halved(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        enough = jnp.sum(jnp.where(shares >= middle, shares, 0.0), -1, keepdims=True) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = lax.fori_loop(0, 24, halved, (jnp.zeros((B, 1)), jnp.max(shares, -1, keepdims=True)))
    return drawn(seed, jnp.where(shares >= low, logits, LOW))


@CASES.add(GRID, OF_BOTH, SEED, on((B,), "x"), results=P("x"))
def min_p(logits, seed, least):
    shares = jax.nn.softmax(logits)
    kept = shares >= jax.nn.sigmoid(least)[:, None] * jnp.max(shares, -1, keepdims=True)
    return drawn(seed, jnp.where(kept, logits, LOW))


def beam(logits, scores, histories, width=4):
    """The best continuations of all beams of a request, and their histories."""
    own = jax.nn.log_softmax(logits) + scores[..., None]
    best, flat = lax.top_k(own.reshape(own.shape[0], -1), width)
    parents, tokens = flat // logits.shape[-1], flat % logits.shape[-1]
    kept = jnp.take_along_axis(histories, parents[..., None], 1)
    return best, tokens, jnp.concatenate([kept, tokens[..., None]], -1)


PAST = Whole((4, 4, 32), V)
CASES.add(LINE, on((4, 4, V), None, None, "x"), (4, 4), PAST, results=(P(), P(), P()))(beam)
CASES.add(
    GRID, on((4, 4, V), "x", None, "y"), on((4, 4), "x"), on(PAST, "x"), results=(P("x"),) * 3, name="beam_of_both"
)(beam)


@CASES.add(LINE, MANY, Whole((B,), LARGE), results=(P(), P(), P()))
def log_probabilities(logits, tokens):
    """Those of the chosen tokens and of the best twenty."""
    found = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(found, tokens[:, None], -1)[:, 0], *lax.top_k(found, 20)


@CASES.add(LINE, on((64, V), None, "x"), Whole((64,), V), results=(P(), P()))
def log_probabilities_of_prompt(logits, tokens):
    """Those of the next tokens, and their ranks."""
    found = jax.nn.log_softmax(logits[:-1])
    chosen = jnp.take_along_axis(found, tokens[1:, None], -1)
    return chosen[:, 0], jnp.sum(found >= chosen, -1)


@CASES.add(LINE, LOGITS, HISTORY, results=P())
def repetition_penalty(logits, history):
    """Marks what has been seen, and lowers its logits."""
    seen = jnp.zeros((B, V), bool).at[rows(logits), history].set(True)
    lowered = jnp.where(logits > 0, logits / 1.2, logits * 1.2)
    return jnp.argmax(jnp.where(seen, lowered, logits), -1)


@CASES.add(LINE, LOGITS, HISTORY, results=P())
def repetition_penalty_in_place(logits, history):
    """Reads the logits of what has been seen, and writes them back."""
    own = jnp.take_along_axis(logits, history, -1)
    lowered = jnp.where(own > 0, own / 1.2, own * 1.2)
    return jnp.argmax(logits.at[rows(logits), history].set(lowered), -1)


@CASES.add(GRID, OF_BOTH, on(HISTORY, "x"), SEED, results=P("x"))
def frequency_penalty(logits, history, seed):
    counts = jnp.zeros((B, V), jnp.int32).at[rows(logits), history].add(1)
    return drawn(seed, logits - 0.5 * counts - 0.2 * (counts > 0))


@CASES.add(LINE, LOGITS, Whole((B, 8), V), (B, 8), results=P())
def logit_bias(logits, ids, bias):
    return jnp.argmax(logits.at[rows(logits), ids].add(bias), -1)


@CASES.add(LINE, LOGITS, Whole((B, V // 32), 1 << 32, "uint32"), SEED, results=P())
def structured(logits, words, seed):
    """A grammar allows tokens: a bit for each."""
    bits = words[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return drawn(seed, jnp.where(bits.reshape(B, V) == 1, logits, LOW))


@CASES.add(LINE, LOGITS, Whole((40, V), 2, bool), Whole((B,), 40), results=P())
def structured_by_state(logits, allowed, state):
    """Each request is in a state of an automaton."""
    return jnp.argmax(jnp.where(allowed[state], logits, LOW), -1)


K = 4
DRAFTS = Whole((B, K), V)


@CASES.add(LINE, on((B, K + 1, V), None, None, "x"), DRAFTS, results=(P(), P()))
def speculative_greedy(logits, drafts):
    """The drafts that the model would have chosen too, and the token after them."""
    own = jnp.argmax(logits, -1).astype(jnp.int32)
    count = jnp.sum(jnp.cumprod(own[:, :-1] == drafts, -1), -1)
    return jnp.where(jnp.arange(K + 1) <= count[:, None], own, -1), count


SPLIT = on((B, K, V), None, None, "x")


@CASES.add(LINE, SPLIT, SPLIT, DRAFTS, SEED, results=(P(), P()))
def speculative_rejection(logits, draft_logits, drafts, seed):
    """Accepts a draft with the ratio of probabilities, and draws the first rejected from what is left."""
    key, other = jax.random.split(jax.random.key(seed))
    p, q = jax.nn.softmax(logits), jax.nn.softmax(draft_logits)
    own, theirs = (jnp.take_along_axis(x, drafts[..., None], -1)[..., 0] for x in (p, q))
    accepted = jnp.cumprod(jax.random.uniform(key, own.shape) < own / theirs, -1)
    left = jnp.log(jnp.maximum(p - q, 1e-20))
    again = jax.random.categorical(other, left)
    count = jnp.sum(accepted, -1)
    chosen = jnp.where(jnp.arange(K) == count[:, None], again, drafts)
    return jnp.where(jnp.arange(K) <= count[:, None], chosen, -1), count


def sampler(logits, history, bias_ids, bias, temperature, p, seed):
    """A server's: penalties, biases, temperature, top-k, top-p, and log probabilities of what was drawn."""
    counts = jnp.zeros(logits.shape, jnp.int32).at[rows(logits), history].add(1)
    logits = (logits - 0.3 * counts).at[rows(logits), bias_ids].add(bias)
    scaled = logits / (0.1 + jax.nn.sigmoid(temperature))[:, None]
    values, ids = lax.top_k(scaled, 64)
    shares = jax.nn.softmax(values)
    kept = jnp.cumsum(shares, -1) - shares < jax.nn.sigmoid(p)[:, None]
    place = drawn(seed, jnp.where(kept, values, LOW))
    token = jnp.take_along_axis(ids, place[:, None], -1)
    return token[:, 0], jnp.take_along_axis(jax.nn.log_softmax(logits), token, -1)[:, 0]


ALL = functools.partial(on, (B,))
CASES.add(
    LINE, LOGITS, HISTORY, Whole((B, 8), V), (B, 8), (B,), (B,), SEED, results=(P(), P())
)(sampler)  # fmt: skip
CASES.add(
    GRID, OF_BOTH, on(HISTORY, "x"), on(Whole((B, 8), V), "x"), on((B, 8), "x"), ALL("x"), ALL("x"), SEED,
    results=(P("x"), P("x")), name="sampler_of_both",
)(sampler)  # fmt: skip
