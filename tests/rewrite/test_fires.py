"""Each rewrite fires on its example, and not on a near miss; a rewritten program computes the same."""

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import gshard
from gshard.rewrite.driver import run
from gshard.rewrite.rewrites import SPLIT, TRACE
from gshard.testing import assert_proved
from gshard.tracing.builder import Builder

MESH = gshard.Mesh.abstract(x=4)


def whole(*shape):
    """Integers, whose sums are exact in any order."""
    return np.random.default_rng(shape).integers(-9, 9, shape).astype(np.float32)


class Example(NamedTuple):
    """A program that a rewrite fires on, one that it does not, and the arguments of both."""

    fires: Callable[..., Any]
    near: Callable[..., Any]
    arguments: tuple[np.ndarray, ...]


def rows_split(f):
    return lambda x, *others: f(gshard.split(x, 0, "x"), *others)


def averaged(x, start):
    padded = lax.pad(x, np.float32(start), ((0, 1, 1), (0, 0, 0)))
    return lax.reduce_window(padded, np.float32(0), lax.add, (2, 1), (1, 1), "VALID")


def mean_of_neighbours(x):
    return jnp.pad(x[2:] + x[:-2], ((1, 1), (0, 0)))


def few_of_many(x):
    return jnp.pad(x[1:2] + x[3:4], ((0, 15), (0, 0)))


def scattered(x, labels, start):
    return jnp.full((8, 13), start, x.dtype).at[jnp.arange(8)[:, None], labels].add(x[:, :2]).sum(1)


def fused(x, *weights, at=4):
    return [jnp.tanh(y) for y in jnp.split(x @ jnp.concatenate(weights, 1), [at], 1)]


X = whole(8, 6)
EXAMPLES = {
    "split_merged_dims": Example(
        lambda x, w: (x.reshape(-1, 6) @ w).reshape(2, 8, 5),
        lambda x, w: jnp.sort(x.reshape(-1, 6), 0) @ w,
        (whole(2, 8, 6), whole(6, 5)),
    ),
    "sink_pad": Example(mean_of_neighbours, few_of_many, (whole(8, 3),)),
    "compose_movement": Example(
        lambda x: jnp.roll(jnp.roll(x, 1, 0), 1, 0), lambda x: lax.concatenate([x, x], 0), (X,)
    ),
    "fold_pad_into_window": Example(
        functools.partial(averaged, start=0.0), functools.partial(averaged, start=1.0), (X,)
    ),
    "transpose_of_dot": Example(lambda x, w: (x @ w).T, lambda x, w: [y := x @ w, y.T], (X, whole(6, 5))),
    "dots_of_parts": Example(fused, functools.partial(fused, at=5), (X, whole(6, 4), whole(6, 4))),
    "stack_narrow": Example(
        lambda x: lax.map(jnp.sum, lax.map(lambda r: lax.round(r).astype(np.int8).astype(r.dtype) * r.sum(), x)),
        lambda x: 2 * lax.map(lambda r: lax.round(r).astype(np.int8).astype(r.dtype) * r.sum(), x),
        (X,),
    ),
    "widen_slices": Example(
        lambda x: lax.map(jnp.sum, lax.round(x).astype(np.int8).astype(x.dtype) * jnp.broadcast_to(x[:, :1], x.shape)),
        lambda x: lax.map(jnp.sum, lax.round(x).astype(np.int8).astype(x.dtype) * x[:1]),
        (X,),
    ),
    "widen_late": Example(
        lambda x, w: [w := gshard.split(w, 0, "x", send="int8"), jnp.tanh(x) @ w][1],
        lambda x, w: [y := jnp.tanh(x), y @ gshard.split(w, 0, "x", send="int8")][1],
        (X, whole(6, 5)),
    ),
    "shard_scan": Example(
        rows_split(lambda x: lax.map(jnp.sum, x)),
        rows_split(lambda x: lax.scan(lambda c, r: (c * r, c), x[0], x)[1]),
        (X,),
    ),
    "fft_by_dimension": Example(rows_split(jnp.fft.fft2), rows_split(lambda x: jnp.fft.fft(x, axis=1)), (X,)),
    "sum_of_scatter": Example(
        functools.partial(scattered, start=0.0),
        functools.partial(scattered, start=2.0),
        (X, np.array([0, 12, 5, 13, -1, 3, 3, 9] * 2, np.int32).reshape(8, 2)),
    ),
}  # fmt: skip


def rewritten(f, arguments):
    return gshard.stages.propagate(gshard.stages.trace(f, *arguments), MESH).program


def fired(program):
    return {one.rewrite for one in program.fired}


def test_every_rewrite_has_an_example_and_reaches_a_fixed_point():
    assert EXAMPLES.keys() == {row.name for row in (*TRACE, *SPLIT)}
    for f, _, arguments in EXAMPLES.values():
        block = gshard.stages.trace(f, *arguments).block
        assert not run(TRACE, block.equations, block.outputs, Builder(itertools.count(10_000)))[1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_fires_and_computes_the_same_and_does_not_fire_on_a_near_miss(name):
    fires, near, arguments = EXAMPLES[name]
    assert [name in fired(rewritten(f, arguments)) for f in (fires, near)] == [True, False]
    assert_proved(gshard.jit(fires, mesh=MESH), arguments)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float32, jnp.bfloat16, jnp.float8_e5m2])
def test_products_of_joined_arrays_keep_their_type(dtype):
    """Summed over both, and cut again, in uneven parts; the elements are -1, 0 and 1, so that sums are exact."""

    def joined(a, b, c, d, w):
        summed = jnp.concatenate([a, b], 1) @ jnp.concatenate([c, d], 0)
        return [summed, *jnp.split(jnp.concatenate([a.T, b.T], 0) @ w, [6], 0)]

    rng = np.random.default_rng(1)
    shapes = (8, 6), (8, 10), (6, 5), (10, 5), (8, 7)
    arrays = [jnp.asarray(rng.integers(-1, 2, shape)).astype(dtype) for shape in shapes]
    assert [one.rewrite for one in gshard.stages.trace(joined, *arrays).fired].count("dots_of_parts") >= 1
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    partitioned, want = gshard.jit(joined, mesh=mesh), jax.jit(joined)(*arrays)
    for first, others in (((), ()), (("x", "y"), ("y",)), (("y",), ("x",)), ((None, "x"), ())):
        specs = [first, first, others, others, others]
        placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*s))) for x, s in zip(arrays, specs, strict=True)]
        for got, one in zip(partitioned(*placed), want, strict=True):
            assert got.dtype == one.dtype
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(one, np.float32))


def test_products_with_scalars_and_of_many_arrays_stay():
    def scaled(x, y):
        return lax.dot_general(x, y, (((), ()), ((), ())))

    def of_rows(*rows):
        return jnp.einsum("ij,ik->jk", jnp.concatenate(rows), jnp.concatenate(rows[::-1]))

    np.testing.assert_array_equal(gshard.jit(scaled, mesh=4)(np.float32(-2), X), -2 * X)
    assert "dots_of_parts" not in fired(gshard.stages.trace(of_rows, *[X[:1]] * 9))
    assert "dots_of_parts" in fired(gshard.stages.trace(of_rows, *[X[:1]] * 8))


def test_what_fired_is_shown(caplog):
    f, _, arguments = EXAMPLES["sink_pad"]
    with caplog.at_level(logging.DEBUG, "gshard"):
        (one,) = gshard.stages.trace(f, *arguments).fired
    assert str(one).startswith("sink_pad at test_fires.py:")
    assert "pad -> 2 pad, add" in str(one)
    assert f"Rewrote {one}" in caplog.messages
