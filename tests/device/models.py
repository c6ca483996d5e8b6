"""Models to cost and explain: functions, arguments as shapes, the mesh and what is donated."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import gshard
from gshard import moe

GRID = {"data": 4, "model": 2}
LINE = {"devices": 8}
Model = tuple[Callable[..., Any], tuple[Any, ...], dict[str, int], tuple[int, ...]]


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def perceptron(params, x):
    x = gshard.split(x, 0, "data")
    for wi, wo in params:
        x = x + jax.nn.relu(x @ gshard.split(wi, 1, "model")) @ gshard.split(wo, 0, "model")
    return jnp.mean(x * x)


def descent(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(perceptron)(params, x))


def adam(params, m, v, x):
    grads = jax.grad(perceptron)(params, x)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, grads)
    return jax.tree.map(lambda p, m, v: p - 0.01 * m / (jnp.sqrt(v) + 1e-8), params, m, v), m, v


def attention(params, x):
    x = gshard.split(x, 0, "data")
    for p in params:
        h = x - jnp.mean(x, -1, keepdims=True)
        q, k, v = (jnp.einsum("bsm,mhd->bshd", h, w) for w in p["qkv"])
        weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k), -1)
        x = x + jnp.einsum("bhst,bthd,hdm->bsm", weights, v, p["o"])
        x = x + jax.nn.gelu(x @ gshard.shard(p["wi"], jax.sharding.PartitionSpec(None, "model"))) @ p["wo"]
    return jnp.mean(x * x)


def recurrent(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), gshard.split(x, 0, "data"), ws)[0] ** 2)


def recomputed(ws, x):
    def body(x, w):
        return jax.nn.relu(x @ w) @ w.T, None

    return jnp.mean(jax.lax.scan(jax.checkpoint(body), gshard.split(x, 0, "data"), ws)[0] ** 2)


def vocabulary(x, w, y):
    logits = gshard.split(x, 0, "data") @ gshard.split(w, 1, "model")
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))


def experts(**changes):
    config = moe.TransformerConfig(
        source_vocabulary=512, target_vocabulary=512, model_dim=64, hidden_dim=256, heads=4, head_dim=16,
        encoder_layers=4, decoder_layers=4, experts=8, group_size=128, partitions=8, **changes,
    )  # fmt: skip
    params = jax.eval_shape(lambda: moe.init(config, jax.random.key(0)))
    batch = {name: jax.ShapeDtypeStruct((64, 64), jnp.int32) for name in ("source", "target")}

    def loss(params, batch):
        return moe.loss(config, params, batch, key=jax.random.key(0))[0]

    return jax.grad(loss), (params, batch), LINE, ()


_MLP = [(f32(256, 1024), f32(1024, 256))] * 4
_X = f32(2048, 256)
_ATTENTION = [{"qkv": [f32(64, 8, 16)] * 3, "o": f32(8, 16, 64), "wi": f32(64, 256), "wo": f32(256, 64)}] * 4

MODELS = {
    "perceptron": (perceptron, (_MLP, _X), GRID, ()),
    "gradient": (jax.grad(perceptron), (_MLP, _X), GRID, ()),
    "descent": (descent, (_MLP, _X), GRID, (0,)),
    "adam": (adam, (_MLP, _MLP, _MLP, _X), GRID, (0, 1, 2)),
    "attention": (jax.grad(attention), (_ATTENTION, f32(64, 128, 64)), GRID, ()),
    "recurrent": (jax.grad(recurrent), (f32(8, 256, 256), f32(4096, 256)), GRID, ()),
    "recomputed": (jax.grad(recomputed), (f32(8, 256, 1024), f32(4096, 256)), GRID, ()),
    "vocabulary": (
        jax.grad(vocabulary, (0, 1)), (f32(512, 128), f32(128, 8192), jax.ShapeDtypeStruct((512,), jnp.int32)), GRID, ()
    ),
}  # fmt: skip


WITH_EXPERTS = {"experts gradient": {}, "experts recomputed": {"remat": True}, "experts einsum": {"dispatch": "einsum"}}


def model(name):
    """A model by name; those with experts are made when they are asked for."""
    return experts(**WITH_EXPERTS[name]) if name in WITH_EXPERTS else MODELS[name]


@functools.cache
def lowered(name):
    """A model on its mesh without devices; planned once for all tests that read it."""
    _, args, *_ = model(name)
    return _jitted(name).lower(*args)


@functools.cache
def explained(name):
    """The explanation of the same plan."""
    _, args, *_ = model(name)
    return gshard.explain(_jitted(name), *args)


@functools.cache
def _jitted(name):
    f, _, axes, donated = model(name)
    return gshard.jit(f, mesh=gshard.Mesh.abstract(**axes), donate_argnums=donated)
