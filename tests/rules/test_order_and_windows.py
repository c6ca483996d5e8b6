"""What shards tell each other to sort, to reduce in any way and to pool, and what of a cache an update touches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard import split


def same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.tobytes() == want.tobytes()


def troublesome(rng, n):
    """Many ties, zeros of both signs, infinities and NaNs with different bits."""
    x = np.round(rng.standard_normal(n) * 3).astype(np.float32)
    x[rng.random(n) < 0.1] = -0.0
    x[rng.random(n) < 0.05] = np.inf
    strange = rng.random(n) < 0.1
    x[strange] = (0x7FC00000 + rng.integers(0, 99, int(strange.sum()))).astype(np.uint32).view(np.float32)
    return x


@pytest.mark.parametrize("n", [1000, 1003, 5])
def test_a_program_sorts_what_is_split(n, rng):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = troublesome(rng, n)

    def program(x):
        x = split(x, 0, 8)
        return split(jnp.sort(x), 0, 8), split(jnp.argsort(x), 0, 8)

    lowered = gshard.jit(program, mesh=mesh).lower(x)
    assert {c.kind for c in lowered.spmd.collectives} == {"all_gather"}
    for got, want in zip(gshard.jit(program, mesh=mesh)(x), (jnp.sort(x), jnp.argsort(x)), strict=True):
        same_bits(got, want)


@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_a_program_differentiates_pooling(strides, rng):
    """XLA's own partitioner shifts the first part's gradient where windows overlap; only halos are sent here.

    They come once for both passes, and what falls into them goes back: sums of whole numbers are exact in any order.
    """
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    image = np.round(rng.standard_normal((64, 9)) * 2).astype(np.float32)

    def loss(x):
        pooled = lax.reduce_window(x, -np.inf, lax.max, (3, 3), strides, "SAME")
        return (pooled * pooled).sum()

    def program(x):
        return split(jax.grad(loss)(split(x, 0, 8)), 0, 8)

    lowered = gshard.jit(program, mesh=mesh).lower(image)
    assert {c.kind for c in lowered.spmd.collectives} == {"collective_permute"}
    halo = 3 - strides[0]  # rows of other devices that the windows of one reach
    assert sum(c.bytes for c in lowered.spmd.collectives) == 2 * halo * 9 * 4
    same_bits(gshard.jit(program, mesh=mesh)(image), jax.jit(jax.grad(loss))(image))


@pytest.mark.parametrize("n", [1000, 1003])
def test_a_program_gathers_only_the_approximately_greatest(n, rng):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = rng.standard_normal(n).astype(np.float32)

    def program(x):
        return lax.approx_max_k(split(x, 0, 8), 5)

    lowered = gshard.jit(program, mesh=mesh).lower(x)
    assert sum(c.total_bytes for c in lowered.spmd.collectives) == 7 * 5 * (4 + 4)
    for got, want in zip(gshard.jit(program, mesh=mesh)(x), lax.top_k(x, 5), strict=True):
        same_bits(got, want)


def written(x, updates, *starts):
    return lax.dynamic_update_slice(gshard.split(x, 0, 8), updates, starts)


def test_no_more_than_the_window_is_touched():
    """A position of a cache that is split over its length, and donated."""
    cache, row = jax.ShapeDtypeStruct((65536, 128), "float32"), jax.ShapeDtypeStruct((1, 128), "float32")
    at = jax.ShapeDtypeStruct((), "int32")
    compiled = gshard.jit(written, mesh=8, donate_argnums=0).lower(cache, row, at, at).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096
    costs = compiled.cost_analysis()
    assert (costs[0] if isinstance(costs, list) else costs)["bytes accessed"] < 16 * 128 * 4
