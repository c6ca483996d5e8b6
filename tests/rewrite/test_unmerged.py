"""Unmerged: what becomes of programs that merge dimensions, what they send, and that they compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from checked_calls import near, near_largest
from gshard.language.traits import groups_of
from sampled import crossed

B, S, D, F = 3, 16, 8, 12
RNG = np.random.default_rng(0)
X = RNG.integers(-9, 9, (B, S, D)).astype(np.float32)
W = RNG.integers(-9, 9, (D, F)).astype(np.float32)
LABELS = RNG.integers(-F, F, (B, S)).astype(np.int32)


def tokens(x, w, labels):
    return (x.reshape(-1, D) @ w).reshape(B, S, F)


def layers(x, w, labels):
    h = x.reshape(-1, D)
    mean = h.mean(-1, keepdims=True)
    h = h + jnp.maximum((h - mean) * jnp.arange(D) @ w, 0) @ w.T
    h = jnp.where(jnp.arange(D) % 2 == 0, h, -h) + jnp.ones((B * S, D))
    return jnp.clip(h, -50, 50).reshape(B, S, D)


def loss(x, w, labels):
    logits = x.reshape(-1, D) @ w
    found = jnp.take_along_axis(logits, labels.reshape(-1, 1), 1)[:, 0]
    return (found - logits.max(-1) + jnp.argmax(logits, -1)).sum()


def one_hot(x, w, labels):
    logits = x.reshape(-1, D) @ w
    return jnp.sum(jax.nn.one_hot(labels.reshape(-1) % F, F) * logits, -1).reshape(B, S)


def embedded(x, w, labels):
    return (w.T[labels.reshape(-1)] * 2).reshape(B, S, D)


def written(x, w, labels):
    rows = x.reshape(-1, D) + 1
    at = labels.reshape(-1) % D
    return rows.at[jnp.arange(B * S), at].add(1.0).reshape(B, S, D)


def windows(x, w, labels):
    x = x.reshape(B * (S // 2), 2, D)
    scores = jnp.einsum("wqd,wkd->wqk", x, x)
    return jnp.einsum("wqk,wkd->wqd", jnp.cumsum(scores, 2), x).reshape(B, S, D)


def turned(x, w, labels):
    return (x.reshape(-1, D).T[1:5] * 2).T.reshape(B, S, 4)


def sums(x, w, labels):
    h = x.reshape(-1, D)
    return h.T @ h, h.sum(0), jnp.abs(h).max(0)


def twice(x, w, labels):
    """Merged, parted in another place, and merged with the last."""
    return ((x.reshape(-1, D) + 1).reshape(B, S // 2, 2, D) * 2).reshape(B, S // 2, -1).sum(2)


def there_and_back(x, w, labels):
    return x.reshape(-1, D).reshape(B, S, D)


def in_a_loop(x, w, labels):
    return lax.scan(lambda c, _: (jnp.clip(tokens(c, w, labels) @ w.T, -9, 9), None), x, None, length=3)[0]


PROGRAMS = {f.__name__: f for f in (
    tokens, layers, loss, one_hot, embedded, written, windows, turned, sums, twice, there_and_back, in_a_loop
)}  # fmt: skip
# What is read from others if the second dimension is split: nothing but sums.
SUMS = {"loss", "sums"}


def split(f, dim):
    def marked(x, w, labels):
        if dim is not None:
            x, labels = gshard.split(x, dim, 8), gshard.split(labels, dim, 8) if dim < 2 else labels
        return f(x, w, labels)

    return marked


def merged(f, *arguments):
    equations = [e for e in gshard.stages.trace(f, *arguments).block.walk() if e.name == "reshape"]
    return [
        e.outputs[0].shape
        for e in equations
        if any(len(g) > 1 for g in groups_of(e.inputs[0].shape, e.outputs[0].shape) or ())
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_merged_and_nothing_is_sent_but_sums(name):
    if name != "windows":  # it puts them side by side in the end
        assert merged(PROGRAMS[name], X, W, LABELS) == []
    lowered = gshard.jit(split(PROGRAMS[name], 1), mesh=gshard.Mesh.abstract(devices=8)).lower(X, W, LABELS)
    kinds = {c.kind for c in lowered.spmd.collectives}
    assert kinds <= ({"all_reduce", "reduce_scatter"} if name in SUMS else set())


@pytest.mark.parametrize(("name", "dim"), crossed(list(PROGRAMS), [None, 0, 1, 2], one_in=6))
@pytest.mark.one_in(3)
def test_the_same_comes_out(name, dim):
    f = PROGRAMS[name]
    near(gshard.jit(split(f, dim), mesh=8)(X, W, LABELS), jax.jit(f)(X, W, LABELS), 2e-6, 1e-4)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("loss", "embedded", "in_a_loop", "twice")])
@pytest.mark.one_in(3)
def test_gradients_are_the_same_and_send_sums_only(name):
    f = PROGRAMS[name]

    def energy(x, w, labels):
        return jax.grad(lambda x, w: sum(jnp.sum(y * y) for y in jax.tree.leaves(f(x, w, labels))), (0, 1))(x, w)

    marked = gshard.jit(split(energy, 1), mesh=8)
    near_largest(marked(X, W, LABELS), jax.jit(energy)(X, W, LABELS))
    kinds = {c.kind for c in marked.lower(X, W, LABELS).spmd.collectives}
    assert kinds <= {"all_reduce", "reduce_scatter"}


@pytest.mark.parametrize("f", [
    lambda x: x.reshape(-1, D),  # a result
    lambda x: jnp.sort(x.reshape(-1, D), 0),  # along all of it
    lambda x: jnp.cumsum(jnp.sin(x.reshape(-1, D)), 0),
    lambda x: x.reshape(-1, D) + jax.random.normal(jax.random.key(0), (B * S, D)),
    lambda x: gshard.shard(x.reshape(-1, D), jax.P("devices")) * 2,  # the user has a word on it
    lambda x: jnp.sin(x.reshape(-1, D))[1:] * 2,
    lambda x: x.reshape(-1, D) @ jnp.ones((B * S, D)).T @ x.reshape(-1, D),
])  # fmt: skip
def test_what_is_merged_all_the_same_is_merged_where_it_was(f):
    program = gshard.stages.trace(f, X)
    made = [e for e in program.block.equations if e.outputs[0].shape in ((B * S, D), (B, S, D))]
    assert (made[0].name, made[0].inputs) == ("reshape", program.block.inputs)


def test_short_rows_stay_merged():
    """Of (64, 4, 128) on a TPU every tile would be half empty."""

    def flat(x):
        return jnp.tanh(x.reshape(-1, 128) @ jnp.ones((128, 128))).reshape(x.shape)

    assert merged(flat, jnp.ones((64, 4, 128))) == [(256, 128)]
    assert merged(flat, jnp.ones((4, 64, 128))) == []
