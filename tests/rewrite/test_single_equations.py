"""Rewrites of one equation: what becomes of it, what is sent, and that it computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from gshard.testing import assert_proved
from gshard.tracing.trace import trace

RNG = np.random.default_rng(0)


def numbers(*shape):
    return RNG.integers(-9, 9, shape).astype(np.int32)


def names(function, arguments):
    return [e.name for e in trace(function, *arguments).block.walk()]


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
    for specs in ((None, P("x")), (P(None, "x"), P("x")), (P("x"), None)):
        assert_proved(gshard.jit(f, mesh={"x": 4}, in_shardings=specs), arguments)
