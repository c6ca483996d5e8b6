"""Order: searches in sorted arrays, sorting, permutations, running combinations."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from twins.program import PARTS, RNG, Program, normal


def searches() -> Iterator[Program]:
    places, numbers = np.sort(normal(1 << 16)), normal(512)
    steps = np.sort(RNG.integers(-(1 << 20), 1 << 20, 1 << 16).astype(np.int32))
    specs = P("x"), P()

    def place(a: Any, v: Any) -> Any:
        return jnp.searchsorted(a, v)

    def place_by_hand(a: Any, v: Any) -> Any:
        return lax.psum(place(a, v), "x")

    yield Program("places of numbers", place, place_by_hand, (places, numbers), specs, P())

    def between(a: Any, v: Any) -> Any:
        return jnp.searchsorted(a, v + 99, side="right") - jnp.searchsorted(a, v)

    def between_by_hand(a: Any, v: Any) -> Any:
        return lax.psum(between(a, v), "x")

    yield Program("how many lie between", between, between_by_hand, (steps, steps[::128].copy()), specs, P())

    def quantiles(a: Any, v: Any) -> Any:
        """How large a part of the sorted numbers is below each of others."""
        return jnp.digitize(v, a) / a.shape[0]

    def quantiles_by_hand(a: Any, v: Any) -> Any:
        return lax.psum(jnp.searchsorted(a, v, side="right"), "x") / (a.shape[0] * PARTS)

    yield Program("parts below", quantiles, quantiles_by_hand, (places, numbers), specs, P())

    def narrow(a: Any, v: Any) -> Any:
        return jnp.searchsorted(a.astype(jnp.bfloat16), v.astype(jnp.bfloat16))

    def narrow_by_hand(a: Any, v: Any) -> Any:
        return lax.psum(narrow(a, v), "x")

    yield Program("places of numbers in bfloat16", narrow, narrow_by_hand, (places, numbers), specs, P())

    yield Program("places of numbers among integers", place, place_by_hand, (steps, numbers * 1e6), specs, P())

    each = jax.vmap(place, (None, 0))

    def each_by_hand(a: Any, v: Any) -> Any:
        return lax.psum(place(a, v), "x")

    yield Program("places of one number each", each, each_by_hand, (places, numbers), specs, P())

    def slope(a: Any, v: Any) -> Any:
        return jax.grad(lambda v: jnp.sum(v * jnp.sin(place(a, v).astype(v.dtype))))(v)

    def slope_by_hand(a: Any, v: Any) -> Any:
        return jnp.sin(place_by_hand(a, v).astype(v.dtype))

    yield Program("gradient through places", slope, slope_by_hand, (places, numbers), specs, P())

    in_rows = jax.vmap(place)

    def in_rows_by_hand(a: Any, v: Any) -> Any:
        return lax.psum(in_rows(a, v), "x")

    rows = np.sort(normal(8, 1 << 13), 1), normal(8, 64)
    yield Program("places in rows", in_rows, in_rows_by_hand, rows, (P(None, "x"), P()), P())

    ranks = np.argsort(numbers := normal(1 << 13)).astype(np.int32)

    def by_rank(a: Any, v: Any, ranks: Any) -> Any:
        return jnp.searchsorted(a, v, sorter=ranks)

    def by_rank_by_hand(a: Any, v: Any, ranks: Any) -> Any:
        return lax.psum(place(lax.all_gather(a, "x", tiled=True)[ranks], v), "x")

    by_rank_specs = P("x"), P(), P("x")
    yield Program("places by ranks", by_rank, by_rank_by_hand, (numbers, normal(512), ranks), by_rank_specs, P())


def sorted_whole(x: Any) -> Any:
    return lax.all_gather(x, "x", tiled=True)


def own_part(x: Any) -> Any:
    n = x.shape[0] // PARTS
    return lax.dynamic_slice_in_dim(x, lax.axis_index("x") * n, n)


def sorts() -> Iterator[Program]:
    numbers = (normal(1 << 16),)

    def drawn(x: Any) -> Any:
        return jax.random.permutation(jax.random.key(3), x)

    def drawn_by_hand(x: Any) -> Any:
        """Every device draws the whole permutation, which is no data."""
        places = jax.random.permutation(jax.random.key(3), x.shape[0] * PARTS)
        return sorted_whole(x)[own_part(places)]

    yield Program("a random permutation", drawn, drawn_by_hand, numbers, (P("x"),), P("x"))

    def order(x: Any) -> Any:
        return jnp.argsort(x)

    def order_by_hand(x: Any) -> Any:
        return own_part(jnp.argsort(sorted_whole(x)))

    yield Program("order of numbers", order, order_by_hand, numbers, (P("x"),), P("x"))

    def middle(x: Any) -> Any:
        return jnp.median(x)

    def middle_by_hand(x: Any) -> Any:
        return jnp.median(sorted_whole(x))

    yield Program("median", middle, middle_by_hand, numbers, (P("x"),), P())

    def largest(x: Any) -> Any:
        return lax.top_k(x, 64)[0]

    def largest_by_hand(x: Any) -> Any:
        return largest(sorted_whole(largest(x)))

    yield Program("largest numbers", largest, largest_by_hand, numbers, (P("x"),), P())


def running() -> Iterator[Program]:
    """What comes before: each device combines its own, and then the devices before it."""
    rows, split = normal(4096, 64), P("x", None)

    def before(parts: Any, combine: Callable[[Any, Any], Any], none: Any) -> Any:
        """What the devices before hold, combined."""
        all_parts = jax.tree.map(lambda p: lax.all_gather(p, "x"), parts)
        me, total = lax.axis_index("x"), none
        for i in range(PARTS - 1):
            more = combine(total, jax.tree.map(operator.itemgetter(i), all_parts))
            total = jax.tree.map(functools.partial(jnp.where, i < me), more, total)
        return total

    def sums(x: Any) -> Any:
        return jnp.cumsum(x, 0)

    def sums_by_hand(x: Any) -> Any:
        y = jnp.cumsum(x, 0)
        return y + before(y[-1], jnp.add, jnp.zeros_like(y[-1]))

    yield Program("running sums", sums, sums_by_hand, (rows,), (split,), split, 1e-4)

    def combine(l: Any, r: Any) -> Any:  # noqa: E741
        return l[0] * r[0], r[0] * l[1] + r[1]

    def states(a: Any, b: Any) -> Any:
        return lax.associative_scan(combine, (a, b))[1]

    def states_by_hand(a: Any, b: Any) -> Any:
        a, b = lax.associative_scan(combine, (a, b))
        none = jnp.ones_like(a[0]), jnp.zeros_like(b[0])
        return a * before((a[-1], b[-1]), combine, none)[1] + b

    decays = 1 / (1 + np.exp(-normal(4096, 64))), rows
    yield Program("states of a linear recurrence", states, states_by_hand, decays, (split, split), split, 1e-4)

    def highest(x: Any) -> Any:
        return lax.associative_scan(jnp.maximum, x)

    def highest_by_hand(x: Any) -> Any:
        y = highest(x)
        return jnp.maximum(y, before(y[-1], jnp.maximum, jnp.full_like(y[-1], -jnp.inf)))

    yield Program("running maxima", highest, highest_by_hand, (rows,), (split,), split)
