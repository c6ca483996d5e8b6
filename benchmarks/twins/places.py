"""Places: look-ups and updates at places that are known, tables that follow from them, and places of the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from twins.program import PARTS, RNG, Program, from_left, from_right, normal, own_rows


def known_places() -> Iterator[Program]:
    grid, rows = (normal(4096, 256),), P("x", None)

    def inside(x: Any) -> Any:
        return x.at[1:-1].set((x[2:] + x[:-2]) / 2)

    def inside_by_hand(x: Any) -> Any:
        u = jnp.concatenate([from_left(x), x, from_right(x)])
        i = own_rows(4096)[:, None]
        return jnp.where((i > 0) & (i < 4095), (u[2:] + u[:-2]) / 2, x)

    yield Program("inside of a grid", inside, inside_by_hand, grid, (rows,), rows, 1e-5)

    def every_second(x: Any) -> Any:
        return x.at[1::2].set(jnp.abs(x[1::2]))

    yield Program("every second row", every_second, every_second, grid, (rows,), rows)

    def of_labels(x: Any, labels: Any) -> Any:
        return x[jnp.arange(x.shape[0]), labels]

    labels = RNG.integers(0, 256, 4096).astype(np.int32)
    yield Program("of each row one", of_labels, of_labels, (*grid, labels), (rows, P("x")), P("x"))


def tables() -> Iterator[Program]:
    tokens, rows, columns = (normal(4096, 256),), P("x", None), P(None, "x")

    def places(x: Any) -> Any:
        a = jnp.arange(4096)[:, None] / 10000 ** (jnp.arange(128) / 128)
        return x + jnp.concatenate([jnp.sin(a), jnp.cos(a)], 1)

    def places_by_hand(x: Any) -> Any:
        j = own_rows(256)
        a = jnp.arange(4096)[:, None] / 10000 ** (j % 128 / 128)
        return x + jnp.where(j < 128, jnp.sin(a), jnp.cos(a))

    yield Program("sines and cosines", places, places_by_hand, tokens, (columns,), columns, 1e-4)

    def fade(x: Any) -> Any:
        return x * jnp.exp(-jnp.arange(4096) / 999)[::-1, None]

    def fade_by_hand(x: Any) -> Any:
        return x * jnp.exp(-(4095 - own_rows(4096)) / 999)[:, None]

    yield Program("numbers that fade", fade, fade_by_hand, tokens, (rows,), rows, 1e-5)

    def warm_up(x: Any) -> Any:
        return x * jnp.concatenate([jnp.linspace(0, 1, 100), jnp.ones(3996)])[:, None]

    def warm_up_by_hand(x: Any) -> Any:
        return x * jnp.minimum(own_rows(4096) / 99, 1)[:, None]

    yield Program("numbers that rise", warm_up, warm_up_by_hand, tokens, (rows,), rows, 1e-5)


def moved() -> Iterator[Program]:
    """Elements that change places in a way that is known."""
    square, rows = (normal(512, 512),), P("x", None)

    def diagonal_by_hand(x: Any) -> Any:
        return x[jnp.arange(x.shape[0]), own_rows(512)]

    yield Program("diagonal", jnp.diagonal, diagonal_by_hand, square, (rows,), P("x"))

    def angles(positions: Any, j: Any) -> Any:
        return positions[:, None] / 100 ** (j % 64 / 64)

    def rotary(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        angle = angles(jnp.arange(x.shape[1]), jnp.arange(128))
        return x * jnp.cos(angle) + jnp.concatenate([-b, a], -1) * jnp.sin(angle)

    def rotary_by_hand(x: Any) -> Any:
        j = own_rows(128)
        angle = angles(jnp.arange(x.shape[1]), j)
        other = lax.ppermute(x, "x", [(i, (i + PARTS // 2) % PARTS) for i in range(PARTS)])
        return x * jnp.cos(angle) + jnp.where(j < 64, -other, other) * jnp.sin(angle)

    features = P(None, None, "x")
    yield Program(
        "rotary positions, features split", rotary, rotary_by_hand, (normal(8, 512, 128),), (features,), features, 1e-4
    )

    order = (3, 1, 4, 7, 5, 0, 2, 6)

    def blocks(x: Any) -> Any:
        return x.reshape(PARTS, -1, x.shape[1])[jnp.array(order)].reshape(x.shape)

    def blocks_by_hand(x: Any) -> Any:
        return lax.ppermute(x, "x", [(source, i) for i, source in enumerate(order)])

    yield Program("blocks in another order", blocks, blocks_by_hand, square, (rows,), rows)


def made() -> Iterator[Program]:
    """What is made of positions is made where it is wanted."""
    rows = P("x", None)
    words = RNG.integers(0, 2048, 256).astype(np.int32), normal(2048, 128)

    def embedded(words: Any, table: Any) -> Any:
        return jax.nn.one_hot(words, 2048) @ table

    def embedded_by_hand(words: Any, table: Any) -> Any:
        return lax.psum((words[:, None] == own_rows(2048)).astype(jnp.float32) @ table, "x")

    yield Program("embedding as a product", embedded, embedded_by_hand, words, (P(), rows), P(), 1e-6)

    def causal(q: Any, k: Any, v: Any) -> Any:
        mask = jnp.tril(jnp.ones((q.shape[0], k.shape[0]), bool))
        return jax.nn.softmax(jnp.where(mask, q @ k.T / 8, -1e9)) @ v

    def causal_by_hand(q: Any, k: Any, v: Any) -> Any:
        k, v = lax.all_gather((k, v), "x", tiled=True)
        mask = own_rows(512)[:, None] >= jnp.arange(512)
        return jax.nn.softmax(jnp.where(mask, q @ k.T / 8, -1e9)) @ v

    tokens = normal(512, 64), normal(512, 64), normal(512, 64)
    yield Program("attention to what came before", causal, causal_by_hand, tokens, (rows,) * 3, rows, 1e-5)

    def smooth(x: Any) -> Any:
        b, n, m, c = x.shape
        return jax.image.resize(x, (b, 2 * n, 2 * m, c), "bilinear")

    def doubled(x: Any, before: Any, after: Any, dim: int) -> Any:
        """Twice as many: a quarter of a neighbour, three quarters of the nearest."""
        n = x.shape[dim]
        y = jnp.concatenate([before, x, after], dim)
        low, high = lax.slice_in_dim(y, 0, n, axis=dim), lax.slice_in_dim(y, 2, n + 2, axis=dim)
        both = jnp.stack([0.25 * low + 0.75 * x, 0.25 * high + 0.75 * x], dim + 1)
        return both.reshape(*x.shape[:dim], 2 * n, *x.shape[dim + 1 :])

    def smooth_by_hand(x: Any) -> Any:
        me = lax.axis_index("x")
        before = jnp.where(me == 0, x[:, :1], from_left(x, dim=1))
        after = jnp.where(me == PARTS - 1, x[:, -1:], from_right(x, dim=1))
        y = doubled(x, before, after, 1)
        return doubled(y, y[:, :, :1], y[:, :, -1:], 2)

    images, split = (normal(4, 128, 64, 8),), P(None, "x")
    yield Program("an image twice as large, smoothly", smooth, smooth_by_hand, images, (split,), split, 1e-5)

    def pairs(x: Any, before: Any, after: Any, dim: int) -> Any:
        """Of each two elements three quarters, and a quarter of their neighbours."""
        y, last = jnp.concatenate([before, x, after], dim), x.shape[dim] - 1
        a, b, c, d = (lax.slice_in_dim(y, k, k + last, 2, dim) for k in range(4))
        return 0.25 * (a + d) + 0.75 * (b + c)

    def of_smooth(y: Any) -> Any:
        b, n, m, c = y.shape
        (x,) = jax.linear_transpose(smooth, jax.ShapeDtypeStruct((b, n // 2, m // 2, c), y.dtype))(y)
        return x

    def of_smooth_by_hand(y: Any) -> Any:
        me = lax.axis_index("x")
        before = jnp.where(me == 0, y[:, :1], from_left(y, dim=1))
        after = jnp.where(me == PARTS - 1, y[:, -1:], from_right(y, dim=1))
        y = pairs(y, before, after, 1)
        return pairs(y, y[:, :, :1], y[:, :, -1:], 2)

    large = (normal(4, 256, 128, 8),)
    name = "derivative of an image twice as large"
    yield Program(name, of_smooth, of_smooth_by_hand, large, (split,), split, 1e-5)

    def half(x: Any) -> Any:
        b, n, m, c = x.shape
        return jax.image.resize(x, (b, n // 2, m // 2, c), "bilinear")

    def half_by_hand(x: Any) -> Any:
        i, j = own_rows(128)[:, None, None], jnp.arange(64)[:, None]
        y = pairs(x, from_left(x, dim=1), from_right(x, dim=1), 1) / jnp.where((i == 0) | (i == 127), 1.75, 2)
        none = jnp.zeros_like(y[:, :, :1])
        return pairs(y, none, none, 2) / jnp.where((j == 0) | (j == 63), 1.75, 2)

    yield Program("an image half as large, smoothly", half, half_by_hand, large, (split,), split, 1e-5)


def run_time() -> Iterator[Program]:
    """Places of the data: windows are touched, not all there is."""
    split = P(None, "x")
    cache, new, at = normal(8, 4096, 64), normal(8, 1, 64), np.int32(1234)

    def written(cache: Any, new: Any, at: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(cache, new, at, 1)

    def written_by_hand(cache: Any, new: Any, at: Any) -> Any:
        n = cache.shape[1]
        i = at - lax.axis_index("x") * n
        there = jnp.clip(i, 0, n - 1)
        old = lax.dynamic_slice_in_dim(cache, there, 1, 1)
        return lax.dynamic_update_slice_in_dim(cache, jnp.where(i == there, new, old), there, 1)

    yield Program("a write into a cache", written, written_by_hand, (cache, new, at), (split, P(), P()), split)

    def row(x: Any, at: Any, new: Any) -> Any:
        return x.at[at].set(new)

    def row_by_hand(x: Any, at: Any, new: Any) -> Any:
        return written_by_hand(x[None], new[None, None], at)[0]

    rows = P("x", None)
    table = normal(4096, 256), np.int32(777), normal(256)
    yield Program("a row is set", row, row_by_hand, table, (rows, P(), P()), rows)

    def next_token(logits: Any, words: Any) -> Any:
        found = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(found, words[:, 1:, None], -1))

    def next_token_by_hand(logits: Any, words: Any) -> Any:
        words = jnp.concatenate([words[:, 1:], from_right(words, dim=1)], 1)
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], -1)[..., 0]
        return -lax.psum(jnp.sum(jnp.where(own_rows(1024) < 1023, found, 0)), "x") / (8 * 1023)

    text = normal(8, 1024, 256), RNG.integers(0, 256, (8, 1024)).astype(np.int32)
    yield Program("loss of the next token", next_token, next_token_by_hand, text, (split, split), P(), 1e-5)
