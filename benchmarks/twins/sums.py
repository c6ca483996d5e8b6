"""Sums that are finished late, and values that several readers want moved alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from twins.program import RNG, Program, added, normal

ROWS, COLUMNS = P("x", None), P(None, "x")


def unfinished() -> Iterator[Program]:
    """Each device's part of a sum passes what is linear; only what is wanted of it is added up."""

    def last_rows(x: Any, w: Any) -> Any:
        return (x @ w)[-64:]

    wide, specs = (normal(512, 1024), normal(1024, 512)), (COLUMNS, ROWS)
    yield Program("last rows of a product", last_rows, added(last_rows), wide, specs, P(), 1e-5)

    def recurrent(w: Any, x: Any) -> Any:
        def end(w: Any) -> Any:
            h, _ = lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros(x.shape[1:]), x)
            return jnp.sum(h**2)

        return jax.grad(end)(w)

    states = normal(128, 128) / 12, normal(24, 64, 128)
    yield Program("gradient of a recurrent layer", recurrent, added(recurrent), states, (P(), P(None, "x")), P(), 1e-4)

    def micro_batches(w: Any, x: Any) -> Any:
        def one(total: Any, x: Any) -> tuple[Any, None]:
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w), None

        return lax.scan(one, jnp.zeros_like(w), x)[0]

    yield Program(
        "gradients of micro-batches", micro_batches, added(micro_batches), states, (P(), P(None, "x")), P(), 1e-4
    )

    def tied(table: Any, words: Any) -> Any:
        def loss(table: Any) -> Any:
            logits = jnp.tanh(table[words[:, :-1]]) @ table.T
            return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, 1:, None], -1))

        return jax.grad(loss)(table)

    words = normal(1024, 64), RNG.integers(0, 1024, (64, 33)).astype("int32")
    yield Program("gradient of tied embeddings", tied, added(tied), words, (P(), ROWS), P(), 1e-4)


def permitted() -> Iterator[Program]:
    """Parts that are said to be finite pass products; only what is wanted in the end is added up."""

    def chain(u: Any, v: Any, w: Any) -> Any:
        return u @ v @ w

    matrices = normal(512, 2048), normal(2048, 512), normal(512, 8)
    specs = COLUMNS, ROWS, P()
    yield Program("U V W", chain, added(chain), matrices, specs, P(), 1e-5, finite=True)

    def chain_by_hand(u: Any, v: Any, w: Any) -> Any:
        return lax.psum_scatter(u @ v @ w, "x", tiled=True)

    yield Program("U V W into rows", chain, chain_by_hand, matrices, specs, ROWS, 1e-5, finite=True)

    def values(weights: Any, v: Any, out: Any) -> Any:
        return jnp.einsum("bqhd,hdf->bqf", jnp.einsum("bhqk,bhkd->bqhd", weights, v), out)

    attention = normal(2, 8, 64, 512), normal(2, 8, 512, 32), normal(8, 32, 16)
    keys = P(None, None, None, "x"), P(None, None, "x"), P()
    yield Program("attention over split keys", values, added(values), attention, keys, P(), 1e-5, finite=True)

    def scaled(w: Any, x: Any, scale: Any) -> Any:
        def one(total: Any, x: Any) -> tuple[Any, None]:
            return total + jax.grad(lambda w: scale * jnp.sum(jnp.tanh(x @ w) ** 2))(w) / scale, None

        return lax.scan(one, jnp.zeros_like(w), x)[0]

    batches = normal(128, 128) / 12, normal(24, 64, 128), normal(1)[0]
    yield Program(
        "gradients of scaled losses", scaled, added(scaled), batches, (P(), P(None, "x"), P()), P(), 1e-4, finite=True
    )


def looked_up() -> Iterator[Program]:
    """Of sums that are unfinished some are picked, and those alone are added up."""
    wide, specs = (normal(512, 1024), normal(1024, 512)), (COLUMNS, ROWS, P())

    def rows(x: Any, w: Any, i: Any) -> Any:
        return (x @ w)[i]

    places = RNG.integers(0, 512, 32).astype("int32")
    yield Program("some rows of a product", rows, added(rows), (*wide, places), specs, P(), 1e-5)

    def one_each(x: Any, w: Any, labels: Any) -> Any:
        return jnp.take_along_axis(x @ w, labels[:, None], 1)[:, 0]

    labels = RNG.integers(0, 512, 512).astype("int32")
    yield Program("one number of each row", one_each, added(one_each), (*wide, labels), specs, P(), 1e-5)

    def last_tokens(x: Any, w: Any, lengths: Any) -> Any:
        y = jnp.einsum("bsd,df->bsf", x, w)
        return y[jnp.arange(y.shape[0]), lengths - 1]

    sentences = normal(16, 64, 256), normal(256, 128), RNG.integers(1, 65, 16).astype("int32")
    features = P(None, None, "x"), ROWS, P()
    yield Program("last tokens of sentences", last_tokens, added(last_tokens), sentences, features, P(), 1e-5)


def fans() -> Iterator[Program]:
    """One value is moved once for all that read it."""

    def waves(x: Any) -> Any:
        return jnp.sin(x), jnp.cos(x)

    def waves_by_hand(x: Any) -> Any:
        return waves(lax.all_to_all(x, "x", split_axis=1, concat_axis=0, tiled=True))

    yield Program(
        "two results of one array", waves, waves_by_hand, (normal(512, 512),), (ROWS,), (COLUMNS, COLUMNS), 1e-6
    )

    def products(x: Any, v: Any, w: Any) -> Any:
        return x @ v, jnp.tanh(x @ w)

    def products_by_hand(x: Any, v: Any, w: Any) -> Any:
        return products(lax.all_gather(x, "x", tiled=True), v, w)

    both = normal(256, 256), normal(256, 2048), normal(256, 2048)
    specs = ROWS, COLUMNS, COLUMNS
    yield Program("two products of one array", products, products_by_hand, both, specs, (COLUMNS, COLUMNS), 1e-5)

    def moments(x: Any) -> Any:
        return x.sum(0), (x * x).sum(0), jnp.abs(x).max(0)

    def moments_by_hand(x: Any) -> Any:
        first, second = lax.psum((x.sum(0), (x * x).sum(0)), "x")
        return first, second, lax.pmax(jnp.abs(x).max(0), "x")

    yield Program(
        "three moments of one array", moments, moments_by_hand, (normal(4096, 256),), (ROWS,), (P(), P(), P()), 1e-4
    )
