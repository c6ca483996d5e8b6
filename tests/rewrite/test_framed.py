"""Windows that are computed where they were cut from: that it computes the same, and how much is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard.testing import assert_proved

M = 12
ROW = M * 4


def data(n):
    x = np.random.default_rng(n).integers(-99, 99, (n, M)).astype(np.float32)
    x[0, 1], x[3, 4], x[-1, 0], x[n // 2, 2], x[1, 1] = -0.0, -0.0, np.inf, np.nan, -np.inf
    return x


def mean_of_neighbours(x):
    return (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]) / 4


def red_and_black(x):
    x = x.at[1:-1:2, 1:-1:2].set(mean_of_neighbours(x)[::2, ::2])
    return x.at[2:-1:2, 2:-1:2].set(mean_of_neighbours(x)[1::2, 1::2])


def steps(x):
    return lax.fori_loop(0, 3, lambda _, u: u.at[1:-1, 1:-1].set(mean_of_neighbours(u)), x)


# And how many rows each device sends at most, where 32 rows are split over 8 devices; any number for a scatter.
ROWS = {
    "of itself": (lambda x: x.at[3:-5].set(jnp.sin(x[3:-5])), 0),
    "added to itself": (lambda x: x.at[3:-5].add(x[3:-5] * x[3:-5]), 0),
    "half of it": (lambda x: x.at[8:24].multiply(x[8:24]), np.inf),
    "scaled in part": (lambda x: x.at[: x.shape[0] // 2].multiply(-0.5), 0),
    "at a known place": (lambda x: lax.dynamic_update_slice(x, -x[2:-2], (2, 0)), np.inf),
    "at a place beyond the end": (lambda x: lax.dynamic_update_slice(x, -x[2:-2], (99, -3)), np.inf),
    "every third": (lambda x: x.at[::3].set(jnp.abs(x[::3])), 0),
    "every second, of those beside": (lambda x: x.at[1::2].add(2 * x[:-1:2]), 0),
    "a checkerboard": (lambda x: x.at[1::2, ::2].multiply(2.0).at[::2, 1::2].max(x[::2, 1::2] + 1), np.inf),
    "a stencil": (lambda x: x.at[1:-1, 1:-1].set(mean_of_neighbours(x)), 2),
    "a stencil, padded": (lambda x: jnp.pad(mean_of_neighbours(x), 1, constant_values=-0.0), 2),
    "with another number": (lambda x: jnp.pad(x[1:-1] - x[:-2], ((1, 1), (0, 0)), constant_values=x[0, 3]), 2),
    "red and black": (red_and_black, np.inf),
    "compared": (lambda x: jnp.pad(x[1:] > x[:-1], ((1, 0), (0, 0)), constant_values=True), 1),
    "in a loop": (steps, 6),
    "of two, one from elsewhere": (lambda x: jnp.pad(jnp.cumsum(x[1:-1], 1) * x[1:-1], ((1, 1), (0, 0))), 6),
    "read in two ways": (lambda x: jnp.pad(jnp.exp(x[1:] / 99), ((0, 1), (0, 0))) + jnp.exp(x[1:] / 99).sum(), 9),
}


def all_of(parts, dim=0):
    return lambda x: {k: f(x if parts is None else gshard.split(x, dim, parts)) for k, (f, _) in ROWS.items()}


@pytest.mark.parametrize(
    ("n", "parts", "dim"),
    [
        (32, 8, 1), (27, 8, 0), (31, 4, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(32, 8, 0), (30, 4, 0), (27, 2, 0)]),
    ],
)  # fmt: skip
@pytest.mark.one_in(3)
def test_the_same_comes_out(n, parts, dim):
    expected = jax.jit(all_of(None))(data(n))
    for name, found in gshard.jit(all_of(parts, dim), mesh=parts)(data(n)).items():
        loose = 1e-4 if "read" in name else 2e-6 if "itself" in name or "elsewhere" in name else 0
        np.testing.assert_allclose(found, expected[name], rtol=loose, err_msg=name)
        if not loose:
            np.testing.assert_array_equal(np.signbit(found), np.signbit(expected[name]), name)


@pytest.mark.parametrize("name", ROWS)
def test_no_more_is_sent_than_borders(name):
    f, rows = ROWS[name]
    x = jax.ShapeDtypeStruct((32, M), jnp.float32)
    lowered = gshard.jit(lambda x: f(gshard.split(x, 0, 8)), mesh=gshard.Mesh.abstract(devices=8)).lower(x)
    assert sum(c.bytes * c.times for c in lowered.spmd.collectives) <= rows * ROW


@pytest.mark.parametrize("name", ["of itself", "a stencil", "a checkerboard", "every third"])
@pytest.mark.one_in(2)
def test_gradients_are_the_same(name):
    f, _ = ROWS[name]
    x = np.nan_to_num(data(32), posinf=7, neginf=-7)
    assert_proved(gshard.jit(jax.grad(lambda x: (f(gshard.split(x, 0, 8)) ** 2).sum()), mesh=8), (x,))


def test_what_is_marked_is_made():
    def f(x):
        return jnp.pad(gshard.replicate(jnp.sin(x[1:-1])) * 2, ((1, 1), (0, 0)))

    assert [e for e in gshard.stages.trace(f, data(32)).block.equations if e.mark is not None]
    np.testing.assert_array_equal(gshard.jit(f, mesh=8)(data(32)), jax.jit(f)(data(32)))


def test_what_is_computed_in_many_steps_is_followed_no_further_than_is_worth_it():
    def f(x):
        y = x[1:-1]
        for _ in range(2000):
            y = lax.sin(y)
        return jnp.pad(y, ((1, 1), (0, 0)))

    assert gshard.stages.trace(f, data(32)).block.equations[0].name == "slice"


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_what_is_divided_by_zeros_outside_of_windows(dtype):
    x = jnp.arange(1, 30 * M + 1).reshape(30, M).astype(dtype) | 1

    def f(x):
        return x.at[1:-1].set(lax.div(x[2:], x[:-2]) + lax.rem(x[:-2], x[1:-1]))

    np.testing.assert_array_equal(gshard.jit(lambda x: f(gshard.split(x, 0, 8)), mesh=8)(x), jax.jit(f)(x))


def chosen_at(first, last, step):
    """What is padded with one row at each end is taken at some rows that are known."""

    def f(x):
        at = jnp.arange(x.shape[0])
        there = (at >= first) & (at <= last) & (lax.rem(at - first, step) == 0)
        return jnp.where(there[:, None], jnp.pad(jnp.sin(x[1:-1]), ((1, 1), (0, 0)), constant_values=7), x)

    return f


@pytest.mark.parametrize(("first", "last", "step"), [(1, 30, 1), (3, 28, 5), (0, 30, 1), (1, 31, 1), (0, 31, 3)])
def test_what_is_taken_at_known_rows(first, last, step):
    x, f = data(32), chosen_at(first, last, step)
    assert_proved(gshard.jit(lambda x: f(gshard.split(x, 0, 8)), mesh=8), (x,))
