"""Search instead of marks: the plan of a training step for a machine, and how near the best of a model it is.

The machine is invented: slow arithmetic, so that it pays to split it. The plan then runs on eight virtual devices.

    python examples/search_training.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import dataclasses

import jax
import jax.numpy as jnp

import gshard

B, M, H = 64, 32, 128


def loss(params, x, y):
    hidden = jax.nn.gelu(x @ params["w1"] + params["b1"])
    return jnp.mean(jnp.square(hidden @ params["w2"] - y))


def step(params, momentum, x, y):
    """Not one mark."""
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum, value


keys = jax.random.split(jax.random.key(0), 4)
params = {
    "w1": jax.random.normal(keys[0], (M, H)) / M**0.5,
    "b1": jnp.zeros(H),
    "w2": jax.random.normal(keys[1], (H, M)) / H**0.5,
}
momentum = jax.tree.map(jnp.zeros_like, params)
x, y = jax.random.normal(keys[2], (B, M)), jax.random.normal(keys[3], (B, M))

cpu = gshard.Machine.of("cpu:8")
slow = dataclasses.replace(
    cpu,
    name="slow",
    flops={"f32": 1e7},
    vector_flops=1e6,
    memory_bandwidth=1e8,
    launch=0.0,
    network=tuple(dataclasses.replace(d, latency=1e-6) for d in cpu.network),
)
found = gshard.search(
    jax.jit(step, donate_argnums=(0, 1)), params, momentum, x, y, mesh={"data": 2, "model": 4}, machine=slow
)
print(found)
print(*found.explain().instead("params['w1']"), sep="\n")
assert found.best.fits
assert found.gap < 1e-3
assert found.cost.seconds <= min(other.cost.seconds for other in found.best.others)

run = gshard.jit(step, mesh=found.mesh, plan=found.plan)
expected = jax.jit(step)(params, momentum, x, y)
for ours, theirs in zip(jax.tree.leaves(run(params, momentum, x, y)), jax.tree.leaves(expected), strict=True):
    assert jnp.allclose(ours, theirs, atol=1e-5)
