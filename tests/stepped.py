"""Training steps and products whose collectives are known, on abstract meshes: nothing is placed, and nothing runs."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import gshard

LAYERS, MODEL, HIDDEN, BATCH = 6, 64, 128, 32
DATA, GRID = AbstractMesh((8,), ("data",)), AbstractMesh((2, 4), ("data", "model"))


def array(shape, mesh, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def loss(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


def step(params, x):
    gradients = jax.grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def fsdp_arguments(layers=LAYERS):
    """The arguments of ``step``, weights and examples split over all devices."""
    return {"w": array((layers, MODEL, MODEL), DATA, None, "data")}, array((BATCH, MODEL), DATA, "data")


def marked_step(params, x):
    """The same step for gshard, which gathers the weights as FSDP does."""
    return step({"w": gshard.split(params["w"], 1, "data")}, gshard.split(x, 0, "data"))


def mlp(x, up, down):
    return jax.nn.relu(x @ up) @ down


def tensor_parallel_arguments():
    """The arguments of ``mlp``, as Megatron splits them: the sum over the hidden dimension is one all_reduce."""
    return (
        array((BATCH, MODEL), GRID, "data"),
        array((MODEL, HIDDEN), GRID, None, "model"),
        array((HIDDEN, MODEL), GRID, "model"),
    )


def marked_mlp(x, up, down):
    """The same product for gshard."""
    up, down = gshard.split(up, 1, "model"), gshard.split(down, 0, "model")
    return gshard.shard(mlp(gshard.split(x, 0, "data"), up, down), PartitionSpec("data"))


def without_lines(text):
    """Text without the numbers of lines: versions of XLA note the line of a scan, or of what its body applies."""
    return re.sub(r"\.py:\d+", ".py:N", text)
