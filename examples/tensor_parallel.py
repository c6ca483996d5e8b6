"""Tensor parallelism by marking two weights: one all-reduce forward, as in Megatron-LM.

python examples/tensor_parallel.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def feed_forward(params, x):
    """Columns of the first weight and rows of the second over ``model``; the batch over ``data``."""
    w1 = gshard.shard(params["w1"], P(None, "model"))
    w2 = gshard.shard(params["w2"], P("model", None))
    x = gshard.split(x, 0, "data")
    return gshard.split(jax.nn.gelu(x @ w1) @ w2, 0, "data")


keys = jax.random.split(jax.random.key(0), 3)
params = {"w1": jax.random.normal(keys[0], (64, 250)) / 8, "w2": jax.random.normal(keys[1], (250, 64)) / 16}
x = jax.random.normal(keys[2], (30, 64))

step = gshard.jit(feed_forward, mesh=mesh)
assert jnp.allclose(step(params, x), jax.jit(feed_forward)(params, x), atol=1e-4)
found = gshard.explain(step, params, x)
print(found)
assert [(row.kind, row.axes, row.times) for row in found.collectives] == [("all_reduce", "model", 1)]
