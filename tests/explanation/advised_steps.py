"""Functions that send more than they need: a sharding constraint on a value inside, or one less, spares it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec


def mesh_of_devices() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def given(mesh: Any, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def lost_batch(weights: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """XLA looks the tokens up with a table that is split over the axis of the batch, and loses the batch."""
    x = weights["embed"][tokens]
    h = jax.nn.gelu(x @ weights["up"])
    x = x + h @ weights["down"]
    return (x**2).mean()


def step_of_lost_batch(weights: dict[str, jax.Array], tokens: jax.Array) -> dict[str, jax.Array]:
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(lost_batch)(weights, tokens))


def arguments_of_lost_batch(mesh: Any) -> tuple[Any, ...]:
    weights = {
        "embed": given(mesh, (4096, 256), "data", "model"),
        "up": given(mesh, (256, 1024), "data", "model"),
        "down": given(mesh, (1024, 256), "model", "data"),
    }
    return weights, given(mesh, (64, 64), "data", dtype=jnp.int32)


def with_left_over_constraint(mesh: Any) -> Any:
    """A step whose author once wanted to look at an array, and gathered it."""

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w)
        h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P()))
        return (h * 2).sum(axis=1)

    return jax.jit(f)


def arguments_of_left_over_constraint(mesh: Any) -> tuple[Any, ...]:
    return given(mesh, (256, 128)), given(mesh, (512, 256), "data")


def fsdp(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The reshape loses the split of the batch, its second dimension. XLA then gathers what the layers compute."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        h = jnp.tanh(x @ w["up"])
        return x + h @ w["down"], None

    x = x.reshape(-1, x.shape[-1])
    x = jax.lax.scan(layer, x, weights)[0]
    return (x**2).mean()


def step_of_fsdp(weights: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(fsdp)(weights, x))


def arguments_of_fsdp(mesh: Any) -> tuple[Any, ...]:
    weights = {
        "up": given(mesh, (4, 256, 1024), None, None, ("data", "model")),
        "down": given(mesh, (4, 1024, 256), None, None, ("data", "model")),
    }
    return weights, given(mesh, (8, 512, 256), None, ("data", "model"))
