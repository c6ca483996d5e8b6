"""FSDP with Optax by one mark: weights and Adam's state stay split, and are gathered only where they are used.

Weights and ``mu`` and ``nu`` are split alike; ``count`` has no dimension to split and stays whole. The state comes back
as it went in, so every step is the same program.

    python examples/optax_fsdp.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax

import gshard

DEVICES, B, M, H, LAYERS = 8, 2048, 64, 256, 2
adam = optax.adam(1e-3)


def loss(params, batch):
    x = batch["x"]
    for w1, w2 in params:
        x = x + jax.nn.gelu(x @ w1) @ w2
    return jnp.mean(jnp.square(x - batch["y"]))


def step(params, opt_state, batch):
    params, opt_state, batch = gshard.split((params, opt_state, batch), 0, "data")  # the one mark
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = adam.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


keys = jax.random.split(jax.random.key(0), 2 * LAYERS + 2)
params = [
    (jax.random.normal(a, (M, H)) / M**0.5, jax.random.normal(b, (H, M)) / H**0.5)
    for a, b in zip(keys[2::2], keys[3::2], strict=True)
]
batch = {"x": jax.random.normal(keys[0], (B, M)), "y": jax.random.normal(keys[1], (B, M))}

on_eight, on_one = gshard.jit(step, mesh={"data": DEVICES}), jax.jit(step)
ours = theirs = first = (params, adam.init(params))
programs = set()
for _ in range(3):
    programs.add(on_eight.lower(*ours, batch))
    *ours, value = on_eight(*ours, batch)
    *theirs, expected = on_one(*theirs, batch)
    assert jnp.allclose(value, expected, rtol=1e-5)
    print(f"loss {value:.4f}")
assert len(programs) == 1, "the state comes back as it went in"

whole = sum(x.nbytes for x in jax.tree.leaves(first))
held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(ours))
print(f"weights and Adam's state: {whole:,} bytes, {held:,} on each device")
assert held == (whole - 4) // DEVICES + 4, "all but count is split"

told = gshard.explain(on_eight, *ours, batch)
print(f"sent by each device in one step: {told.bytes_by_kind}")
part = sum(w.nbytes for w in jax.tree.leaves(params)) * (DEVICES - 1) // DEVICES
scalar = 2 * 4 * (DEVICES - 1) // DEVICES  # the loss
assert told.bytes_by_kind == {"all_gather": part, "reduce_scatter": part, "all_reduce": scalar}
