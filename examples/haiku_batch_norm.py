"""Haiku: parameters, BatchNorm's state and a dropout key go through one step whose batch is split.

Each device sees an eighth of the batch. The mean and variance that ``hk.BatchNorm`` takes, its moving averages and the
pattern of dropout are those of one device, without a word about devices in the model.

    python examples/haiku_batch_norm.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import haiku as hk
import jax
import jax.numpy as jnp

import gshard

DEVICES, B, M, H, CLASSES = 8, 512, 32, 128, 10


@hk.transform_with_state
def model(x, is_training):
    x = hk.Linear(H, with_bias=False)(x)
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training)
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.2, jax.nn.relu(x))
    return hk.Linear(CLASSES)(x)


def step(params, state, key, batch):
    """Nothing but the batch is marked: the rest is whole on every device."""
    batch = gshard.split(batch, 0, DEVICES)

    def loss(params):
        logits, new_state = model.apply(params, state, key, batch["x"], is_training=True)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], axis=1)
        return -jnp.mean(picked), new_state

    (value, new_state), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new_state, value


keys = jax.random.split(jax.random.key(0), 4)
batch = {"x": jax.random.normal(keys[0], (B, M)), "label": jax.random.randint(keys[1], (B,), 0, CLASSES)}
first = model.init(keys[2], batch["x"], is_training=True)

on_eight, on_one = gshard.jit(step, mesh=DEVICES), jax.jit(step)
ours = theirs = first
for key in jax.random.split(keys[3], 3):
    *ours, value = on_eight(*ours, key, batch)
    *theirs, expected = on_one(*theirs, key, batch)
    print(f"loss {value:.4f}")
    assert jnp.allclose(value, expected, rtol=1e-5)
for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    assert jnp.allclose(found, expected, atol=1e-5)

told = gshard.explain(on_eight, *ours, keys[3], batch)
print(f"sent by each device in one step: {told.bytes_by_kind}")
# Gradients, the loss, and of BatchNorm the sums of values and of squares and one sum of its gradient.
summed = sum(p.nbytes for p in jax.tree.leaves(first[0])) + 4 + 3 * 4 * H
assert told.bytes_by_kind == {"all_reduce": 2 * summed * (DEVICES - 1) // DEVICES}
