"""A vocabulary split over devices: embedding, logits and cross-entropy, and neither table nor logits are gathered.

A device looks up the words it holds and contributes zero for the others; of the logits it keeps its own words, and of
the softmax only a maximum, a sum and the label's logit for each token are sent, whatever the size of the vocabulary.

    python examples/vocabulary.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import gshard

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
V, B, S, M = 8192, 8, 16, 64


def loss(table, tokens, labels):
    """Mean cross-entropy of a model that is nothing but its tied table."""
    table = gshard.split(table, 0, "model")
    x = jnp.tanh(table[gshard.split(tokens, 0, "data")])
    logits = jnp.einsum("bsm,vm->bsv", x, table)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


keys = jax.random.split(jax.random.key(0), 3)
table = jax.random.normal(keys[0], (V, M))
tokens, labels = (jax.random.randint(key, (B, S), 0, V) for key in keys[1:])

on_eight = gshard.jit(loss, mesh=mesh)
assert jnp.allclose(on_eight(table, tokens, labels), jax.jit(loss)(table, tokens, labels), atol=1e-4)
told = gshard.explain(on_eight, table, tokens, labels)
print(told)
each = B * S // 2 * 4  # bytes of one float32 for each token of a row of the mesh
embedded, of_logits, mean = M * each, 3 * each, 4
assert told.total_bytes <= 2 * (embedded + of_logits) * 3 // 4 + 2 * mean * 1 // 2  # all of it all-reduced
gradient = gshard.jit(jax.grad(loss), mesh=mesh)
assert jnp.allclose(gradient(table, tokens, labels), jax.jit(jax.grad(loss))(table, tokens, labels), atol=1e-5)
backward = gshard.explain(gradient, table, tokens, labels)
print(f"\nwith the backward pass\n{backward}")
assert backward.bytes_by_kind["all_reduce"] > 0.5 * backward.total_bytes
