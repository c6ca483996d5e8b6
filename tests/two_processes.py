"""One of two processes that run a partitioned program together over Gloo, four devices each.

    python tests/two_processes.py 0 127.0.0.1:1234 explains-first

What the processes do:

- ``explains-first``: process 0 explains and lowers other functions before both call the same one three times, with
  arguments that come in three ways.
- ``different``: each jits another program; the first call must be refused.

Prints one line: the sums of the results, or what the error says.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import split
from marked_chains import chain

AXES = {"a": 2, "b": 2, "c": 2}


def whole(x: Any) -> np.ndarray:
    """A result, gathered on every process."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def explains_first(index: int) -> None:
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))
    if index == 0:
        for seed in range(2, 12):
            f, shapes = chain(seed, tuple(AXES))
            gshard.explain(f, *(jax.ShapeDtypeStruct(s, "float32") for s in shapes), mesh=gshard.Mesh.of(mesh))
    for seed in (0, 1):
        f, shapes = chain(seed, tuple(AXES))
        rng = np.random.default_rng(seed)
        arrays = [rng.integers(-1, 2, s).astype(np.float32) for s in shapes]
        want = jax.jit(f)(*arrays)
        jitted = gshard.jit(f, mesh=mesh)
        for spec in (None, P(), P("c")):
            given = arrays if spec is None else [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
            for got, expected in zip(jitted(*given), want, strict=True):
                np.testing.assert_allclose(whole(got), expected, rtol=1e-4, atol=1e-4)
    print("right", flush=True)


def different(index: int) -> None:
    x = np.arange(64, dtype=np.int32).reshape(8, 8)
    programs = lambda x: split(x, 0, 8).sum(0), lambda x: split(x.T, 0, 8).sum(0) + jnp.max(x, 1)
    try:
        gshard.jit(programs[index], mesh=8)(x)
    except gshard.GShardError as error:
        print(f"refused: {str(error)!r}", flush=True)
    else:
        print("not refused", flush=True)


if __name__ == "__main__":
    index, address, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, index)
    {"explains-first": explains_first, "different": different}[what](index)
