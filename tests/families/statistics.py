"""Means, variances, softmax and norms along dimensions that are split."""

import jax
import jax.numpy as jnp

import gshard
from families.case import GRID, LINE, Family

CASES = Family("statistics")

X = (128, 512)


@CASES.add(LINE, X, (512,), (512,), gradient=(0, 1, 2))
def layer_norm(x, scale, bias):
    x = gshard.split(x, 1, "x")
    mean = x.mean(1, keepdims=True)
    variance = jnp.square(x - mean).mean(1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale + bias


@CASES.add(LINE, X, gradient=(0,))
def moments(x):
    """Sum and sum of squares of the same dimension: one message would do."""
    x = gshard.split(x, 1, "x")
    return x.mean(1), jnp.square(x).mean(1)


@CASES.add(LINE, X, gradient=(0,))
def batch_norm(x):
    x = gshard.split(x, 0, "x")
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-6)


@CASES.add(LINE, X, gradient=(0,))
def softmax(x):
    return jax.nn.softmax(gshard.split(x, 1, "x"))


@CASES.add(LINE, X, gradient=(0,))
def log_softmax(x):
    return jax.nn.log_softmax(gshard.split(x, 1, "x"))


@CASES.add(GRID, X)
def whole_norm(x):
    x = gshard.shard(x, jax.sharding.PartitionSpec("x", "y"))
    return x / jnp.linalg.norm(x)


@CASES.add(LINE, X)
def extremes(x):
    x = gshard.split(x, 1, "x")
    return (x - x.min(1, keepdims=True)) / (x.max(1, keepdims=True) - x.min(1, keepdims=True))


@CASES.add(LINE, (128, 500))
def uneven_softmax(x):
    return jnp.max(jax.nn.softmax(gshard.split(x, 1, "x")), 1)


@CASES.add(LINE, (128, 500))
def uneven_deviation(x):
    return jnp.std(gshard.split(x, 1, "x"), 1)
