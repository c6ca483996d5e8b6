"""Loops over dimensions that are split, and loops of which every round sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from twins.program import PARTS, Program, added, from_left, from_right, normal, own_rows

ROWS = P("x", None)


def own_rounds() -> Iterator[Program]:
    """Rounds that need nothing of each other: each device runs those of its part."""
    matrices = normal(64, 32, 32), normal(32, 32) / 6

    def mapped(x: Any) -> Any:
        return lax.map(lambda a: jnp.linalg.norm(jnp.tanh(a @ a.T), axis=0), x)

    yield Program("a map over rows", mapped, mapped, matrices[:1], (P("x"),), ROWS, 1e-5)

    def gradient(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(lax.map(lambda a: jnp.tanh(a @ w), x) ** 2))(w)

    yield Program("gradient of a map", gradient, added(gradient), matrices[::-1], (P(), P("x")), P(), 1e-4)

    def summed(x: Any, w: Any) -> Any:
        return lax.scan(lambda s, a: (s + jnp.tanh(a @ w), None), jnp.zeros_like(w), x)[0]

    yield Program("a sum over stacked inputs", summed, added(summed), matrices, (P("x"), P()), P(), 1e-5)


def in_turn() -> Iterator[Program]:
    """Rounds that send what the next ones need."""

    def heat(u: Any) -> Any:
        def step(_: Any, u: Any) -> Any:
            inside = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]
            return u.at[1:-1, 1:-1].set(inside / 4)

        return lax.fori_loop(0, 20, step, u)

    def heat_by_hand(u: Any) -> Any:
        i, j = own_rows(512)[:, None], jnp.arange(512)[None]
        inner = (i > 0) & (i < 511) & (j > 0) & (j < 511)

        def step(_: Any, u: Any) -> Any:
            v = jnp.pad(jnp.concatenate([from_left(u), u, from_right(u)]), ((0, 0), (1, 1)))
            return jnp.where(inner, (v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2]) / 4, u)

        return lax.fori_loop(0, 20, step, u)

    yield Program("heat in a plate", heat, heat_by_hand, (normal(512, 512),), (ROWS,), ROWS, 1e-5)

    micro, stages, weights = normal(16, 32, 64), P("x"), normal(PARTS, 64, 64) / 8

    def pipeline(w: Any, x: Any) -> Any:
        def tick(state: Any, x: Any) -> Any:
            state = jnp.concatenate([x[None], state[:-1]])
            state = jnp.tanh(jnp.einsum("sbd,sde->sbe", state, w))
            return state, jnp.sum(state[-1] ** 2)

        x = jnp.pad(x, ((0, PARTS - 1), (0, 0), (0, 0)))
        return jnp.sum(lax.scan(tick, jnp.zeros((PARTS, *x.shape[1:])), x)[1][PARTS - 1 :])

    def pipeline_by_hand(w: Any, x: Any) -> Any:
        stage = lax.axis_index("x")

        def tick(state: Any, x: Any) -> Any:
            state = jnp.where(stage == 0, x[None], from_left(state))
            state = jnp.tanh(jnp.einsum("sbd,sde->sbe", state, w))
            return state, jnp.sum(state[-1] ** 2)

        x = jnp.pad(x, ((0, PARTS - 1), (0, 0), (0, 0)))
        losses = lax.scan(tick, jnp.zeros((1, *x.shape[1:])), x)[1][PARTS - 1 :]
        return lax.psum(jnp.where(stage == PARTS - 1, jnp.sum(losses), 0.0), "x")

    yield Program("stages of a pipeline", pipeline, pipeline_by_hand, (weights, micro), (stages, P()), P(), 1e-4)

    def smoothed(x: Any) -> Any:
        def step(m: Any, x: Any) -> Any:
            m = 0.9 * m + 0.1 * x
            return m, m

        return lax.scan(step, jnp.zeros(x.shape[1:]), x)[1]

    yield Program("a mean that moves", smoothed, smoothed, (normal(256, 1024),), (P(None, "x"),), P(None, "x"), 1e-5)
