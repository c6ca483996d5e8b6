"""Indices and windows whose place is known late, or lies beyond an end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from sampled import crossed

PROMISE = lax.GatherScatterMode.PROMISE_IN_BOUNDS
MODES = {"promise": PROMISE, "clip": "clip", "drop": "drop"}
ROWS, COLUMNS = np.array([0, 4, -1, 7, 2]), np.array([2, 11, 5, -30, 40])


def windows(mode):
    """Windows of three columns, some of which reach over an end."""
    numbers = lax.GatherDimensionNumbers((1, 2), (), (1,))
    at = np.array([[3], [9], [-2], [8], [50]], np.int32)
    mode = "fill" if mode == "drop" else mode
    return lambda x: lax.gather(x, at, numbers, (4, 3), mode=mode)


def added_windows(mode):
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (1,))
    at, new = np.array([[3], [9], [-2], [8], [50]], np.int32), np.arange(-30, 30).reshape(5, 4, 3)
    return lambda x: lax.scatter_add(x, at, jnp.asarray(new, x.dtype), numbers, mode=mode)


LOOKED_UP = {
    "columns": lambda mode: lambda x: x.at[:, COLUMNS].get(mode=mode),
    "both": lambda mode: lambda x: x.at[ROWS, COLUMNS].get(mode=mode),
    "vmap": lambda mode: (
        lambda x: jax.vmap(lambda row, at: row.at[at].get(mode=mode))(
            x, np.stack([COLUMNS, COLUMNS + 1, COLUMNS - 3, -COLUMNS])
        )
    ),
    "scan": lambda mode: lambda x: lax.scan(lambda s, row: (s + row.at[COLUMNS].get(mode=mode), s), jnp.ones(5), x),
    "unsigned": lambda mode: lambda x: x.at[:, np.array([2, 250], np.uint8)].get(mode=mode),
    "windows": windows,
}
WRITTEN = {
    "set": lambda mode: lambda x: x.at[:, COLUMNS].set(np.arange(5.0), mode=mode),
    "set one element": lambda mode: lambda x: x.at[np.array(3), np.array(11)].set(9.0, mode=mode),
    "add both": lambda mode: lambda x: x.at[ROWS, COLUMNS].add(np.arange(5.0) - 2, mode=mode),
    "vmap": lambda mode: (
        lambda x: jax.vmap(lambda row, at: row.at[at].add(2.0, mode=mode))(
            x, np.stack([COLUMNS, COLUMNS + 1, COLUMNS - 3, -COLUMNS])
        )
    ),
    "windows": added_windows,
}


def marked(dim, f):
    return lambda x: f(gshard.split(x, dim, 8 if dim else 4))


def same_in_three_calls(f, want, x):
    step = gshard.jit(f, mesh={"a": 4, "b": 2})
    for given in (x, jnp.asarray(x), jax.device_put(x, jax.devices()[3])):
        jax.tree.map(np.testing.assert_array_equal, step(given), want)


@pytest.fixture
def x():
    return np.arange(-20, 24, dtype=np.float32).reshape(4, 11)


@pytest.mark.parametrize("name, mode, dim", crossed(list(LOOKED_UP), list(MODES), [0, 1], one_in=6))
@pytest.mark.one_in(3)
def test_look_ups_and_their_gradients(name, mode, dim, x):
    f = LOOKED_UP[name](MODES[mode])

    def loss(x, f=f):
        leaves = jax.tree.leaves(f(x))
        return sum(
            jnp.sum(jnp.where(jnp.isfinite(y), y, 0) * (jnp.arange(y.size) % 7 - 2.0).reshape(y.shape)) for y in leaves
        )

    with jax.disable_jit(name not in ("scan", "cond")):
        want, slopes = f(jnp.asarray(x)), jax.grad(loss)(jnp.asarray(x))
    same_in_three_calls(marked(dim, f), want, x)
    same_in_three_calls(jax.grad(marked(dim, loss)), slopes, x)


@pytest.mark.parametrize("name, mode, dim", crossed(list(WRITTEN), list(MODES), [0, 1], one_in=6))
@pytest.mark.one_in(3)
def test_updates(name, mode, dim, x):
    f = WRITTEN[name](MODES[mode])
    with jax.disable_jit():
        want = f(jnp.asarray(x))
    same_in_three_calls(marked(dim, f), want, x)


@pytest.mark.parametrize("mode", MODES)
def test_of_joined_arrays(mode, x):
    """Arrays that are joined along the split dimension are looked up in, and written to, in pieces."""
    more = np.arange(3.0, dtype=np.float32) - 1

    def looked_up(x):
        joined = jnp.concatenate([more, gshard.split(x.reshape(-1), 0, 8)])
        return joined.at[np.array([0, 2, 46, 47, 99, -60])].get(mode=MODES[mode])

    def written(x):
        joined = jnp.concatenate([jnp.asarray(more), gshard.split(x.reshape(-1), 0, 8)])
        return joined.at[np.array([0, 2, 46, 47, 99, -60])].add(5.0, mode=MODES[mode]).sum()

    def loss(x):
        y = looked_up(x)
        return jnp.sum(jnp.where(jnp.isfinite(y), y, 0) ** 2)

    with jax.disable_jit():
        want = looked_up(x), written(jnp.asarray(x)), jax.grad(loss)(jnp.asarray(x))
    for f, right in zip((looked_up, written, jax.grad(loss)), want, strict=True):
        same_in_three_calls(f, right, x)


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
