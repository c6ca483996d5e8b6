"""A model annotated for JAX runs unchanged: its sharding constraints and the shardings of its arguments are marks.

python examples/annotated_for_jax.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

mesh = jax.make_mesh((4, 2), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def attention(q, k, v):
    """Written for jax.jit."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jax.lax.with_sharding_constraint(scores, NamedSharding(mesh, P("batch", "heads")))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


q, k, v = (jax.random.normal(key, (8, 16, 4, 32)) for key in jax.random.split(jax.random.key(0), 3))
q = jax.device_put(q, NamedSharding(mesh, P("batch")))

ours = gshard.jit(attention, mesh=mesh)
assert jnp.allclose(ours(q, k, v), jax.jit(attention)(q, k, v), atol=1e-5)
found = gshard.explain(ours, q, k, v)
print(found)
assert found.total_bytes == 0, "batches and heads are independent: nothing is sent"
