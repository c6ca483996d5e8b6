"""Functions that send more than they need: a sharding constraint on a value inside, or one less, spares it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec


def mesh_of_devices():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def given(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def lost_batch(weights, tokens):
    """XLA looks the tokens up with a table that is split over the axis of the batch, and loses the batch."""
    x = weights["embed"][tokens]
    h = jax.nn.gelu(x @ weights["up"])
    x = x + h @ weights["down"]
    return (x**2).mean()


def step_of_lost_batch(weights, tokens):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(lost_batch)(weights, tokens))


def arguments_of_lost_batch(mesh):
    weights = {
        "embed": given(mesh, (4096, 256), "data", "model"),
        "up": given(mesh, (256, 1024), "data", "model"),
        "down": given(mesh, (1024, 256), "model", "data"),
    }
    return weights, given(mesh, (64, 64), "data", dtype=jnp.int32)


def with_left_over_constraint(mesh):
    """A step whose author once wanted to look at an array, and gathered it."""

    def f(w, x):
        h = jnp.tanh(x @ w)
        h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P()))
        return (h * 2).sum(axis=1)

    return jax.jit(f)


def arguments_of_left_over_constraint(mesh):
    return given(mesh, (256, 128)), given(mesh, (512, 256), "data")
