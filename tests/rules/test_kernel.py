"""Kernels of the user's: mapped over a split dimension, in manual regions, and alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

import gshard
from harness import kernel


def one(x: Any) -> Any:
    """A kernel with a branch and a loop, whose bodies carry constants."""

    def body(x: Any, y: Any) -> None:
        up = jax.lax.fori_loop(0, 3, lambda i, z: z * 0.5 + i, x[...])
        y[...] = jax.lax.cond(x[0, 0] > 0, lambda z: z + 2.0, lambda z: z - 2.0, up)

    return pallas.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def same(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)


@pytest.mark.parametrize("n", [8, 13, 3])
def test_a_mapped_kernel_sends_nothing(n: int, rng: np.random.Generator) -> None:
    x, scale = rng.standard_normal((n, 5, 4), np.float32), rng.standard_normal(4, np.float32)

    def f(x: Any, scale: Any) -> Any:
        return jax.tree.map(jnp.sin, jax.vmap(kernel, (0, None))(gshard.split(x, 0, 8), scale))

    partitioned = gshard.jit(f, mesh=8, uneven="keep")
    same(jax.tree.map(np.asarray, partitioned(x, scale)), jax.jit(f)(x, scale))
    assert not partitioned.lower(x, scale).spmd.collectives


def test_in_manual_regions(rng: np.random.Generator) -> None:
    x = rng.standard_normal((16, 6), np.float32)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("b", "a"), out_specs=P("b", "a"), check_vma=False)
    marked = gshard.manual(one, num_partitions=8)
    for f in (lambda x: mapped(x * 2) + 1, lambda x: marked(gshard.split(x, 0, 8) * 2) + 1):
        partitioned = gshard.jit(f, mesh=mesh)
        same(partitioned(x), jax.jit(f)(x))
        assert not partitioned.lower(x).spmd.collectives


def test_alone_it_gets_all_and_strict_says_so(rng: np.random.Generator) -> None:
    x = rng.standard_normal((16, 6), np.float32)

    def f(x: Any) -> Any:
        return one(gshard.split(x, 0, 8))

    same(gshard.jit(f, mesh=8)(x), one(x))
    with pytest.raises(gshard.PlanError, match="'pallas_call' has no rule"):
        gshard.jit(f, mesh=8, strict=True)(x)
