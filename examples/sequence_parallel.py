"""Sequence parallelism: the sequence is split wherever nothing mixes it, the hidden units where the weights are.

In Megatron-LM's tensor parallelism every device normalizes all tokens. Marking the sequence before and after a layer
turns each of its all-reduces into an all-gather and a reduce-scatter, which send the same bytes; the norms, the
residuals and what is kept for the backward pass take a part of the memory.

    python examples/sequence_parallel.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
B, S, M, H = 16, 16, 128, 512


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def layer(params, x):
    """``x``: batch, sequence, model."""
    x = gshard.shard(x, P("data", "model"))
    w1, w2 = gshard.shard(params["w1"], P(None, "model")), gshard.shard(params["w2"], P("model"))
    h = gshard.shard(jax.nn.gelu(norm(x) @ w1), P("data", None, "model"))
    return x + gshard.shard(h @ w2, P("data", "model"))


keys = jax.random.split(jax.random.key(0), 3)
params = {"w1": jax.random.normal(keys[0], (M, H)) / M**0.5, "w2": jax.random.normal(keys[1], (H, M)) / H**0.5}
x = jax.random.normal(keys[2], (B, S, M))

on_eight = gshard.jit(layer, mesh=mesh)
assert jnp.allclose(on_eight(params, x), jax.jit(layer)(params, x), atol=1e-4)
told = gshard.explain(on_eight, params, x)
print(told)
assert [(row.kind, row.axes, row.times) for row in told.collectives] == [
    ("all_gather", "model", 1),
    ("reduce_scatter", "model", 1),
]


def loss(params, x):
    return jnp.square(layer(params, x)).sum()


gradient = gshard.jit(jax.grad(loss, argnums=(0, 1)), mesh=mesh)
for ours, theirs in zip(
    jax.tree.leaves(gradient(params, x)), jax.tree.leaves(jax.grad(loss, argnums=(0, 1))(params, x)), strict=True
):
    assert jnp.allclose(ours, theirs, atol=1e-3)
backward = gshard.explain(gradient, params, x)
print(f"\nwith the backward pass\n{backward}")
kinds = sorted((row.kind, row.axes) for row in backward.collectives for _ in range(row.times))
assert kinds == [
    *[("all_gather", "model")] * 2,
    *[("all_reduce", "data")] * 2,  # the gradients of both weights, as in any data parallelism
    *[("reduce_scatter", "model")] * 2,
]
