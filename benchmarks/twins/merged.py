"""Merged: dimensions that are merged and parted again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from twins.program import Program, normal


def merged() -> Iterator[Program]:
    x, w, images = normal(8, 512, 64), normal(64, 128) / 8, normal(4, 128, 64, 8)
    tokens, rows = P(None, "x"), P(None, "x")

    def flat(x: Any, w: Any) -> Any:
        return jnp.tanh(x.reshape(-1, 64) @ w).reshape(8, 512, 128)

    def apart(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.einsum("bsd,df->bsf", x, w))

    yield Program("tokens, flattened", flat, apart, (x, w), (tokens, P()), tokens, 1e-5)

    def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda w, x: jnp.sum(f(x, w) ** 2))

    def sums(w: Any, x: Any) -> Any:
        return lax.psum(gradient(apart)(w, x), "x")

    yield Program("gradient of flattened tokens", gradient(flat), sums, (w, x), (P(), tokens), P(), 1e-4)

    def windows(x: Any) -> Any:
        b, n, _, c = x.shape
        y = x.reshape(b, n // 8, 8, 8, 8, c).swapaxes(2, 3).reshape(-1, 64, c)
        y = jnp.einsum("wqk,wkc->wqc", jax.nn.softmax(jnp.einsum("wqc,wkc->wqk", y, y)), y)
        return y.reshape(b, n // 8, 8, 8, 8, c).swapaxes(2, 3).reshape(x.shape)

    yield Program("attention in windows of an image", windows, windows, (images,), (rows,), rows, 1e-4)

    def larger(x: Any) -> Any:
        b, n, m, c = x.shape
        return jax.image.resize(x, (b, 2 * n, 2 * m, c), "nearest")

    yield Program("an image twice as large", larger, larger, (images,), (rows,), rows)
