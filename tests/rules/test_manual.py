"""Manual regions: the user's own per-device code in the middle of a partitioned program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from gshard.core.mesh import Mesh
from gshard.testing.rule_checks import emitted, reported
from placed import mesh_of
from sampled import crossed


def talking(x, w):
    y = x @ w
    z = lax.psum(y, "b") + lax.all_gather(y, "b").sum(0) + lax.pmax(lax.stop_gradient(y), "b")
    z += lax.psum_scatter(jnp.tile(y, (1, 4)), "b", scatter_dimension=1, tiled=True)
    z += lax.all_to_all(y.reshape(-1, 4, 4), "b", 1, 1, tiled=True).reshape(y.shape)
    z, _ = lax.scan(lambda c, _: (lax.ppermute(c, "b", [(k, (k + 1) % 4) for k in range(4)]), None), z, None, length=3)
    return jnp.where(lax.axis_index("b") == 1, z, -z)


@pytest.mark.parametrize(
    ("mesh", "some_axes", "check_vma"), crossed(["the same", 8], [False, True], [True, False], one_in=3)
)
def test_a_shard_map_inside(mesh, some_axes, check_vma, rng):
    x, w = rng.standard_normal((4, 8), np.float32), rng.standard_normal((8, 16), np.float32)
    rows = None if some_axes else "a"
    region = jax.shard_map(
        talking,
        mesh=mesh_of(a=2, b=4),
        in_specs=(P(rows, "b"), P("b")),
        out_specs=P(rows, "b"),
        check_vma=check_vma,
        **({"axis_names": {"b"}} if some_axes else {}),
    )

    def f(x, w):
        return jnp.sin(region(jnp.cos(x), w))

    partitioned = gshard.jit(f, mesh=mesh_of(a=2, b=4) if mesh == "the same" else mesh)
    near(partitioned(x, w), jax.jit(f)(x, w), 2e-5)
    spmd = partitioned.lower(x, w).spmd
    assert emitted(spmd.jaxpr, spmd.mesh.atom_sizes) == reported(spmd.collectives)

    def loss(x, w):
        return jnp.sum(f(x, w) ** 2)

    near(gshard.jit(jax.grad(loss, argnums=(0, 1)), mesh=8)(x, w), jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w), 2e-5)


def test_planned_for_a_mesh_without_devices():
    mesh = jax.sharding.AbstractMesh((16, 32), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    region = jax.shard_map(lambda x: lax.psum(x, "b"), mesh=mesh, in_specs=P("a", "b"), out_specs=P("a"))
    found = gshard.explain(region, jax.ShapeDtypeStruct((32, 64), jnp.float32), mesh=Mesh.abstract(a=16, b=32))
    assert found.bytes_by_kind == {"all_reduce": 2 * 2 * 2 * 4 * 31 // 32}
