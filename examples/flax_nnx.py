"""Flax NNX: gshard.jit takes the state that nnx.split gives, and nnx.update puts what comes back into the modules.

That is what ``nnx.jit`` does by itself. Modules and optimizer are used as ever; the state (weights, Adam's moments,
dropout's key and counter) may be donated, and comes back under the same program.

    python examples/flax_nnx.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gshard

DEVICES, B, M, H = 8, 512, 32, 128


class MLP(nnx.Module):
    """One hidden layer, with dropout."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(M, H, rngs=rngs), nnx.Linear(H, M, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.gelu(self.first(x))))


def train(model, optimizer, x):
    """One step in NNX's way: modules are changed in place."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(jnp.square(model(x) - x)))(model)
    optimizer.update(model, grads)
    return loss


@functools.partial(gshard.jit, mesh=DEVICES, static_argnames="graphdef", donate_argnames="state")
def step(graphdef, state, x):
    """The same step as a function of arrays, its batch split."""
    model, optimizer = nnx.merge(graphdef, state)
    loss = train(model, optimizer, gshard.split(x, 0, DEVICES))
    return nnx.state((model, optimizer)), loss


def made():
    model = MLP(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


ours, theirs, on_one = made(), made(), nnx.jit(train)
x = jax.random.normal(jax.random.key(1), (B, M))
programs = set()
for _ in range(3):
    graphdef, state = nnx.split(ours)
    programs.add(step.lower(graphdef, state, x))
    state, loss = step(graphdef, state, x)
    nnx.update(ours, state)
    expected = on_one(*theirs, x)
    assert jnp.allclose(loss, expected, rtol=1e-5)
    print(f"loss {loss:.4f}")
assert len(programs) == 1, "the state comes back as it went in"
for found, expected in zip(
    jax.tree.leaves(nnx.state(ours[0], nnx.Param)), jax.tree.leaves(nnx.state(theirs[0], nnx.Param))
):
    assert jnp.allclose(found, expected, atol=1e-5)

told = gshard.explain(step, *nnx.split(ours), x)
print(f"sent by each device in one step: {told.bytes_by_kind}")
summed = sum(w.nbytes for w in jax.tree.leaves(nnx.state(ours[0], nnx.Param))) + 4  # gradients and the loss
assert told.total_bytes == 2 * summed * (DEVICES - 1) // DEVICES
