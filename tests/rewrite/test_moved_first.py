"""Elementwise work on slices that are laid side by side: done once they lie there, with the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from sampled import crossed

ROW, COLUMNS = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), P(None, "x")
RNG = np.random.default_rng(0)
X = RNG.integers(-99, 99, (6, 16)).astype(np.float32)
X[0, 1], X[3, 12], X[5, 2], X[2, 9], X[1, 15] = -0.0, -0.0, np.inf, np.nan, 0.0


def halves(x):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([-b, a], -1)


def halves_by_slices(x):
    n = x.shape[-1] // 2
    return jnp.concatenate([-1 * x[..., n:], x[..., :n]], -1)


def backwards(x):
    """What derivatives make of halves that change places: a sum of what zeros are put to."""
    n = x.shape[-1] // 2
    zero = x.dtype.type(0)
    return lax.pad(x[..., n:], zero, ((0, 0, 0), (0, n, 0))) + lax.pad(-x[..., :n], zero, ((0, 0, 0), (n, 0, 0)))


def thirds(x):
    return jnp.concatenate([jnp.abs(x[:, 10:]), -jnp.abs(x[:, :4]), x[:, 4:10]], 1)


MOVED = {
    "halves": halves,
    "halves, by slices": halves_by_slices,
    "in derivatives": backwards,
    "thirds": thirds,
    "all of it": lambda x: jnp.concatenate([-x[:, 8:], -x[:, :8]], 1),
    "rows": lambda x: jnp.concatenate([-x[3:], x[:3]]),
}


def same_bits(found, expected):
    """With any NaN as good as any other."""
    found, expected = np.asarray(found), np.asarray(expected)
    np.testing.assert_array_equal(found, expected)
    if found.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(found[~np.isnan(found)]), np.signbit(expected[~np.isnan(expected)]))


@pytest.mark.parametrize(
    ("name", "spec"), crossed(list(MOVED), [P("x"), P(None, "x"), P("y", "x"), P("x", "y")], one_in=5)
)
@pytest.mark.one_in(3)
def test_the_same_bits_on_two_axes_and_in_unequal_parts(name, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for x in (X, np.arange(-48, 48, dtype=np.int32).reshape(6, 16), X[:5, :14]):
        same_bits(gshard.jit(lambda x: MOVED[name](gshard.shard(x, spec)), mesh=mesh)(x), jax.jit(MOVED[name])(x))


@pytest.mark.parametrize("name", ["halves", "halves, by slices", "in derivatives"])
def test_one_message_moves_all(name):
    """Where halves were computed first, each was cut in parts of its own."""
    jitted = gshard.jit(MOVED[name], mesh=ROW, in_shardings=COLUMNS, out_shardings=COLUMNS)
    (sent,) = jitted.lower(X).spmd.collectives
    assert (sent.kind, sent.bytes) == ("collective_permute", X.nbytes // 8)


def test_the_gradient_moves_once_too(rng):
    x, y = (rng.standard_normal((6, 16)).astype(np.float32) for _ in range(2))
    for f in (halves, halves_by_slices):
        back = jax.grad(lambda x, y, f=f: jnp.sum(f(x) * y))
        specs = {"in_shardings": (COLUMNS, COLUMNS), "out_shardings": COLUMNS}
        jitted = gshard.jit(back, mesh=ROW, **specs)
        (sent,) = jitted.lower(x, y).spmd.collectives
        assert (sent.kind, sent.bytes) == ("collective_permute", x.nbytes // 8)
        np.testing.assert_array_equal(jitted(x, y), back(x, y))


@pytest.mark.parametrize("name", [
    "two arrays", "read elsewhere", "much for little", "another type",
])  # fmt: skip
def test_what_stays_as_it_is(name):
    stays = {
        "two arrays": lambda x: jnp.concatenate([-x[:, 8:], (x * 2)[:, :8]], 1),
        "read elsewhere": lambda x: (lambda b: (jnp.concatenate([b, x[:, :8]], 1), b))(-x[:, 8:]),
        "much for little": lambda x: jnp.concatenate([jnp.exp(x[:, 15:]), x[:, :15]], 1),
        "another type": lambda x: jnp.concatenate([x[:, 8:].astype(jnp.int8).astype(jnp.float32), x[:, :8]], 1),
    }
    program = gshard.jit(stays[name], mesh=8).lower(X).program
    assert not any(e.name == "select_n" for e in program.block.equations)
