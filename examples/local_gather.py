"""A gather that the user knows to stay within each part (GShard paper, section 3.2): manual in the middle of automatic.

A partitioner must assume that an index reaches anywhere. Here every token is looked up in its own group, and groups
are what is split: so between ``auto_to_manual`` and ``manual_to_auto`` each device gathers in its own part, and nothing
is sent.

    python examples/local_gather.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import gshard

DEVICES, G, S, M, E, C = 8, 16, 6, 5, 3, 4


def dispatch(inputs, s_indices):
    """f32[G, S, M] and int32[E, G, C], positions in S -> f32[E, G, C, M]."""
    part = gshard.auto_to_manual(gshard.split(inputs, 0, DEVICES), 0, DEVICES)
    where = gshard.auto_to_manual(gshard.split(s_indices, 1, DEVICES), 1, DEVICES)
    groups = jax.lax.broadcasted_iota(jnp.int32, where.shape, 1)  # counted within the part
    return gshard.manual_to_auto(part[groups, where], 1, DEVICES)


def dispatch_each(inputs, s_indices):
    """The same, as a function that is run on each part by itself; this one means the same without gshard."""

    def part(x, where):
        return x[jnp.arange(x.shape[0])[None, :, None], where]

    return gshard.manual(part, num_partitions=DEVICES, in_dims=(0, 1), out_dims=1)(inputs, s_indices)


inputs = jax.random.normal(jax.random.key(0), (G, S, M))
s_indices = jax.random.randint(jax.random.key(1), (E, G, C), 0, S)
expected = inputs[jnp.arange(G)[None, :, None], s_indices]

for program in (dispatch, dispatch_each):
    found = gshard.explain(program, inputs, s_indices, mesh=DEVICES)
    print(found, end="\n\n")
    assert found.collectives == ()
    assert (gshard.jit(program, mesh=DEVICES)(inputs, s_indices) == expected).all()
assert (dispatch_each(inputs, s_indices) == expected).all()


def loss(inputs):
    return jnp.sum(dispatch(inputs, s_indices) ** 2)


gradient = gshard.jit(jax.grad(loss), mesh=DEVICES)
assert gshard.explain(gradient, inputs).total_bytes == 0
unpartitioned = jax.grad(lambda x: jnp.sum(x[jnp.arange(G)[None, :, None], s_indices] ** 2))
assert jnp.allclose(gradient(inputs), unpartitioned(inputs))
