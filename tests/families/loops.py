"""Loops: stacks of layers, pipelines, recurrences."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard
from families.case import GRID, LINE, Family

CASES = Family("loops")

L, B, M, H = 8, 64, 64, 128
X, STACK = (B, M), {"w1": (L, M, H), "w2": (L, H, M)}


def residual(x, p):
    """Weights are made small: what a layer's rounding comes to must not grow from layer to layer."""
    return x + jnp.tanh(jax.nn.relu(x @ p["w1"]) @ p["w2"] / 400)


def over_layers(x, p):
    return jax.lax.scan(lambda x, layer: (residual(x, layer), None), x, p)[0]


@CASES.add(LINE, X, STACK, gradient=(1,))
def stack_data(x, p):
    return over_layers(gshard.split(x, 0, "x"), p)


@CASES.add(GRID, X, STACK, gradient=(0, 1))
def stack_tensor(x, p):
    p = {"w1": gshard.split(p["w1"], 2, "y"), "w2": gshard.split(p["w2"], 1, "y")}
    return over_layers(gshard.split(x, 0, "x"), p)


@CASES.add(LINE, X, STACK, gradient=(1,))
def stack_fsdp(x, p):
    """Every layer's weights are split; each is gathered when it is used."""
    return over_layers(gshard.split(x, 0, "x"), gshard.split(p, 1, "x"))


@CASES.add(LINE, X, STACK, gradient=(1,))
def stack_by_layer(x, p):
    """The stack itself is split: a device holds some layers."""
    return over_layers(gshard.split(x, 0, "x"), gshard.split(p, 0, "x"))


@CASES.add(LINE, X, STACK, gradient=(1,))
def stack_rematerialised(x, p):
    def body(x, layer):
        return jax.checkpoint(residual)(x, layer), None

    return jax.lax.scan(body, gshard.split(x, 0, "x"), p)[0]


def tied(x, w):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w / 8), None), x, None, length=L)[0]


@CASES.add(LINE, X, (M, M), gradient=(0, 1))
def tied_fsdp(x, w):
    """Eight layers share one weight, of which every device holds a part."""
    return tied(gshard.split(x, 0, "x"), gshard.split(w, 0, "x"))


@CASES.add(GRID, X, (M, M), gradient=(0, 1))
def tied_tensor(x, w):
    return tied(gshard.split(x, 0, "x"), gshard.split(w, 1, "y"))


def recurrent(x, u, w):
    return jax.lax.scan(lambda h, x: (jnp.tanh((h @ u + x @ w) / 16),) * 2, jnp.zeros((16, M)), x)[1]


@CASES.add(LINE, (32, 16, M), (M, M), (M, M), gradient=(1, 2))
def recurrence(x, u, w):
    """A recurrent network over 32 steps, the batch split."""
    x = gshard.split(x, 1, "x")
    return recurrent(x, u, w)


@CASES.add(LINE, (32, 16, M), (M, M), (M, M), gradient=(1, 2))
def recurrence_units(x, u, w):
    """The same with the units split."""
    u, w = gshard.split(u, 1, "x"), gshard.split(w, 1, "x")
    return recurrent(x, u, w)


@CASES.add(LINE, (12, 16, M), {"w1": (8, M, H), "w2": (8, H, M)}, gradient=(1,))
def pipeline(x, p):
    """Twelve micro-batches through eight stages: each round all stages work and hand on."""
    p = gshard.split(p, 0, "x")
    rounds = jnp.concatenate([x, jnp.zeros((7, *x.shape[1:]))])

    def turn(state, new):
        state = gshard.split(jnp.roll(state, 1, 0).at[0].set(new), 0, "x")
        state = jax.vmap(residual)(state, p)
        return state, state[-1]

    return jax.lax.scan(turn, jnp.zeros((8, *x.shape[1:])), rounds)[1][7:]


@CASES.add(LINE, (256, 256))
def relaxation(x):
    """Ten rounds of averaging with neighbours, rows split."""

    def body(_, x):
        return (jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) + jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1)) / 4

    return jax.lax.fori_loop(0, 10, body, gshard.split(x, 0, "x"))


@CASES.add(GRID, (256, 256), (256,))
def power_method(a, v):
    """Ten rounds of a matrix that is split both ways."""
    a = gshard.shard(a, P("x", "y"))

    def body(_, v):
        v = a @ v
        return v / jnp.linalg.norm(v)

    return jax.lax.fori_loop(0, 10, body, v)
