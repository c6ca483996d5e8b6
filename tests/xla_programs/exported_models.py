"""Models of Flax that plans are exported for, and the plan of given shardings, exported."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import gshard

MESHES = [{"data": 8}, {"data": 2, "model": 4}, {"a": 2, "b": 2, "c": 2}]
X = jax.ShapeDtypeStruct((64, 64), "float32")


class Block(nn.Module):
    """A residual feed-forward block whose weights have logical names."""

    @nn.compact
    def __call__(self, x, _):
        init = nn.initializers.lecun_normal()
        up = nn.with_logical_partitioning(init, ("embed", "mlp"))
        down = nn.with_logical_partitioning(init, ("mlp", "embed"))
        h = nn.gelu(nn.Dense(256, use_bias=False, kernel_init=up, name="up")(x))
        return x + nn.Dense(64, use_bias=False, kernel_init=down, name="down")(h), None


class Scanned(nn.Module):
    """Three such blocks, stacked by ``nn.scan``."""

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        found, _ = blocks(name="blocks")(x, None)
        return found


def linen_step():
    """A training step of ``Scanned``, and its boxed variables."""
    model = Scanned()

    def step(variables, x):
        def loss(variables):
            return jnp.mean((model.apply(variables, x) - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(variables)
        return jax.tree.map(lambda w, g: w - 0.1 * g, variables, gradients), value

    return step, jax.eval_shape(model.init, jax.random.key(0), X)


def exported(step, *args, mesh, in_shardings=None, **options):
    """The plan in which positional arguments have these shardings, exported; without much of a search."""
    kwargs = options.pop("kwargs", {})
    made = gshard.jit(step, mesh=mesh, in_shardings=in_shardings, **options)
    found = gshard.search(made, *args, machine="h100:1x8", progress=False, budget_seconds=1e-3, **kwargs)
    return gshard.export_plan(found)


def split_hidden(arrays, axes, hidden=256):
    """A spec for each array that splits its dimension of the hidden size."""

    def spec(x):
        return jax.sharding.PartitionSpec(*(axes if n == hidden else None for n in x.shape))

    return jax.tree.map(spec, arrays)
