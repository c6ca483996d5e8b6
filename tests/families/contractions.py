"""Contractions whose operands and results are split by rows, columns, or what is summed."""

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard
from families.case import CUBE, GRID, LINE, Family

CASES = Family("contractions")

A, W = (128, 256), (256, 192)


@CASES.add(LINE, A, W, gradient=(0, 1))
def summed(a, w):
    return gshard.split(a, 1, "x") @ gshard.split(w, 0, "x")


@CASES.add(LINE, A, W, gradient=(0, 1))
def summed_to_rows(a, w):
    return gshard.split(gshard.split(a, 1, "x") @ gshard.split(w, 0, "x"), 0, "x")


@CASES.add(LINE, A, W)
def summed_to_columns(a, w):
    return gshard.split(gshard.split(a, 1, "x") @ gshard.split(w, 0, "x"), 1, "x")


@CASES.add(LINE, A, W, gradient=(0, 1))
def rows_to_columns(a, w):
    return gshard.split(gshard.split(a, 0, "x") @ w, 1, "x")


@CASES.add(LINE, A, W)
def rows_and_columns(a, w):
    """One of both has to be gathered: the smaller."""
    return gshard.split(a, 0, "x") @ gshard.split(w, 1, "x")


@CASES.add(LINE, A, W)
def rows_and_sum(a, w):
    return gshard.split(gshard.split(a, 0, "x") @ gshard.split(w, 0, "x"), 0, "x")


@CASES.add(GRID, A, W, gradient=(0, 1))
def grid(a, w):
    """All three over both axes."""
    return gshard.shard(gshard.shard(a, P("x", "y")) @ gshard.shard(w, P("x", "y")), P("x", "y"))


@CASES.add(CUBE, A, W)
def cube(a, w):
    return gshard.shard(gshard.shard(a, P("x", "y")) @ gshard.shard(w, P("y", "z")), P(("x", "y"), "z"))


@CASES.add(LINE, A, A, W, W, gradient=(2, 3))
def two_sums(a, b, v, w):
    """Both sums are split: they need finishing once, after the addition."""
    a, b = gshard.split(a, 1, "x"), gshard.split(b, 1, "x")
    return a @ v + b @ w


@CASES.add(LINE, A, (256, 64), (64, 192), gradient=(1, 2))
def chain(u, v, w):
    """U V W with the first sum split: finishing it after the second product or before, whichever is less."""
    return gshard.split(gshard.split(u, 1, "x") @ v @ w, 0, "x")


@CASES.add(LINE, (64, 256), (256, 512), (512, 64))
def chain_to_narrow(u, v, w):
    """The product of three is an eighth of the product of two: finished last."""
    return gshard.split(u, 1, "x") @ gshard.split(v, 0, "x") @ w


@CASES.add(LINE, (8, 64, 96), (8, 96, 64), gradient=(0, 1))
def batched(a, b):
    return jnp.einsum("bij,bjk->bik", gshard.split(a, 0, "x"), gshard.split(b, 0, "x"))


@CASES.add(LINE, (8, 64, 96), (8, 96, 64))
def batch_and_rows(a, b):
    """The operands disagree about which dimension is split."""
    return jnp.einsum("bij,bjk->bik", gshard.split(a, 1, "x"), gshard.split(b, 0, "x"))


@CASES.add(LINE, (512, 64))
def gram(a):
    a = gshard.split(a, 0, "x")
    return gshard.split(a.T @ a, 0, "x")


@CASES.add(LINE, (512, 512), (512,))
def matrix_vector(a, v):
    """Five rounds of the power method, rows split."""
    a = gshard.split(a, 0, "x")
    for _ in range(5):
        v = a @ v
        v = v / jnp.linalg.norm(v)
    return v


@CASES.add(LINE, (60, 100), (100, 50))
def uneven_rows(a, w):
    return jnp.sum(jnp.tanh(gshard.split(a, 0, "x") @ w), 0)


@CASES.add(LINE, (60, 100), (100, 50))
def uneven_sum(a, w):
    return gshard.split(a, 1, "x") @ gshard.split(w, 0, "x")
