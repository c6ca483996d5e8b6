"""What a loop needs in the same place in every round is brought there once, as far as memory allows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from checked_calls import near
from gshard import split

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 32)).astype(np.float32)
W = (RNG.standard_normal((32, 32)) / 8).astype(np.float32)
PART = W.nbytes // 8


def scanned(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=10)[0]


def until(x, w):
    body = lambda s: (s[0] + 1, jnp.tanh(s[1] @ w))  # noqa: E731
    return jax.lax.while_loop(lambda s: (s[0] < 10) & (jnp.abs(s[1]).max() > 0), body, (0, x))[1]


@pytest.mark.parametrize("f", [
    scanned, until,
    lambda x, w: jax.lax.fori_loop(0, 10, lambda _, c: jnp.tanh(c @ w), x),
    lambda x, w: jax.lax.scan(lambda c, _: (scanned(c, w), None), x, None, length=2)[0],
], ids=["scan", "while", "fori", "nested"])  # fmt: skip
def test_a_weight_is_gathered_once_for_all_rounds(f):
    jitted = gshard.jit(lambda x, w: f(split(x, 0, 8), split(w, 0, 8)), mesh=8)
    gathers = [c for c in jitted.lower(X, W).spmd.collectives if c.kind == "all_gather"]
    assert [(c.times, c.bytes) for c in gathers] == [(1, 7 * PART)]
    np.testing.assert_allclose(np.asarray(jitted(X, W)), jax.jit(f)(X, W), rtol=1e-5, atol=1e-6)


def test_so_it_is_in_the_backward_loop_and_its_gradient_is_scattered_once():
    def gradients(x, w):
        return jax.grad(lambda x, w: (scanned(split(x, 0, 8), split(w, 0, 8)) ** 2).sum(), (0, 1))(x, w)

    jitted = gshard.jit(gradients, mesh=8)
    sent = jitted.lower(X, W).spmd.collectives
    assert sorted((c.kind, c.times, c.bytes) for c in sent) == [
        ("all_gather", 1, 7 * PART),
        ("reduce_scatter", 1, 7 * PART),
    ]
    near(jitted(X, W), jax.jit(jax.grad(lambda x, w: (scanned(x, w) ** 2).sum(), (0, 1)))(X, W), 1e-4, 1e-5)


LAYERS = 12


def test_a_step_that_gathers_layer_by_layer_does_not_come_to_hold_all_layers():
    """Micro-batches through layers whose weights are split: what stays gathered is no more than one round's largest."""
    weights = [(RNG.standard_normal((128, 128)) / 12).astype(np.float32) for _ in range(LAYERS)]
    batches = RNG.standard_normal((6, 1024, 128)).astype(np.float32)

    def f(batches, weights):
        weights, batches = split(weights, 0, 8), split(batches, 1, 8)

        def one(total, x):
            for w in weights:
                x = jnp.tanh(x @ w)
            return total + x.sum(), None

        return jax.lax.scan(one, jnp.float32(0), batches)[0]

    lowered = gshard.jit(f, mesh=8).lower(batches, weights)
    (loop,) = [e for e in lowered.program.block.equations if e.name == "scan"]
    held = [v for v in loop.blocks[0].inputs if v.shape == (128, 128)]
    whole = [v for v in held if not any(lowered.plan.sharding(v).dims)]
    assert len(held) == LAYERS
    assert len(whole) == 1
