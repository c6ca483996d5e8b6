"""Spatial partitioning: a small U-Net on an image whose rows are split, where only the rows at the edges are sent.

python examples/spatial_unet.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax import lax

import gshard

DEVICES, B, HEIGHT, WIDTH, C = 8, 2, 64, 32, 4


def convolve(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def unpool(x):
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def unet(params, image):
    """Two levels: down, the middle, and up again beside what was kept."""
    image = gshard.split(image, 1, DEVICES)
    fine = jax.nn.relu(convolve(image, params["fine"]))
    coarse = jax.nn.relu(convolve(pool(fine), params["coarse"]))
    deep = jax.nn.relu(convolve(pool(coarse), params["deep"]))
    coarse = jax.nn.relu(convolve(jnp.concatenate([unpool(deep), coarse], -1), params["up"]))
    return convolve(jnp.concatenate([unpool(coarse), fine], -1), params["out"])


CHANNELS = {"fine": (C, 8), "coarse": (8, 16), "deep": (16, 16), "up": (32, 16), "out": (24, C)}
keys = jax.random.split(jax.random.key(0), len(CHANNELS))
params = {n: jax.random.normal(k, (3, 3, *c)) / 8 for k, (n, c) in zip(keys, CHANNELS.items(), strict=True)}
image = jax.random.normal(jax.random.key(1), (B, HEIGHT, WIDTH, C))

on_eight = gshard.jit(unet, mesh=DEVICES)
assert jnp.allclose(on_eight(params, image), jax.jit(unet)(params, image), atol=1e-3)
told = gshard.explain(on_eight, params, image)
print(told)
assert told.bytes_by_kind.keys() == {"collective_permute"}
assert sum(row.times for row in told.collectives) == 2 * len(CHANNELS), "a row up and a row down for each convolution"


def loss(params, image):
    return jnp.square(unet(params, image)).mean()


gradient = gshard.jit(jax.grad(loss), mesh=DEVICES)
expected = jax.jit(jax.grad(loss))(params, image)
for ours, theirs in zip(jax.tree.leaves(gradient(params, image)), jax.tree.leaves(expected), strict=True):
    assert jnp.allclose(ours, theirs, atol=1e-3)
backward = gshard.explain(gradient, params, image)
print(f"\nwith the backward pass\n{backward}")
