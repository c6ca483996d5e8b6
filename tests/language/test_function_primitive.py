"""Equations that gshard writes can be mapped: a loop that runs as a pipeline maps its layers over the stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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


def rolled(x: Any) -> Any:
    return jnp.roll(x, 3, axis=0)


def rotated(x: Any) -> Any:
    a, b = x[:4], x[4:]
    return jnp.concatenate([a - b, b + a], axis=0)


def prefixes(x: Any) -> Any:
    return lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, 2 * x), axis=0)[1]


def bands(x: Any) -> Any:
    return jax.image.resize(x, (16, 4), "linear")


def positions(x: Any) -> Any:
    return jnp.searchsorted(jnp.sort(x[:, 0]), x)


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("f", [rolled, rotated, prefixes, bands, positions])
def test_a_traced_function_can_be_mapped(f: Callable[..., Any], dim: int) -> None:
    block = gshard.stages.trace(f, X[0]).block
    mapped = jax.vmap(lambda x: Interpreter().run(block, [x])[0], dim)(np.moveaxis(X, 0, dim))
    np.testing.assert_allclose(mapped, jax.vmap(f)(X), rtol=1e-5, atol=1e-6)


def test_some_operands_are_mapped() -> None:
    """Arrays and scalars, each with the mapped dimension and without."""
    joined = functools.partial(concatenate_slices_p.bind, dimension=0, slices=((2, 8), (0, 3), (1, 4)), added=False)
    c = jnp.arange(3.0)
    by_hand = lambda x, y, c: jnp.concatenate([x[2:], jnp.full((3, 4), c), y[1:4]])  # noqa: E731
    for axes in ((0, None, None), (None, 0, None), (0, 0, 0), (None, None, 0)):
        arguments = [a if d == 0 else a[0] for a, d in zip((X, Y, c), axes, strict=True)]
        got = jax.vmap(lambda x, y, c: joined(x, c, y), axes)(*arguments)
        np.testing.assert_array_equal(got, jax.vmap(by_hand, axes)(*arguments))
    assert "concatenate_slices" in str(jax.make_jaxpr(jax.vmap(lambda x, y: joined(x, c[0], y)))(X, Y))


def layer(x: Any, w: Any) -> Any:
    """A layer with rotary positions, a recurrence and a wider norm, on [rows, length, units]."""
    wide = x.astype(jnp.float32)
    y = (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * (1 + w["scale"].astype(jnp.float32))).astype(
        x.dtype
    )
    a, b = y[..., :4], y[..., 4:]
    angles = jnp.arange(x.shape[1], dtype=x.dtype)[:, None] / 10
    y = jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)
    decay = jax.nn.sigmoid(y @ w["decay"])
    _, y = lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decay, y), axis=1)
    return x + y @ w["out"], None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_such_layers_run_as_pipelines(dtype: Any) -> None:
    """With weights in a narrow type: the gradient of the scale is a sum over the batch that the layer rounds."""
    w = {
        "scale": RNG.standard_normal((4, 8)) / 4,
        "decay": RNG.standard_normal((4, 8, 8)),
        "out": RNG.standard_normal((4, 8, 8)) / 4,
    }
    w, x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (w, RNG.standard_normal((8, 6, 8))))

    def loss(w: Any, x: Any, *, stages: int = 0, dtype: Any = dtype) -> Any:
        w, x = jax.tree.map(lambda a: a.astype(dtype), (w, x))
        w = gshard.pipeline(w, stages, micro_batches=4) if stages else w
        return (lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32) ** 2).mean()

    run = gshard.jit(jax.value_and_grad(functools.partial(loss, stages=4)), mesh=8)
    exact = jax.value_and_grad(functools.partial(loss, dtype=jnp.float32))(w, x)
    plain = jax.jit(jax.value_and_grad(loss))(w, x)
    for _ in range(3):
        got = run(w, x)
        for a, b, c in zip(*map(jax.tree.leaves, (got, plain, exact)), strict=True):
            error, error_of_plain = (float(jnp.abs(v - c).max()) for v in (a, b))
            assert error <= 2 * error_of_plain + 1e-5 * float(jnp.abs(c).max())
        w = jax.tree.map(lambda a: jax.device_put(a, jax.devices()[1]), w)
