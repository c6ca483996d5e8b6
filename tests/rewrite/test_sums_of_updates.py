"""Sums of what was scattered: they are sums of the updates, and the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.tracing.trace import trace

MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
LABELS = np.array([0, 12, 5, 13, -1, -14], np.int32)


def scattered(u, labels, mode, start=0.0, dtype=jnp.float32):
    rows = jnp.arange(6)[:, None]
    return jnp.full((6, 13), start, dtype).at[rows, labels].add(u, mode=mode)


def updates(*shape):
    u = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    u[3, 0], u[1, 0], u[0, 0] = np.nan, np.inf, -0.0
    return u


@pytest.mark.parametrize("mode", ["drop", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.one_in(3)
def test_the_same_bits(mode, count, negated):
    labels = np.stack([np.roll(LABELS, i) for i in range(count)], 1)
    labels = np.clip(labels, 0, 12) if mode == "promise_in_bounds" else labels

    def f(u):
        x = scattered(u, labels, mode)
        return (-x if negated else x).sum(1)

    u = updates(6, count)
    whole, ours = np.asarray(jax.jit(f)(u)), np.asarray(gshard.jit(f, mesh=MESH)(u))
    np.testing.assert_array_equal(whole, ours)
    np.testing.assert_array_equal(np.signbit(whole), np.signbit(ours))
    if mode != "promise_in_bounds":
        assert "scatter-add" not in {e.name for e in trace(f, u).block.equations}


@pytest.mark.parametrize("axes", [0, (0, 1), 1])
def test_others_stay(axes):
    start = 0.0 if axes != 1 else 2.0
    u = updates(6, 1)

    def f(u):
        return scattered(u, LABELS[:, None], "drop", start).sum(axes)

    assert "scatter-add" in {e.name for e in trace(f, u).block.equations}
    np.testing.assert_array_equal(jax.jit(f)(u), gshard.jit(f, mesh=MESH)(u))
