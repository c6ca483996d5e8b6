"""Windows: elements that are cut, padded and joined in a row, pooling, and convolutions of what is dilated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from twins.program import PARTS, RNG, Program, from_left, from_right, normal, own_rows


def in_a_row() -> Iterator[Program]:
    tokens, rows = (normal(4096, 256),), P("x", None)

    def shift(x: Any) -> Any:
        return jnp.pad(x[:-1], ((1, 0), (0, 0))) * 2 + x

    def shift_by_hand(x: Any) -> Any:
        return jnp.concatenate([from_left(x), x[:-1]]) * 2 + x

    yield Program("shift", shift, shift_by_hand, tokens, (rows,), rows)

    def diffuse(x: Any) -> Any:
        u = jnp.pad(x, 1, mode="wrap")
        return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * x

    def diffuse_by_hand(x: Any) -> Any:
        u = jnp.concatenate([from_left(x, around=True), x, from_right(x, around=True)])
        return u[2:] + u[:-2] + jnp.roll(x, -1, 1) + jnp.roll(x, 1, 1) - 4 * x

    yield Program("border that wraps", diffuse, diffuse_by_hand, tokens, (rows,), rows, 1e-5)

    def average(x: Any) -> Any:
        return lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID")

    def average_gradient(x: Any) -> Any:
        y, back = jax.vjp(average, x)
        return back(jnp.sin(y))[0]

    yield Program("gradient of an average", average_gradient, average_gradient, tokens, (rows,), rows)


def convolutions() -> Iterator[Program]:
    image, kernel, rows = normal(2, 64, 32, 16), normal(3, 3, 16, 16), P(None, "x")
    layout = ("NHWC", "HWIO", "NHWC")

    def border(x: Any, above: int, below: int) -> Any:
        x = jnp.moveaxis(x, 1, 0)
        parts = [*([from_left(x, above)] if above else []), x, *([from_right(x, below)] if below else [])]
        return jnp.moveaxis(jnp.concatenate(parts), 0, 1)

    def up(x: Any, w: Any) -> Any:
        return lax.conv_transpose(x, w, (2, 2), "SAME")

    def up_by_hand(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            border(x, 1, 0), w, (1, 1), [(0, 1), (2, 1)], lhs_dilation=(2, 2), dimension_numbers=layout
        )

    specs = rows, P()
    yield Program("transposed convolution", up, up_by_hand, (image, kernel), specs, rows, 1e-5)

    def down(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (2, 2), [(1, 1), (1, 1)], dimension_numbers=layout)

    def down_gradient(y: Any, w: Any) -> Any:
        return jax.vjp(lambda x: down(x, w), jnp.zeros((2, 128, 64, 16)))[1](y)[0]

    def down_gradient_by_hand(y: Any, w: Any) -> Any:
        turned = jnp.flip(w, (0, 1)).swapaxes(2, 3)
        return lax.conv_general_dilated(
            border(y, 0, 1), turned, (1, 1), [(1, 0), (1, 2)], lhs_dilation=(2, 2), dimension_numbers=layout
        )

    yield Program("gradient of a strided one", down_gradient, down_gradient_by_hand, (image, kernel), specs, rows, 1e-5)

    def up_gradient(y: Any, w: Any) -> Any:
        return jax.vjp(lambda x: up(x, w), jnp.zeros((2, 32, 16, 16)))[1](y)[0]

    def up_gradient_by_hand(y: Any, w: Any) -> Any:
        turned = jnp.flip(w, (0, 1)).swapaxes(2, 3)
        return lax.conv_general_dilated(border(y, 0, 1), turned, (2, 2), [(0, 0), (0, 1)], dimension_numbers=layout)

    yield Program("gradient of a transposed one", up_gradient, up_gradient_by_hand, (image, kernel), specs, rows, 1e-5)


def one_more() -> Iterator[Program]:
    """One element more or less than parts are made of."""
    tokens = normal(8, 256, 64), normal(8, 1, 64), normal(64)

    def weighted(y: Any, scores: Any) -> Any:
        return jnp.einsum("bs,bsd->bd", jax.nn.softmax(scores), y)

    def class_token(x: Any, cls: Any, q: Any) -> Any:
        y = jnp.concatenate([cls, x], 1)
        return weighted(y, y @ q)

    def class_token_by_hand(x: Any, cls: Any, q: Any) -> Any:
        scores, first = x @ q, (cls @ q)[:, 0]
        top = jnp.maximum(lax.pmax(scores.max(1), "x"), first)
        e, one = jnp.exp(scores - top[:, None]), jnp.exp(first - top)
        total, found = lax.psum((e.sum(1), jnp.einsum("bs,bsd->bd", e, x)), "x")
        return (found + one[:, None] * cls[:, 0]) / (total + one)[:, None]

    specs = P(None, "x"), P(), P()
    yield Program("a token in front", class_token, class_token_by_hand, tokens, specs, P(), 1e-5)

    def class_token_gradient(x: Any, cls: Any, q: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(class_token(*a) ** 2), (0, 1, 2))(x, cls, q)

    def class_token_gradient_by_hand(x: Any, cls: Any, q: Any) -> Any:
        scores, first = x @ q, (cls @ q)[:, 0]
        top = jnp.maximum(lax.pmax(scores.max(1), "x"), first)
        e, one = jnp.exp(scores - top[:, None]), jnp.exp(first - top)
        total, found = lax.psum((e.sum(1), jnp.einsum("bs,bsd->bd", e, x)), "x")
        y = (found + one[:, None] * cls[:, 0]) / (total + one)[:, None]
        p, p1 = e / (total + one)[:, None], (one / (total + one))[:, None]
        g = 2 * y  # of y; the gradient of a score is its weight times (g . element - g . y)
        mean = jnp.sum(g * y, 1, keepdims=True)
        s = p * (jnp.einsum("bd,bsd->bs", g, x) - mean)
        s1 = p1 * (jnp.sum(g * cls[:, 0], 1, keepdims=True) - mean)
        to_q = lax.psum(jnp.einsum("bs,bsd->d", s, x), "x") + jnp.einsum("b,bd->d", s1[:, 0], cls[:, 0])
        return p[..., None] * g[:, None] + s[..., None] * q, (p1 * g)[:, None] + s1[..., None] * q, to_q

    yield Program(
        "gradient, a token in front",
        class_token_gradient,
        class_token_gradient_by_hand,
        tokens,
        specs,
        (P(None, "x"), P(), P()),
        1e-4,
    )

    def cached(q: Any, keys: Any, values: Any, new_key: Any, new_value: Any) -> Any:
        k, v = jnp.concatenate([keys, new_key], 1), jnp.concatenate([values, new_value], 1)
        return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(jnp.einsum("bhd,bshd->bhs", q, k) / 8), v)

    def cached_by_hand(q: Any, keys: Any, values: Any, new_key: Any, new_value: Any) -> Any:
        scores, own = (jnp.einsum("bhd,bshd->bhs", q, k) / 8 for k in (keys, new_key))
        top = jnp.maximum(lax.pmax(scores.max(2), "x"), own[..., 0])
        e, one = jnp.exp(scores - top[..., None]), jnp.exp(own - top[..., None])
        total, found = lax.psum((e.sum(2, keepdims=True), jnp.einsum("bhs,bshd->bhd", e, values)), "x")
        return (found + one * new_value[:, 0]) / (total + one)

    cache = normal(8, 4, 64), normal(8, 1024, 4, 64), normal(8, 1024, 4, 64), normal(8, 1, 4, 64), normal(8, 1, 4, 64)
    split = P(), P(None, "x"), P(None, "x"), P(), P()
    yield Program("a cache and a new key", cached, cached_by_hand, cache, split, P(), 1e-5)

    def padded(x: Any, table: Any, labels: Any) -> Any:
        found = jax.nn.log_softmax((x @ table)[:, :1000])
        return -jnp.mean(jnp.take_along_axis(found, labels[:, None], 1))

    def padded_by_hand(x: Any, table: Any, labels: Any) -> Any:
        column = own_rows(1024)
        logits = jnp.where(column < 1000, x @ table, -jnp.inf)
        top = lax.pmax(logits.max(1), "x")
        mine = jnp.sum(jnp.where(column == labels[:, None], logits, 0), 1)
        total, mine = lax.psum((jnp.exp(logits - top[:, None]).sum(1), mine), "x")
        return -jnp.mean(mine - top - jnp.log(total))

    words = normal(256, 128), normal(128, 1024) / 8, RNG.integers(0, 1000, 256).astype(np.int32)
    yield Program("a padded vocabulary", padded, padded_by_hand, words, (P(), P(None, "x"), P()), P(), 1e-5)

    def padded_gradient(x: Any, table: Any, labels: Any) -> Any:
        return jax.grad(padded, (0, 1))(x, table, labels)

    def padded_gradient_by_hand(x: Any, table: Any, labels: Any) -> Any:
        column = own_rows(1024)
        logits = jnp.where(column < 1000, x @ table, -jnp.inf)
        e = jnp.exp(logits - lax.pmax(logits.max(1), "x")[:, None])
        g = (e / lax.psum(e.sum(1), "x")[:, None] - (column == labels[:, None])) / 256
        return lax.psum(g @ table.T, "x"), x.T @ g

    back = P(), P(None, "x")
    yield Program(
        "gradient, a padded vocabulary",
        padded_gradient,
        padded_gradient_by_hand,
        words,
        (P(), P(None, "x"), P()),
        back,
        1e-4,
    )

    def greedy(x: Any, table: Any) -> Any:
        return jnp.argmax((x @ table)[:, :1000], 1)

    def greedy_by_hand(x: Any, table: Any) -> Any:
        column = own_rows(1024)
        logits = jnp.where(column < 1000, x @ table, -jnp.inf)
        best = column[jnp.argmax(logits, 1)]
        tops, places = lax.all_gather((logits.max(1), best), "x")
        return jnp.take_along_axis(places, jnp.argmax(tops, 0)[None], 0)[0]

    yield Program("the likeliest of a padded vocabulary", greedy, greedy_by_hand, words[:2], (P(), P(None, "x")), P())

    def steps(x: Any) -> Any:
        return jnp.abs(jnp.diff(x, axis=0)).mean(0)

    def steps_by_hand(x: Any) -> Any:
        d = jnp.concatenate([x[1:], from_right(x)]) - x
        inside = own_rows(4096)[:, None] < 4095
        return lax.psum(jnp.where(inside, jnp.abs(d), 0).sum(0), "x") / 4095

    yield Program("steps between rows", steps, steps_by_hand, (normal(4096, 256),), (P("x", None),), P(), 1e-4)


def pooled() -> Iterator[Program]:
    """Gradients of pooling: windows side by side, and windows that overlap."""
    image, rows = (normal(2, 256, 64, 16),), P(None, "x")

    def gradient(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def of(x: Any) -> Any:
            y, back = jax.vjp(f, x)
            return back(jnp.sin(y))[0]

        return of

    def highest(x: Any, pads: Any = "VALID", size: int = 2) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, size, size, 1), (1, 2, 2, 1), pads)

    yield Program("gradient of maxima", gradient(highest), gradient(highest), image, (rows,), rows)

    def overlapping(x: Any) -> Any:
        return highest(x, "SAME", 3)

    def overlapping_by_hand(x: Any) -> Any:
        """A row of the device after, of which the gradient goes back there."""
        below = from_right(x, dim=1)
        below = jnp.where(lax.axis_index("x") == PARTS - 1, -jnp.inf, below)
        return highest(jnp.concatenate([x, below], 1), ((0, 0), (0, 0), (0, 1), (0, 0)), 3)

    yield Program(
        "gradient of overlapping maxima",
        gradient(overlapping),
        gradient(overlapping_by_hand),
        image,
        (rows,),
        rows,
        1e-6,
    )

    def average(x: Any) -> Any:
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / 9

    def average_by_hand(x: Any) -> Any:
        y = jnp.concatenate([from_left(x, dim=1), x, from_right(x, dim=1)], 1)
        pads = (0, 0), (0, 0), (1, 1), (0, 0)
        return lax.reduce_window(y, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), pads) / 9

    yield Program(
        "gradient of overlapping averages", gradient(average), gradient(average_by_hand), image, (rows,), rows, 1e-5
    )
