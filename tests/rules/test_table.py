"""Tables: arrays that follow from positions alone: almost nothing is sent for them, and elements are what they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from gshard.stages import propagate, trace
from gshard.testing.rule_checks import emit
from sampled import crossed

L, D = 24, 10
X = np.random.default_rng(0).standard_normal((L, D)).astype(np.float32)


def sines(x, k):
    angles = jnp.arange(L)[:, None] / 100.0 ** (jnp.arange(D // 2) / 5)
    return x + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1)


def in_turns(x, k):
    """Sines and cosines next to each other."""
    angles = jnp.arange(L)[:, None] * (jnp.arange(D // 2) + 1.5)
    return x * jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(L, D)


def around(x, k):
    """Padded on both sides and within, by a number that comes from outside; then cut."""
    inner = jnp.arange(2 * L, dtype=jnp.float32).reshape(L, 2) ** 2
    return x + lax.pad(inner, k, ((-3, 3, 0), (1, 0, 7)))[:, :D]


def many(x, k):
    """More arrays side by side than devices: all of it is computed, and a part taken."""
    return x + jnp.concatenate([jnp.full((2, D), i) * jnp.arange(D) for i in range(L // 2)])


def every_third(x, k):
    return x + (jnp.arange(3 * L)[1::3, None] + jnp.arange(3 * D)[None, ::-3])


def reordered(x, k):
    """Reshaped in another order of dimensions."""
    column = lax.reshape(jnp.sqrt(jnp.arange(1.0, L + 1)).reshape(4, L // 4), (L,), dimensions=(1, 0))
    return x + jnp.concatenate([column[3:], jnp.ones(3)])[:, None]


def of_bytes(x, k):
    mask = jnp.concatenate([jnp.zeros(4, jnp.bool_), jnp.arange(L - 4) % 3 == 0])
    count = jnp.concatenate([jnp.arange(7, dtype=jnp.int8), jnp.arange(L - 7, dtype=jnp.int8)[::-1]])
    return jnp.where(mask[:, None], x, count[:, None])


def infinite(x, k):
    """Zeros keep their signs, and nothing that is not chosen shows."""
    ramp = 1 / (jnp.arange(L - 4) - 3.0)
    return x + jnp.concatenate([-jnp.zeros(4), ramp])[::-1, None]


def in_a_loop(x, k):
    def body(x, i):
        return x * jnp.concatenate([jnp.arange(5.0) + i, jnp.arange(L - 5.0) * k])[:, None] + 1, None

    return lax.scan(body, x, jnp.arange(3.0))[0]


def gradient(x, k):
    """Of a product with a table that is reversed, and one in pieces."""

    def loss(x):
        fading, rising = jnp.exp(-jnp.arange(L) / 7)[::-1, None], jnp.linspace(0, 1, 5)
        return (jnp.sin(x * fading) * x * jnp.concatenate([rising, jnp.ones(L - 5)])[:, None]).sum()

    return jax.grad(loss)(x)


ALL = [sines, in_turns, around, many, every_third, reordered, of_bytes, infinite, in_a_loop, gradient]
SPLITS = {
    "rows": (P("x", None), {"x": 8}), "columns": (P(None, "x"), {"x": 8}), "uneven rows": (P("x", None), {"x": 5}),
    "both": (P("x", "y"), {"x": 4, "y": 2}), "both, uneven": (P("y", "x"), {"x": 3, "y": 2}),
}  # fmt: skip


@pytest.mark.parametrize(("f", "split"), crossed(ALL, list(SPLITS), one_in=5))
@pytest.mark.one_in(3)
def test_it_is_the_same_and_almost_nothing_is_sent(f, split):
    spec, axes = SPLITS[split]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[: int(np.prod([*axes.values()]))])
    k = np.float32(1.25)

    def marked(x, k):
        return gshard.shard(f(gshard.shard(x, spec), k), spec)

    plan = propagate(trace(marked, X, k), gshard.Mesh.of(mesh))
    assert sum(c.total_bytes for c in emit(plan).collectives) <= 60
    got, want = np.asarray(gshard.jit(marked, mesh=mesh)(X, k)), np.asarray(jax.jit(f)(X, k))
    assert got.dtype == want.dtype
    assert np.array_equal(np.signbit(got), np.signbit(want))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
