"""What is computed of arrays that are joined with little, or cut a little: the same, and nothing is laid out anew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.rewrite.piecewise import may_begin
from sampled import crossed

MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def data(*shape, dtype=np.float32, seed=0):
    x = np.random.default_rng([seed, *shape]).standard_normal(shape) * 3
    return x.astype(dtype)


def is_near(x, y, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0)))
        np.testing.assert_allclose(a, b, tolerance, tolerance * scale)


def moved(program, n):
    return [e.name for e in program.block.walk() if may_begin(e) and any(n in v.shape for v in (*e.inputs, *e.outputs))]


def ours(f, specs, *arguments):
    jitted = gshard.jit(f, mesh=MESH, in_shardings=specs)
    return jitted(*arguments), jitted.lower(*arguments).plan.program


# How the dimension becomes another one: of two arrays, [3, n] and [3, 2].
JOINED = {
    "in front": lambda x, y: jnp.concatenate([y, x], 1),
    "behind": lambda x, y: jnp.concatenate([x, y], 1),
    "at both ends": lambda x, y: jnp.concatenate([y[:, :1] * 2, x, y], 1),
    "a number in front": lambda x, y: jnp.pad(x, ((0, 0), (1, 0)), constant_values=2),
    "numbers around": lambda x, y: jnp.concatenate([jnp.zeros((3, 2), x.dtype), x, jnp.ones((3, 1), x.dtype)], 1),
    "two halves": lambda x, y: jnp.concatenate([x, x * 2, y], 1),
    "twice": lambda x, y: jnp.concatenate([x, x], 1),
    "less at the end": lambda x, y: x[:, :-3],
    "less in front": lambda x, y: x[:, 2:],
    "less at both ends": lambda x, y: x[:, 1:-2],
    "less, and more": lambda x, y: jnp.concatenate([y, x[:, 2:-1], y[:, 1:] * 2], 1),
    "less, and padded": lambda x, y: jnp.pad(x[:, :-3], ((0, 0), (0, 2)), constant_values=1),
}


def weighted(z):
    return jnp.einsum("as,bs->ab", jax.nn.softmax(z, -1), jnp.tanh(z))


# What is made of it.
CLOSED = {
    "sum": lambda z: jnp.sum(jnp.cos(z) * 2, 1),
    "maximum": lambda z: jnp.max(z, 1),
    "minimum, of all": lambda z: jnp.min(z),
    "product": lambda z: jnp.prod(jnp.sign(z) + 0.5, 1),
    "any": lambda z: jnp.any(z > 2, 1),
    "mean, variance": lambda z: (z.mean(1), z.var(1)),
    "where it is largest": lambda z: jnp.argmax(z, 1),
    "where it is smallest": lambda z: jnp.argmin(z, 1),
    "weighted": weighted,
    "of both kinds": lambda z: z @ jnp.sin(z).T,
    "by positions": lambda z: jnp.sum(z * jnp.arange(z.shape[1]), 1),
    "where it is allowed": lambda z: jnp.max(jnp.where(jnp.arange(z.shape[1]) % 3 > 0, z, -9), 1),
    "turned": lambda z: jnp.sum(jnp.exp(-jnp.square(z.T)), 0),
    "running along the other": lambda z: jnp.cumsum(z, 0).sum(1),
    "sorted along the other": lambda z: jnp.sort(z, 0).sum(1),
    "an element each": lambda z: jnp.take_along_axis(jax.nn.log_softmax(z), jnp.array([[0], [3], [5]]), 1),
    "of each the first ones": lambda z: jnp.take(z, jnp.array([4, 0, -1, 99, -99]), axis=1, mode="fill"),
    "clipped": lambda z: jnp.take(z, jnp.array([4, 0, -1, 99, -99]), axis=1, mode="clip"),
    "compared with labels": lambda z: jnp.sum(jax.nn.log_softmax(z) * jax.nn.one_hot(jnp.array([1, 9, 4]), z.shape[1])),
    "log of sum": lambda z: jax.nn.logsumexp(z, 1),
}


def case(how, what):
    n = 16 + 3 * (sum(map(ord, how + what)) % 9)
    return (lambda x, y: CLOSED[what](JOINED[how](x, y))), data(3, n), data(3, 2, seed=1)


EVERY = [(how, what) for how in JOINED for what in CLOSED]
FEW = EVERY[::7]
SPECS = P(None, "x"), P()


def check(how, what):
    f, x, y = case(how, what)
    found, program = ours(f, SPECS, x, y)
    is_near(found, jax.jit(f)(x, y))
    n, size = x.shape[1], JOINED[how](x, y).shape[1]
    stays = how in ("behind", "less at the end", "two halves", "less, and padded") and -(-n // 8) == -(-size // 8)
    assert stays or size == n or not moved(program, size)


@pytest.mark.parametrize(
    ("how", "what"), [*FEW, *(pytest.param(*both, marks=pytest.mark.slow) for both in EVERY if both not in FEW)]
)
@pytest.mark.one_in(6)
def test_the_same_numbers_and_nothing_is_laid_out_anew(how, what):
    check(how, what)


def ends(f, *arguments):
    def end(*arguments):
        floats = [x for x in jax.tree.leaves(f(*arguments)) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum((jnp.sum(jnp.sin(x)) for x in floats), jnp.zeros(()))

    return jax.grad(end, tuple(i for i, x in enumerate(arguments) if x.dtype.kind == "f"))


@pytest.mark.parametrize(("how", "what"), FEW[1::2])
@pytest.mark.one_in(2)
def test_gradients(how, what):
    f, x, y = case(how, what)
    g = ends(f, x, y)
    found, _ = ours(g, SPECS, x, y)
    is_near(found, jax.jit(g)(x, y), 1e-4)


@pytest.mark.parametrize(("how", "what"), FEW[::3])
@pytest.mark.one_in(3)
def test_what_is_no_number_and_infinite(how, what, rng):
    """In what is cut off, in the small array, in the last elements that are kept."""
    f, x, y = case(how, what)
    x[0, -3:], x[1, :2], x[2, rng.integers(0, x.shape[1])] = np.nan, np.inf, -np.inf
    y[2, 1], y[0, 0] = np.nan, -np.inf
    found, _ = ours(f, SPECS, x, y)
    is_near(found, jax.jit(f)(x, y))


@pytest.mark.parametrize(
    ("dtype", "how"),
    crossed(
        [jnp.int32, jnp.int8, jnp.uint32, jnp.bfloat16, jnp.bool_],
        ["in front", "at both ends", "less in front", "less at the end", "a number in front"],
        one_in=6,
    ),
)
@pytest.mark.one_in(2)
def test_other_types(dtype, how):
    x, y = (np.abs(data(3, n)).astype(dtype) for n in (40, 2))
    whole = not jnp.issubdtype(dtype, jnp.inexact)

    def f(x, y):
        z = JOINED[how](x, y)
        every = [jnp.max(z, 1), jnp.min(z, 1), jnp.argmax(z, 1), jnp.sum(z, 1), z[:, :].astype(jnp.float32).sum()]
        return [*every, jnp.prod(z, 1), jnp.take(z, jnp.array([1, -1, 999]), 1, mode="fill")] if whole else every

    found, _ = ours(f, SPECS, x, y)
    is_near(found, jax.jit(f)(x, y), 2e-2)


def cached(q, keys, values, key, value):
    k, v = jnp.concatenate([keys, key], 1), jnp.concatenate([values, value], 1)
    return jnp.einsum("bs,bsd->bd", jax.nn.softmax(jnp.einsum("bd,bsd->bs", q, k)), v)


def layers(q, keys, values, key, value):
    def layer(q, own):
        return cached(q, *own), None

    return jax.lax.scan(layer, q, jax.tree.map(lambda x: jnp.stack([x, x * 2]), (keys, values, key, value)))[0]


CACHE = data(2, 4), data(2, 40, 4), data(2, 40, 4, seed=1), data(2, 3, 4), data(2, 3, 4, seed=1)
OVER_CACHE = P(), P(None, "x"), P(None, "x"), P(), P()


@pytest.mark.parametrize("f", [cached, layers])
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.one_in(2)
def test_attention_over_a_cache_and_new_keys(f, differentiated):
    f = ends(f, *CACHE) if differentiated else f
    found, program = ours(f, OVER_CACHE, *CACHE)
    is_near(found, jax.jit(f)(*CACHE), 1e-4)
    along_keys = [n for n in moved(program, 43) if n != "slice"]
    assert not along_keys or differentiated


# What leaves along the dimension, or is joined otherwise than what it meets.
OPEN = {
    "a result": lambda x, y: jnp.sin(jnp.concatenate([y, x], 1)),
    "also a result": lambda x, y: (jnp.concatenate([y, x], 1), jnp.concatenate([y, x], 1).sum()),
    "sorted": lambda x, y: jnp.sort(jnp.concatenate([y, x], 1), 1).max(1),
    "running": lambda x, y: jnp.cumsum(jnp.concatenate([y, x], 1), 1).max(1),
    "otherwise": lambda x, y: (jnp.concatenate([y, x], 1) * jnp.concatenate([x, y], 1)).sum(1),
    "both ways": lambda x, y: jnp.tanh(jnp.concatenate([y, x], 1).T @ jnp.concatenate([y, x], 1)).sum(),
    "marked": lambda x, y: gshard.split(jnp.concatenate([y, x], 1), 1, 8).sum(1),
}


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.one_in(2)
def test_what_is_not_closed_stays(name):
    x, y = data(3, 40), data(3, 2)
    found, program = ours(OPEN[name], SPECS, x, y)
    is_near(found, jax.jit(OPEN[name])(x, y))
    assert moved(program, 42)
