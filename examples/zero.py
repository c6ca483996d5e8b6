"""ZeRO by marking the optimizer's state: gradients are reduce-scattered, and the new weights all-gathered.

Data parallelism would all-reduce the gradients and keep Adam's moments whole on every device. With the moments split,
the same bytes are sent and each device updates, and remembers, an eighth.

    python examples/zero.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import gshard

DEVICES, B, M, H = 8, 2048, 64, 256


def loss(params, batch):
    prediction = jax.nn.gelu(batch["x"] @ params["w1"]) @ params["w2"]
    return jnp.mean(jnp.square(prediction - batch["y"]))


def adam(params, state, grads):
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, state["nu"], grads)
    params = jax.tree.map(lambda p, m, n: p - 0.01 * m / (jnp.sqrt(n) + 1e-8), params, mu, nu)
    return params, {"mu": mu, "nu": nu}


def step(params, state, batch):
    """Weights whole, the batch split; the optimizer's state split is what makes it ZeRO."""
    params, batch = gshard.replicate(params), gshard.split(batch, 0, DEVICES)
    state = gshard.split(state, 0, DEVICES)
    params, state = adam(params, state, jax.grad(loss)(params, batch))
    return gshard.replicate(params), state


keys = jax.random.split(jax.random.key(0), 4)
params = {"w1": jax.random.normal(keys[0], (M, H)) / M**0.5, "w2": jax.random.normal(keys[1], (H, M)) / H**0.5}
state = {"mu": jax.tree.map(jnp.zeros_like, params), "nu": jax.tree.map(jnp.zeros_like, params)}
batch = {"x": jax.random.normal(keys[2], (B, M)), "y": jax.random.normal(keys[3], (B, M))}

on_eight = gshard.jit(step, mesh=DEVICES)
found, expected = on_eight(params, state, batch), jax.jit(step)(params, state, batch)
for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert jnp.allclose(ours, theirs, atol=1e-3)
assert found[1]["mu"]["w1"].sharding.shard_shape((M, H)) == (M // DEVICES, H)

told = gshard.explain(on_eight, params, state, batch)
print(told)
weights = sum(w.nbytes for w in jax.tree.leaves(params))
part = weights * (DEVICES - 1) // DEVICES
assert told.bytes_by_kind == {"reduce_scatter": part, "all_gather": part}
