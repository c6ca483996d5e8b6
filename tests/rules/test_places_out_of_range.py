"""Indices and windows whose place is known late, or lies beyond an end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard

PROMISE = lax.GatherScatterMode.PROMISE_IN_BOUNDS
MODES = {"promise": PROMISE, "clip": "clip", "drop": "drop"}
ROWS, COLUMNS = np.array([0, 4, -1, 7, 2]), np.array([2, 11, 5, -30, 40])


def looked_up(x, mode):
    return x.at[:, COLUMNS].get(mode=mode), x.at[ROWS, COLUMNS].get(mode=mode)


def updated(x, mode):
    added = x.at[ROWS, COLUMNS].add(np.arange(5.0) - 2, mode=mode)
    return x.at[:, COLUMNS].set(np.arange(5.0), mode=mode), added, x.at[np.array(3), np.array(11)].set(9.0, mode=mode)


def loss(found):
    return sum(jnp.sum(jnp.where(jnp.isfinite(y), y, 0) * (jnp.arange(y.shape[-1]) % 7 - 2.0)) for y in found)


def marked(dim, f):
    return lambda x: f(gshard.split(x, dim, 8 if dim else 4))


def same_in_three_calls(f, want, x):
    step = gshard.jit(f, mesh={"a": 4, "b": 2})
    for given in (x, jnp.asarray(x), jax.device_put(x, jax.devices()[3])):
        jax.tree.map(np.testing.assert_array_equal, step(given), want)


@pytest.fixture
def x():
    return np.arange(-20, 24, dtype=np.float32).reshape(4, 11)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.one_in(2)
def test_look_ups_their_gradients_and_updates(mode, dim, x):
    """In each mode; ``gather`` and ``scatter`` in ``harness.py`` have windows, other dtypes and more dimensions."""
    of_all = (
        lambda x: looked_up(x, MODES[mode]), lambda x: updated(x, MODES[mode]),
        jax.grad(lambda x: loss(looked_up(x, MODES[mode]))),
    )  # fmt: skip
    with jax.disable_jit():
        wanted = [f(jnp.asarray(x)) for f in of_all]
    for f, want in zip(of_all, wanted, strict=True):
        same_in_three_calls(marked(dim, f), want, x)


def written(x, updates, *starts):
    return lax.dynamic_update_slice(gshard.split(x, 0, 8), updates, starts)


@pytest.mark.parametrize("n, m", [(16, 1), (16, 3), (13, 1), (13, 2), (13, 11), (3, 2), (24, 3)])
@pytest.mark.one_in(2)
def test_a_window_is_written_wherever_it_begins(n, m):
    """Inside of a part, over the border of two or of many, and beyond both ends, where it is moved inside."""
    rng = np.random.default_rng(n + m)
    x, updates = (rng.integers(-9, 9, (rows, columns)) for rows, columns in ((n, 5), (m, 3)))
    run = gshard.jit(written, mesh=8)
    for i in (-3, 0, 1, 2, 5, 7, n - m, n - 1, n + 4):
        for j in (0, 2, 9):
            expected = lax.dynamic_update_slice(jnp.asarray(x), jnp.asarray(updates), (i, j))
            np.testing.assert_array_equal(run(x, updates, np.int32(i), np.int32(j)), expected)


def test_no_more_than_the_window_is_touched():
    """A position of a cache that is split over its length, and donated."""
    cache, row = jax.ShapeDtypeStruct((65536, 128), "float32"), jax.ShapeDtypeStruct((1, 128), "float32")
    at = jax.ShapeDtypeStruct((), "int32")
    compiled = gshard.jit(written, mesh=8, donate_argnums=0).lower(cache, row, at, at).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096
    costs = compiled.cost_analysis()
    assert (costs[0] if isinstance(costs, list) else costs)["bytes accessed"] < 16 * 128 * 4
