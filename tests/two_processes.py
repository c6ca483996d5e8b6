"""One of two processes that run a partitioned program together over Gloo, eight devices each.

    python tests/two_processes.py 0 127.0.0.1:1234 explains-first

What the processes do:

- ``explains-first``: process 0 explains another function before both call one three times, with arguments from
  elsewhere and on the mesh.
- ``different``: each jits another program; the first call must be refused.

Prints one line: the sums of the results, or what the error says.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import split

AXES = {"a": 2, "b": 2, "c": 2, "d": 2}


def whole(x):
    """A result, gathered on every process."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def rest(x, y, h, w1):
    return (y.T @ x).sum(0), jnp.sin(y).reshape(-1), h @ w1.T


def one(x, w1, w2):
    x = split(x, 0, "d")
    h = split(jnp.tanh(x @ split(w1, 1, "b")), 0, "a")
    return rest(x, h @ w2, h, w1)


def other(x, w1, w2):
    x = split(x, 0, "b")
    h = jnp.tanh(x @ split(w1, 1, "a"))
    return rest(x, split(h @ w2, 1, "d"), h, w1)


def explains_first(index):
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))
    if index == 0:
        shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 64), (64, 64), (64, 16))]
        print(gshard.explain(other, *shapes, mesh=gshard.Mesh.of(mesh)), flush=True)
    rng = np.random.default_rng(3)
    arrays = [rng.integers(-1, 2, shape).astype(np.float32) for shape in ((16, 32), (32, 64), (64, 16))]
    want = jax.jit(one)(*arrays)
    jitted = gshard.jit(one, mesh=mesh)
    for spec in (None, P("c"), None):
        given = arrays if spec is None else [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        for got, expected in zip(jitted(*given), want, strict=True):
            np.testing.assert_allclose(whole(got), expected, rtol=1e-4, atol=1e-4)
    print("right", flush=True)


def different(index):
    x = np.arange(256, dtype=np.int32).reshape(16, 16)
    programs = lambda x: split(x, 0, 16).sum(0), lambda x: split(x.T, 0, 16).sum(0) + jnp.max(x, 1)
    try:
        gshard.jit(programs[index], mesh=16)(x)
    except gshard.GShardError as error:
        print(f"refused: {str(error)!r}", flush=True)
    else:
        print("not refused", flush=True)


if __name__ == "__main__":
    index, address, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, index)
    {"explains-first": explains_first, "different": different}[what](index)
