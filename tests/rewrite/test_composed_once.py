"""What is composed once is not composed again: copies of the equations that are there are no progress."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from gshard.tracing.trace import trace


def cut_across(x: jax.Array, y: jax.Array) -> jax.Array:
    """A join that is cut along another dimension: both parts are cut, then joined."""
    return jnp.concatenate([x, y])[:, 3:7]


def padded_across(x: jax.Array, y: jax.Array) -> jax.Array:
    """A join that is padded along another dimension."""
    return jnp.pad(jnp.concatenate([x, y]), ((0, 0), (2, 1)))


def bordered(x: jax.Array, y: jax.Array) -> jax.Array:
    """Borders of two dimensions, of what has some already."""
    return jnp.pad(x, ((0, 2), (1, 0)), mode="symmetric") + jnp.pad(y, ((0, 2), (1, 0)), mode="symmetric")


@pytest.mark.parametrize("function", [cut_across, padded_across, bordered])
def test_few_rewrites_fire(function: object) -> None:
    assert callable(function)
    array = jax.ShapeDtypeStruct((5, 9), jnp.float32)
    fired = [one.rewrite for one in trace(function, array, array).fired]
    assert 0 < fired.count("compose_movement") <= 5
