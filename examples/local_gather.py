"""A gather that the user knows to stay within each part (GShard paper, section 3.2): manual in the middle of automatic.

A partitioner must assume that an index reaches anywhere. Here every token is looked up in its own group, and groups
are what is split. So a ``jax.shard_map`` around the gather lets each device gather in its own part. Nothing is sent.

    python examples/local_gather.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard

MESH = jax.make_mesh((8,), ("groups",), axis_types=(jax.sharding.AxisType.Auto,))
G, S, M, E, C = 16, 6, 5, 3, 4


def gather(inputs, s_indices):
    """f32[g, S, M] and int32[E, g, C], positions in S -> f32[E, g, C, M], of the groups of one device."""
    return inputs[jnp.arange(inputs.shape[0])[None, :, None], s_indices]


def dispatch(inputs, s_indices):
    """f32[G, S, M] and int32[E, G, C] -> f32[E, G, C, M]."""
    each = jax.shard_map(gather, mesh=MESH, in_specs=(P("groups"), P(None, "groups")), out_specs=P(None, "groups"))
    return each(inputs, s_indices)


inputs = jax.random.normal(jax.random.key(0), (G, S, M))
s_indices = jax.random.randint(jax.random.key(1), (E, G, C), 0, S)
expected = inputs[jnp.arange(G)[None, :, None], s_indices]

found = gshard.explain(dispatch, inputs, s_indices, mesh=MESH)
print(found)
assert found.collectives == ()
assert (gshard.jit(dispatch, mesh=MESH)(inputs, s_indices) == expected).all()


def loss(inputs):
    return jnp.sum(dispatch(inputs, s_indices) ** 2)


gradient = gshard.jit(jax.grad(loss), mesh=MESH)
assert gshard.explain(gradient, inputs).total_bytes == 0
unpartitioned = jax.grad(lambda x: jnp.sum(x[jnp.arange(G)[None, :, None], s_indices] ** 2))
assert jnp.allclose(gradient(inputs), unpartitioned(inputs))
