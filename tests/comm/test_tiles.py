"""All-to-alls of tiles: the same numbers, and no more bytes than what each device lacks."""

from __future__ import annotations

import functools
import itertools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.comm.reshard import plan_reshard, reshard_bytes
from gshard.comm.steps import is_of_tiles
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from laws.test_reshard_any import move, ordinal, places, shardings

ALL = ("a", "b")
MESHES = Mesh.abstract(a=2, b=2, c=2), Mesh.abstract(a=2, b=3)


@functools.cache
def pairs(mesh: Mesh, rank: int = 3, most: int = 1000) -> list[tuple[Sharding, Sharding]]:
    """Pairs of shardings with one all-to-all of tiles between them, found among at most ``most`` pairs."""
    shape = (mesh.size,) * rank
    finished = [s for s in shardings(mesh, rank) if not s.unreduced]
    every = list(itertools.permutations(finished, 2))
    found = []
    for one, other in random.Random(0).sample(every, min(most, len(every))):
        steps = plan_reshard(one, other, shape, 4, mesh)
        if len(steps) == 1 and is_of_tiles(steps[0]):
            found.append((one, other))
    return found


def lacked(source: Sharding, target: Sharding, n: int, mesh: Mesh) -> int:
    """Elements of a cube of ``n`` that the device which lacks most of its part has to get."""

    def elements(sharding: Sharding, at: dict[str, int]) -> list[set[int]]:
        size = [n // mesh.count(atoms) for atoms in sharding.dims]
        first = [ordinal(atoms, at, mesh) * m for atoms, m in zip(sharding.dims, size, strict=True)]
        return [set(range(a, a + m)) for a, m in zip(first, size, strict=True)]

    worst = 0
    for at in places(mesh):
        have, want = elements(source, at), elements(target, at)
        both = [len(a & b) for a, b in zip(have, want, strict=True)]
        worst = max(worst, int(np.prod([len(b) for b in want]) - np.prod(both)))
    return worst


@pytest.mark.parametrize("mesh", MESHES)
def test_every_element_comes_where_it_belongs(mesh: Mesh, rng: np.random.Generator) -> None:
    found = pairs(mesh)
    assert len(found) > 20
    for source, target in random.Random(0).sample(found, 20):
        shape = tuple(mesh.size * k for k in (1, 2, 3))
        move(rng.integers(-99, 99, shape).astype(np.int32), source, target, mesh, rng)


@pytest.mark.parametrize("most", [1000, pytest.param(10**9, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("mesh", MESHES)
def test_no_more_is_sent_than_a_device_lacks(mesh: Mesh, most: int) -> None:
    n = mesh.size
    for source, target in pairs(mesh, most=most):
        assert reshard_bytes(source, target, (n, n, n), 4, mesh) == 4 * lacked(source, target, n, mesh)


def test_unequal_parts_go_another_way(rng: np.random.Generator) -> None:
    mesh = MESHES[0]
    (source, target), *_ = pairs(mesh)
    for shape in ((5, 8, 8), (8, 6, 12), (8, 8, 0), (3, 1, 2)):
        move(rng.integers(-99, 99, shape).astype(np.int32), source, target, mesh, rng)


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.bfloat16, jnp.complex64])
def test_on_devices(dtype: jnp.dtype) -> None:
    x = jnp.arange(16 * 16 * 8).reshape(16, 16, 8).astype(dtype)

    spec = jax.sharding.PartitionSpec

    def tiles(x: jax.Array) -> jax.Array:
        return gshard.shard(gshard.shard(x, spec(("a", "b"))), spec(None, "a", "b"))

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    jitted = gshard.jit(tiles, mesh=mesh)
    np.testing.assert_array_equal(jitted(x), x)
    (sent,) = jitted.lower(x).spmd.collectives
    assert (sent.kind, sent.bytes) == ("all_to_all", x.nbytes // 8 * 7 // 8)


def test_keys_of_random_numbers_go_in_tiles() -> None:
    keys = jax.random.split(jax.random.key(3), (8, 8, 4))
    spec = jax.sharding.PartitionSpec

    def f(keys: jax.Array) -> jax.Array:
        return gshard.shard(gshard.shard(keys, spec("a")), spec(None, ("a", "b")))

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = gshard.jit(f, mesh=mesh)(keys)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


@pytest.mark.parametrize("shape, before, after", [
    ((8, 24, 5), P(ALL), P(None, ALL)),  # one row on each device
    ((6, 3, 8), P(None, None, ALL), P(ALL)),  # to one row, padded
    ((16, 2, 8), P(ALL), P(None, None, ALL)),  # to one column
])  # fmt: skip
def test_what_is_nothing_but_parts_is_exchanged_as_a_dimension_of_its_own(rng, shape, before, after):
    """In front, where no compiler pads it; the values are those of the array."""

    def f(x):
        return gshard.shard(jnp.sin(gshard.shard(x, before)), after)

    x = rng.standard_normal(shape).astype(np.float32)
    made = gshard.jit(f, mesh=jax.make_mesh((4, 2), ("a", "b")))
    (exchange,) = re.findall(r"all_to_all\[[^\]]*\]", str(made.lower(x).spmd.jaxpr))
    assert "split_axis=0" in exchange
    assert "concat_axis=0" in exchange
    np.testing.assert_allclose(made(x), np.sin(x), rtol=1e-6)
