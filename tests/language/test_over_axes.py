"""Collectives over atoms run over the axes of the user's mesh as well, in groups where atoms are parts of an axis."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from gshard.language.per_device import OverAxes

MESH = gshard.Mesh.of(jax.make_mesh((2, 4), ("a", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 2))
OVER = [atoms for n in (1, 2, 3) for atoms in itertools.permutations(MESH.atoms, n)]
FAST = (("c.1",), ("a", "c.0"), ("c.1", "a"))


def everything(x, atoms):
    count = MESH.count(atoms)
    gathered = lax.all_gather(x, atoms, tiled=True)
    return [
        lax.psum(x, atoms),
        lax.pmax(x, atoms),
        gathered,
        lax.psum_scatter(gathered * x[0], atoms, tiled=True),
        lax.all_to_all(gathered * x[0], atoms, 0, 0, tiled=True),
        lax.ppermute(x, tuple(a for a in MESH.atoms if a in atoms), [(i, (i + 1) % count) for i in range(count - 1)]),
        x + lax.axis_index(atoms),
        lax.scan(lambda c, y: (c + lax.psum(y, atoms), c), jnp.zeros(()), x)[1],
    ]


@pytest.mark.parametrize("some", [FAST, pytest.param(OVER, marks=pytest.mark.slow)])
def test_the_same_numbers(some):
    x = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    split = {"in_specs": P(MESH.atoms), "out_specs": P(MESH.atoms), "check_vma": False}
    mapped = jax.shard_map(lambda x: [everything(x, atoms) for atoms in some], mesh=MESH.jax_mesh, **split)
    body = jax.make_jaxpr(mapped)(x).eqns[0].params["jaxpr"]
    again = OverAxes(MESH).function(body)
    axes = {"in_specs": P(("a", "c")), "out_specs": P(("a", "c")), "check_vma": False}
    found = jax.jit(jax.shard_map(again, mesh=MESH.user_jax_mesh, **axes))(x)
    for a, b in zip(found, jax.tree.leaves(jax.jit(mapped)(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
