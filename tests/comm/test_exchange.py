"""All-to-alls of tiles: the same bits, in no more bytes than a device lacks."""

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
from laws.test_reshard_any import parts, shardings


@pytest.mark.parametrize(("before", "after"), [(("a", "b"), ("b", "a")), (("a",), (None, ("a", "b")))])
def test_keys_of_random_numbers_change_places(before, after):
    keys = jax.random.split(jax.random.key(3), (8, 8, 4))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    moved = gshard.jit(lambda k: gshard.shard(gshard.shard(k, P(*before)), P(*after)), mesh=mesh)(keys)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


ALL = ("a", "b")
TILED = Mesh.abstract(a=2, b=2, c=2), Mesh.abstract(a=2, b=3)


@functools.cache
def tiled_pairs(mesh, rank=3, most=1000):
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


def lacked(source, target, n, mesh):
    """Elements of a cube of ``n`` that the device which lacks most of its part has to get."""
    have, want = (parts(np.arange(n**3).reshape(n, n, n), s, mesh) for s in (source, target))
    return max(len(np.setdiff1d(b, a)) for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize("most", [1000, pytest.param(10**9, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("mesh", TILED)
def test_no_more_is_sent_than_a_device_lacks(mesh, most):
    n, found = mesh.size, tiled_pairs(mesh, most=most)
    assert len(found) >= 21
    for source, target in found:
        assert reshard_bytes(source, target, (n, n, n), 4, mesh) == 4 * lacked(source, target, n, mesh)


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.bfloat16, jnp.complex64])
def test_on_devices_of_tiles(dtype):
    x = jnp.arange(16 * 16 * 8).reshape(16, 16, 8).astype(dtype)
    tiles = lambda x: gshard.shard(gshard.shard(x, P(("a", "b"))), P(None, "a", "b"))  # noqa: E731
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    jitted = gshard.jit(tiles, mesh=mesh)
    np.testing.assert_array_equal(jitted(x), x)
    (sent,) = jitted.lower(x).spmd.collectives
    assert (sent.kind, sent.bytes) == ("all_to_all", x.nbytes // 8 * 7 // 8)


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
