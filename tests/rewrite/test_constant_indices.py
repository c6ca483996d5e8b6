"""Look-ups at indices that follow from the program: what they become, and that it computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.testing import assert_proved

N, M = 16, 13
RNG = np.random.default_rng(0)
X = RNG.integers(-99, 99, (N, M)).astype(np.float32)
X[3, 4], X[5, 6], X[7, 8] = -0.0, np.inf, np.nan
LABELS = RNG.integers(-M, M, N).astype(np.int32)
TURNED = np.array([*range(5, N), *range(5)])
MIXED = RNG.permutation(N)
TWICE = np.repeat(np.arange(N), 2)


def descended(f):
    return jax.grad(lambda x: jnp.sum(f(jnp.where(jnp.isfinite(x), x, 0.0)) ** 2) / 2)


def halves(x):
    return x.at[1:-1, 2:].set(x[1:-1, 2:] / 2)


LOOKED_UP = {
    "labels": (lambda x: x[jnp.arange(N), LABELS], {"gather"}),
    "labels written": (lambda x: x.at[jnp.arange(N), LABELS].set(1.0), {"scatter"}),
    "labels added to": (lambda x: x.at[jnp.arange(N), LABELS].add(1.0), {"scatter-add"}),
    "labels of two dimensions": (
        lambda x: x.reshape(4, 4, M)[jnp.arange(4)[:, None], jnp.arange(4), LABELS.reshape(4, 4)],
        {"gather"},
    ),
    "inside set": (lambda x: x.at[1:-1, 2:].set(x[1:-1, 2:] / 2), set()),
    "inside added to": (lambda x: x.at[1:-1].add(x[:-2]), set()),
    "inside at most": (lambda x: x.at[2:].min(0.0), set()),
    "every second": (lambda x: x.at[::2].add(1.0), set()),
    "one row": (lambda x: x.at[1].set(0.0), {"scatter"}),
    "one row read": (lambda x: x.at[jnp.array(1)].get(), set()),
    "beyond the end": (lambda x: x.at[N + 4].set(1.0), {"scatter"}),
    "some beyond the end": (lambda x: x.at[jnp.arange(0, 2 * N, 3)].set(1.0), {"scatter"}),
    "backwards": (lambda x: x[jnp.arange(N - 1, -1, -1)], set()),
    "each twice": (lambda x: x[TWICE], set()),
    "turned": (lambda x: x[TURNED], set()),
    "turned, written": (lambda x: x.at[TURNED].set(2 * x), {"scatter"}),
    "all of it": (lambda x: x.at[jnp.array([0])].set(x[None, 0]).at[0:].set(x * 2), {"scatter"}),
    "turned, added to": (lambda x: x.at[TURNED].add(2 * x), {"scatter-add"}),
    "few": (lambda x: x[np.array([3, 1, 2])], {"gather"}),
    "mixed": (lambda x: x[MIXED], set()),
    "mapped": (lambda x: jax.vmap(lambda row: row.at[1:-1].set(0.0))(x), set()),
    "in a loop": (lambda x: jax.lax.fori_loop(0, 3, lambda _, x: halves(x), x), set()),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_what_they_become(name):
    f, left = LOOKED_UP[name]
    names = {e.name for e in gshard.stages.trace(f, X).block.walk()}
    assert names & {"gather", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"} == left


def all_of(functions, dim):
    return lambda x: {name: f(x if dim is None else gshard.split(x, dim, 8)) for name, f in functions.items()}


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.one_in(3)
def test_the_same_comes_out(dim):
    functions = {name: f for name, (f, _) in LOOKED_UP.items()}
    expected = jax.jit(all_of(functions, None))(X)
    for name, found in gshard.jit(all_of(functions, dim), mesh=8)(X).items():
        np.testing.assert_array_equal(found, expected[name], name)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected[name]), name)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("labels", 0), ("labels written", 0), ("labels added to", 0), ("every second", 0),
        ("each twice", 0), ("inside set", 2 * M * 4),
    ],
)  # fmt: skip
def test_nothing_is_gathered(name, most):
    f, _ = LOOKED_UP[name]
    for g in (f, descended(f)) if name != "labels written" else (f,):
        lowered = gshard.jit(lambda x, g=g: g(gshard.split(x, 0, 8)), mesh=gshard.Mesh.abstract(devices=8)).lower(X)
        sent = [c.bytes * c.times for c in lowered.spmd.collectives]
        assert sum(sent) <= 3 * most
        assert "all_gather" not in {c.kind for c in lowered.spmd.collectives}


@pytest.mark.parametrize("mapped", [False, True])
def test_one_index_in_a_part_that_was_sliced_out(mapped):
    """XLA, given an index that is out of range in a slice, reads beyond it (openxla/xla#49121)."""
    x = np.arange(6 * M, dtype=np.int32).reshape(6, M)

    def f(x, i, updates):
        y = gshard.split(x, 1, 8).T.at[i]
        written = [getattr(y, write)(updates) for write in ("set", "add", "multiply", "min", "max")]
        return jnp.stack([*written, y.apply(lambda v: 3 * v)])

    run, peer = (jax.vmap(f), jax.vmap(f)) if mapped else (f, f)
    run, peer = gshard.jit(run, mesh=8), jax.jit(peer)
    for at in (-1, 0, 5, M - 1, M):
        arguments = x, np.array([at], np.int32), np.full((1, 6), 40, np.int32)
        arguments = jax.tree.map(lambda a: a[None], arguments) if mapped else arguments
        np.testing.assert_array_equal(run(*arguments), peer(*arguments))


def diffused(x):
    def step(x, _):
        return x.at[1:-1].set(0.5 * x[1:-1] + 0.25 * (x[2:] + x[:-2])), None

    return jax.lax.scan(step, x, None, length=3)[0]


def looked_up_in_turns(x):
    """Indices that come from outside into a while loop and a branch."""
    at = jnp.arange(N)[::-1]

    def step(carry):
        n, x = carry
        return n + 1, jax.lax.cond(n % 2 == 0, lambda x: jnp.sin(x[at]), lambda x: x[at] * 2, x)

    return jax.lax.while_loop(lambda carry: carry[0] < at[3] // 7, step, (0, x))[1]


@pytest.mark.parametrize("f", [diffused, looked_up_in_turns])
def test_indices_from_outside_of_a_loop(f):
    def both(x):
        return f(x), jax.grad(lambda x: jnp.sum(f(x) ** 2))(x) if f is diffused else None

    marked = gshard.jit(lambda x: both(gshard.split(x, 0, 8)), mesh=8)
    x = RNG.standard_normal((N, 4)).astype(np.float32)
    assert_proved(marked, (x,))
    kinds = {c.kind for c in marked.lower(x).spmd.collectives}
    assert kinds == {"collective_permute"}, "borders, and parts that change places"


@pytest.mark.parametrize("size", [8, 16, 24, 32, 40, 48, 64])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.one_in(3)
def test_images_made_larger_and_smaller(size, dtype):
    """Indices that are computed with floats: exact for powers of two, and left to the device otherwise."""
    x = RNG.integers(-99, 99, (2, 16, 16, 3)).astype(dtype)

    def resized(x):
        return jax.image.resize(x, (2, size, size, 3), "nearest")

    marked = gshard.jit(lambda x: gshard.split(resized(gshard.split(x, 1, 8)), 1, 8), mesh=8)
    assert_proved(marked, (x,))
    sent = sum(c.total_bytes for c in marked.lower(x).spmd.collectives)
    assert not sent if size in (8, 16, 32, 64) else sent


def counted(n):
    return jax.lax.iota(np.float32, n)


@pytest.mark.parametrize(("f", "known"), [
    (lambda: jnp.floor(counted(16) / 2).astype(int), True),
    (lambda: jnp.floor(counted(8) / 3).astype(int), False),  # thirds are rounded
    (lambda: (counted(8) * 0.1).astype(int), False),
    (lambda: 7 - jnp.ceil(counted(8) * 1.0 - 0.25).astype(int), True),
    (lambda: jnp.where(counted(8) > 2.5, jnp.arange(8) - 3, jnp.arange(8) + 5), True),
    (lambda: (counted(8) + 2.0**24).astype(int) % 7, False),  # no longer exact
    (lambda: jnp.sqrt(counted(8)).astype(int), False),
])  # fmt: skip
def test_floats_are_followed_where_they_are_exact(f, known):
    program = gshard.stages.trace(lambda x: x[f()], jnp.zeros((8, 2)))
    assert ("gather" not in {e.name for e in program.block.walk()}) == known
