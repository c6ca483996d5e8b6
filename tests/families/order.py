"""Order: running sums, sorts, largest elements and Fourier transforms, along a split dimension and beside it."""

import jax
import jax.numpy as jnp

import gshard
from families.case import LINE, Family

CASES = Family("order")

X, LONG = (64, 512), (8192,)


@CASES.add(LINE, X, gradient=(0,))
def cumsum(x):
    return jnp.cumsum(gshard.split(x, 1, "x"), 1)


@CASES.add(LINE, X)
def cummax(x):
    return jax.lax.cummax(gshard.split(x, 1, "x"), 1)


@CASES.add(LINE, X)
def cumlogsumexp(x):
    return jax.lax.cumlogsumexp(gshard.split(x, 1, "x"), 1)


@CASES.add(LINE, X)
def associative_scan(x):
    return jax.lax.associative_scan(jnp.add, gshard.split(x, 1, "x"), axis=1)


@CASES.add(LINE, LONG)
def sort(x):
    return jnp.sort(gshard.split(x, 0, "x"))


@CASES.add(LINE, X)
def sort_rows(x):
    return jnp.sort(gshard.split(x, 1, "x"), 1)


@CASES.add(LINE, X)
def sort_beside(x):
    return jnp.sort(gshard.split(x, 0, "x"), 1)


@CASES.add(LINE, LONG)
def argsort(x):
    return jnp.argsort(gshard.split(x, 0, "x"))


@CASES.add(LINE, X)
def median(x):
    return jnp.median(gshard.split(x, 0, "x"), 1)


@CASES.add(LINE, X, gradient=(0,))
def top_k(x):
    return jax.lax.top_k(gshard.split(x, 1, "x"), 4)[0]


@CASES.add(LINE, X)
def top_k_beside(x):
    return jax.lax.top_k(gshard.split(x, 0, "x"), 4)


@CASES.add(LINE, X)
def argmax(x):
    return jnp.argmax(gshard.split(x, 1, "x"), 1)


@CASES.add(LINE, X)
def one_argmax(x):
    return jnp.argmax(gshard.split(x, 0, "x"))


@CASES.add(LINE, X)
def fft_beside(x):
    return jnp.abs(jnp.fft.fft(gshard.split(x, 0, "x"), axis=1))


@CASES.add(LINE, X)
def fft_rows(x):
    return jnp.abs(jnp.fft.fft(gshard.split(x, 1, "x"), axis=1))


@CASES.add(LINE, (64, 16, 16))
def cholesky_beside(x):
    x = gshard.split(x, 0, "x")
    return jnp.linalg.cholesky(jnp.einsum("bij,bkj->bik", x, x) + 16 * jnp.eye(16))


@CASES.add(LINE, X)
def quantile_of_columns(x):
    """Sorted along what is split, the other dimension large enough to be split instead."""
    return jnp.sort(gshard.split(x, 0, "x"), 0)[::8]
