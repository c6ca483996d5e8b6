"""Kernels of the user's: mapped over a split dimension, in manual regions, and alone."""

import jax
import numpy as np
import pytest
from jax.experimental import pallas
from jax.experimental.pallas import tpu
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near


def prefetched(order, x):
    """Blocks of two rows taken in an order that is prefetched, as in block-sparse attention."""

    def body(order, x, y):
        y[...] = x[...] * 2 + order[pallas.program_id(0)]

    blocks = pallas.BlockSpec((2, x.shape[1]), lambda i, order: (order[i], 0))
    grid = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(x.shape[0] // 2,),
        in_specs=[blocks],
        out_specs=pallas.BlockSpec((2, x.shape[1]), lambda i, order: (i, 0)),
    )
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(body, grid_spec=grid, out_shape=out, interpret=True)(order, x)


def counted(count, x):
    """As many blocks as an argument says."""
    rows = pallas.BlockSpec((2, x.shape[1]), lambda i: (i, 0))

    def body(x, y):
        y[...] = x[...] * 2

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(body, out, grid=(count,), in_specs=[rows], out_specs=rows, interpret=True)(x)


FIRST = {"prefetched": (prefetched, np.array([3, 1, 0, 2, 7, 6, 5, 4], np.int32)), "counted": (counted, np.int32(8))}


@pytest.mark.parametrize("name", FIRST)
def test_operands_without_blocks_come_first(name, rng):
    """Alone they are gathered; mapped they send nothing."""
    call, first = FIRST[name]
    x = rng.standard_normal((16, 6), np.float32)

    def alone(first, x):
        return call(first, gshard.split(x, 0, 8)) + 1

    near(gshard.jit(alone, mesh=8)(first, x), jax.jit(call)(first, x) + 1, 1e-6)
    assert "pallas_call at test_kernel.py" in gshard.explain(gshard.jit(alone, mesh=8), first, x).lists["gathered"][0]
    with pytest.raises(gshard.PlanError, match="'pallas_call' has no rule"):
        gshard.jit(alone, mesh=8, strict=True)(first, x)
    x = rng.standard_normal((8, 16, 6), np.float32)

    def mapped(first, x):
        again = jax.vmap(call, (None, 0))
        return jax.lax.fori_loop(0, 2, lambda i, y: again(first, y), gshard.split(x, 0, 8))

    partitioned = gshard.jit(mapped, mesh=8, strict=True)
    near(partitioned(first, x), jax.jit(mapped)(first, x), 1e-6)
    assert not partitioned.lower(first, x).spmd.collectives


def test_a_kernel_names_axes_of_the_mesh(rng):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def body(x, y):
        y[...] = x[...] * 2

        @pallas.when(jax.lax.axis_index("a") > 0)
        def later():
            y[...] += jax.lax.axis_index(("a", "b")) * 10 + jax.lax.axis_index("b")

    def part(x):
        return pallas.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    f = jax.shard_map(part, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False)
    x = rng.standard_normal((16, 6), np.float32)
    near(gshard.jit(f, mesh=mesh)(x), jax.jit(f)(x), 1e-6)
