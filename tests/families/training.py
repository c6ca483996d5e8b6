"""Training steps: data parallelism, optimizer state split (ZeRO), weights split (FSDP), micro-batches."""

import jax
import jax.numpy as jnp

import gshard
from families.case import GRID, LINE, Family
from families.layers import B, H, M, S, feed_forward, norm

CASES = Family("training")

PARAMS = {"w1": (M, H), "b1": (H,), "w2": (H, M)}
STATE = {"mu": PARAMS, "nu": PARAMS}
BATCH = {"x": (B, S, M), "y": (B, S, M)}


def loss(params, batch):
    h = jax.nn.gelu(norm(batch["x"]) @ params["w1"] + params["b1"])
    return jnp.mean(jnp.square(h @ params["w2"] - batch["y"]))


def adam(params, state, grads):
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, state["nu"], grads)
    params = jax.tree.map(lambda p, m, n: p - 0.01 * m / (jnp.sqrt(jnp.abs(n)) + 1e-8), params, mu, nu)
    return params, {"mu": mu, "nu": nu}


def step(params, state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return (*adam(params, state, grads), value)


@CASES.add(LINE, PARAMS, STATE, BATCH)
def adam_data(params, state, batch):
    return step(gshard.replicate(params), gshard.replicate(state), gshard.split(batch, 0, "x"))


@CASES.add(LINE, PARAMS, STATE, BATCH)
def adam_zero(params, state, batch):
    """Weights whole before and after, optimizer state split: ZeRO, weight-update sharding."""
    params, state, value = step(gshard.replicate(params), gshard.split(state, 0, "x"), gshard.split(batch, 0, "x"))
    return gshard.replicate(params), gshard.split(state, 0, "x"), value


@CASES.add(LINE, PARAMS, STATE, BATCH)
def adam_zero_state_only(params, state, batch):
    """The state coming in is all that is marked beside the batch."""
    return step(params, gshard.split(state, 0, "x"), gshard.split(batch, 0, "x"))


@CASES.add(LINE, PARAMS, STATE, BATCH)
def adam_fsdp(params, state, batch):
    """Weights and state split, activations split on the batch."""
    params, state = gshard.split(params, 0, "x"), gshard.split(state, 0, "x")
    params, state, value = step(params, state, gshard.split(batch, 0, "x"))
    return gshard.split(params, 0, "x"), gshard.split(state, 0, "x"), value


@CASES.add(LINE, (B, S, M), {"w1": (M, H), "w2": (H, M)}, gradient=(1,))
def fsdp(x, params):
    """Weights split where they rest, the batch wherever it is used."""
    params = gshard.split(params, 0, "x")
    h = gshard.split(jax.nn.gelu(gshard.split(x, 0, "x") @ params["w1"]), 0, "x")
    return gshard.split(h @ params["w2"], 0, "x")


@CASES.add(GRID, (B, S, M), {"w1": (M, H), "w2": (H, M)}, gradient=(1,))
def fsdp_and_tensor(x, params):
    """Weights over both axes, the batch over one, hidden units over the other."""
    w1 = gshard.shard(params["w1"], jax.sharding.PartitionSpec("x", "y"))
    w2 = gshard.shard(params["w2"], jax.sharding.PartitionSpec("y", "x"))
    return gshard.split(feed_forward(gshard.split(x, 0, "x"), w1, w2), 0, "x")


@CASES.add(LINE, {"w1": (M, H), "b1": (H,), "w2": (H, M)}, {"x": (4, B, S, M), "y": (4, B, S, M)})
def micro_batches(params, batch):
    """Gradients of four micro-batches, added up by a scan."""
    batch = gshard.split(batch, 1, "x")

    def add(total, micro):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, micro)), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)[0]


@CASES.add(LINE, PARAMS, STATE, {"x": (4, B, S, M), "y": (4, B, S, M)})
def micro_batches_zero(params, state, batch):
    """The same into an optimizer whose state is split."""
    grads = micro_batches(gshard.replicate(params), batch)
    params, state = adam(params, gshard.split(state, 0, "x"), grads)
    return gshard.replicate(params), gshard.split(state, 0, "x")


@CASES.add(LINE, PARAMS, BATCH)
def clipped_gradients(params, batch):
    """The norm of all gradients scales each."""
    grads = jax.grad(loss)(params, gshard.split(batch, 0, "x"))
    size = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g / jnp.maximum(size, 1.0), grads)
