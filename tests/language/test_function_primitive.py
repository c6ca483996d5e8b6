"""Equations that gshard writes can be mapped: a loop that runs as a pipeline maps its layers over the stages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard.language.region import Interpreter
from gshard.rules.slicing import concatenate_slices_p

RNG = np.random.default_rng(2)
X, Y = (RNG.standard_normal((3, 8, 4)).astype(np.float32) for _ in range(2))


def rolled(x):
    return jnp.roll(x, 3, axis=0)


def rotated(x):
    a, b = x[:4], x[4:]
    return jnp.concatenate([a - b, b + a], axis=0)


def prefixes(x):
    return lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, 2 * x), axis=0)[1]


def bands(x):
    return jax.image.resize(x, (16, 4), "linear")


def positions(x):
    return jnp.searchsorted(jnp.sort(x[:, 0]), x)


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("f", [rolled, rotated, prefixes, bands, positions])
def test_a_traced_function_can_be_mapped(f, dim):
    block = gshard.stages.trace(f, X[0]).block
    mapped = jax.vmap(lambda x: Interpreter().run(block, [x])[0], dim)(np.moveaxis(X, 0, dim))
    np.testing.assert_allclose(mapped, jax.vmap(f)(X), rtol=1e-5, atol=1e-6)


def test_some_operands_are_mapped():
    """Arrays and scalars, each with the mapped dimension and without."""
    joined = functools.partial(concatenate_slices_p.bind, dimension=0, slices=((2, 8), (0, 3), (1, 4)), added=False)
    c = jnp.arange(3.0)
    by_hand = lambda x, y, c: jnp.concatenate([x[2:], jnp.full((3, 4), c), y[1:4]])  # noqa: E731
    for axes in ((0, None, None), (None, 0, None), (0, 0, 0), (None, None, 0)):
        arguments = [a if d == 0 else a[0] for a, d in zip((X, Y, c), axes, strict=True)]
        got = jax.vmap(lambda x, y, c: joined(x, c, y), axes)(*arguments)
        np.testing.assert_array_equal(got, jax.vmap(by_hand, axes)(*arguments))
    assert "concatenate_slices" in str(jax.make_jaxpr(jax.vmap(lambda x, y: joined(x, c[0], y)))(X, Y))
