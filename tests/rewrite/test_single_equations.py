"""Rewrites of one equation or of a scan: what becomes of it, what is sent, and that it computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from gshard.tracing.trace import trace
from sampled import crossed

RNG = np.random.default_rng(0)
GRID = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def recurrence(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def last_that_counts(left, right):
    return jnp.where(right == 0, left, right)


def within_segments(left, right):
    """Sums that begin anew where a flag is set: neither commutes nor is the same from the other end."""
    return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])


def numbers(*shape):
    return RNG.integers(-9, 9, shape).astype(np.int32)


def flags(*shape):
    return RNG.random(shape) < 0.2


F = RNG.uniform(-1, 1, (37, 6)).astype(np.float32)
SCANS = {
    "sums": (lambda x: lax.associative_scan(jnp.add, x), (numbers(24, 6),)),
    "maxima": (lambda x: lax.associative_scan(jnp.maximum, x), (F,)),
    "along the second": (lambda x: lax.associative_scan(jnp.minimum, x, axis=1), (numbers(6, 21),)),
    "backwards": (lambda x: lax.associative_scan(jnp.add, x, reverse=True), (numbers(24, 6),)),
    "a linear recurrence": (lambda a, b: lax.associative_scan(recurrence, (a, b)), (F, F[::-1].copy())),
    "its states alone": (lambda a, b: lax.associative_scan(recurrence, (a, b))[1], (F[:16], F[-16:])),
    "the last that counts": (lambda x: lax.associative_scan(last_that_counts, x), (numbers(19, 6) // 6,)),
    "within segments": (lambda f, x: lax.associative_scan(within_segments, (f, x))[1], (flags(40, 6), numbers(40, 6))),
    "any before": (lambda x: lax.associative_scan(jnp.logical_or, x), (flags(16, 6),)),
    "with a number": (lambda x: lax.associative_scan(lambda a, b: a + b + 3 * a * b, x), (numbers(9, 6) % 2,)),
    "few for many": (lambda x: lax.associative_scan(jnp.add, x), (numbers(9, 2),)),
    "in a loop": (
        lambda x: lax.scan(lambda c, _: (lax.associative_scan(jnp.maximum, c) - 1, None), x, length=3)[0], (F,),
    ),
    "for each": (jax.vmap(lambda x: lax.associative_scan(jnp.add, x)), (numbers(6, 24),)),
}  # fmt: skip


def names(function, arguments):
    return [e.name for e in trace(function, *arguments).block.walk()]


@pytest.mark.parametrize(("name", "spec"), crossed(list(SCANS), [P(("x", "y")), P("y", "x")], one_in=4))
@pytest.mark.one_in(2)
def test_the_same_on_two_axes_and_in_unequal_parts(name, spec):
    function, arguments = SCANS[name]
    jitted = gshard.jit(lambda *xs: function(*(gshard.shard(x, spec) for x in xs)), mesh=GRID)
    near(jitted(*arguments), jax.jit(function)(*arguments), 1e-5, 1e-6)


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


def whole(*shape):
    return numbers(*shape).astype(np.float32)


def gradient(subscripts, **options):
    return jax.grad(lambda w, x: jnp.sum(jnp.einsum(subscripts, x, w, **options) ** 2))


def product(x, y, *permutation, batch=True):
    dims = (((2,), (1,)), ((0,), (0,))) if batch else (((2,), (1,)), ((), ()))
    return lax.dot_general(x, y, dims).transpose(permutation)


def mixed(x, y):
    dims = ((1,), (0,)), ((), ())
    made = lax.dot_general(x, y, dims, (lax.Precision.HIGHEST, lax.Precision.DEFAULT), preferred_element_type="float32")
    return made.T


SWAPPED = {
    "a matrix": (gradient("bm,mh->bh"), (whole(5, 7), whole(6, 5))),
    "experts": (gradient("egm,emh->egh"), (whole(4, 5, 7), whole(4, 6, 5))),
    "experts by group": (gradient("gecm,emh->egch"), (whole(4, 5, 7), whole(3, 4, 6, 5))),
    "heads": (gradient("bsm,mhd->bshd"), (whole(5, 2, 7), whole(4, 3, 5))),
    "in a loop": (
        lambda w, x: lax.scan(lambda c, w: (c, gradient("bm,mh->bh")(w, x)), 0.0, w)[1],
        (whole(3, 5, 7), whole(6, 5)),
    ),
    "precisions of each operand": (mixed, (whole(4, 6).astype(jnp.bfloat16), whole(6, 8))),
}
OTHERS = {
    "read as it is, too": (lambda x, y: (jnp.cos(x @ y), (x @ y).T), (whole(4, 6), whole(6, 8))),
    "a result as it is": (lambda x, y: [made := x @ y, made.T], (whole(4, 6), whole(6, 8))),
    "another order": (lambda x, y: product(x, y, 1, 0, 2), (whole(4, 5, 6), whole(4, 6, 7))),
    "dimensions of one operand, too": (
        lambda x, y: product(x, y, 2, 3, 1, 0, batch=False), (whole(4, 5, 6), whole(4, 6, 7))
    ),
    "an algorithm of the operands": (
        lambda x, y: jnp.dot(x, y, precision=lax.DotAlgorithmPreset.F32_F32_F32).T, (whole(4, 6), whole(6, 8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*SWAPPED, *OTHERS])
def test_which_transpositions_are_left(name):
    f, arguments = {**SWAPPED, **OTHERS}[name]
    assert "transpose" in str(jax.make_jaxpr(f)(*arguments))
    assert names(f, arguments).count("transpose") == (name in OTHERS)


@pytest.mark.parametrize("name", [*SWAPPED, *OTHERS])
@pytest.mark.one_in(4)
def test_it_computes_the_same(name):
    f, arguments = {**SWAPPED, **OTHERS}[name]
    for specs in ((None, P("x")), (P(None, "x"), P("x")), (P("x"), None)):
        made = gshard.jit(f, mesh={"x": 4}, in_shardings=specs)
        jax.tree.map(np.testing.assert_array_equal, made(*arguments), jax.jit(f)(*arguments))


COLUMNS = P(None, "x")
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
    "halves": halves, "halves, by slices": halves_by_slices, "in derivatives": backwards, "thirds": thirds,
    "all of it": lambda x: jnp.concatenate([-x[:, 8:], -x[:, :8]], 1),
    "rows": lambda x: jnp.concatenate([-x[3:], x[:3]]),
}  # fmt: skip


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
    for x in (X, np.arange(-48, 48, dtype=np.int32).reshape(6, 16), X[:5, :14]):
        same_bits(gshard.jit(lambda x: MOVED[name](gshard.shard(x, spec)), mesh=GRID)(x), jax.jit(MOVED[name])(x))
