"""The law: each result lies where ``out_info`` and ``output_shardings`` say, in whatever order its devices are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import assert_sharded, called, said_by
from placed import PLACES, mesh_of, turned
from small_programs import RING

X = np.random.default_rng(1).integers(-9, 9, (8, 8)).astype(np.int32)
OUT = {
    "nothing": None, "rows": P("d"), "columns": P(None, "d"), "whole": P(),
    "a mesh": lambda mesh: NamedSharding(mesh, P("d")),
}  # fmt: skip


def program(x):
    y = gshard.shard(x, RING)
    return y + 1, jnp.cumsum(x.T + 1, 1), jnp.sum(y), x


@pytest.mark.parametrize("out", OUT)
def test_marks_with_device_ids(out):
    """A result with a mark of its own, or none, beside those in an order of devices."""
    mesh = mesh_of(d=8)
    asked = OUT[out](mesh) if callable(OUT[out]) else OUT[out]
    jitted = gshard.jit(program, mesh=mesh, out_shardings=(None, asked, None, None))
    want = X + 1, np.cumsum(X.T + 1, 1, dtype=np.int32), np.sum(X, dtype=np.int32), X
    for way in ("numpy", "reversed, rows", "another device"):
        x = PLACES[way](X, mesh)
        results = called(jitted, (x,), want, said=said_by(jitted, (x,)), where=way)
        assert_sharded(results, jax.tree.map(lambda r: r.sharding, jitted.lower(x).out_info), way)
        if asked is not None:
            sharding = asked if isinstance(asked, NamedSharding) else NamedSharding(mesh, asked)
            assert results[1].sharding.is_equivalent_to(sharding, 2), "what was asked for is what comes"


def test_a_mesh_in_another_order():
    for mesh in (mesh_of(order=(3, 1, 4, 0, 5, 7, 2, 6), a=2, b=4), turned(mesh_of(a=2, b=4))):
        jitted = gshard.jit(lambda x: (gshard.split(x, 0, 8) + 1, x, x.sum(0)), mesh=mesh)
        for way in ("numpy", "rows", "reversed, rows", "half, whole"):
            x = PLACES[way](X, mesh)
            called(jitted, (x,), (X + 1, X, X.sum(0, dtype=np.int32)), said=said_by(jitted, (x,)), where=way)


def test_what_comes_out_goes_in_as_it_is():
    """The results of one call are the arguments of the next, which is the same program."""
    jitted = gshard.jit(lambda x: gshard.shard(x, RING) * 2 - 1, mesh=8)
    x, want = X, X
    for _ in range(4):
        want = want * 2 - 1
        x = called(jitted, (x,), want, said=said_by(jitted, (x,)))
    before = jitted._cache_size()
    called(jitted, (x,), want * 2 - 1)
    assert jitted._cache_size() == before
