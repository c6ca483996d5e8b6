"""The rows of a memory peak name the arguments whose parts, casts and gradients are held, and lose no bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gshard
from device.models import f32
from gshard.device.memory import Held, held_at_peak

MESH = gshard.Mesh.abstract(data=8)
LAYERS, WIDTH, HIDDEN = 3, 64, 512


def step(params: Any, x: Any) -> Any:
    """Gradient descent on layers in a loop, whose weights are split and gathered in each round."""
    params = jax.tree.map(lambda w: gshard.split(w, w.ndim - 1, 8), params)

    def loss(params: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        y, _ = jax.lax.scan(layer, gshard.split(x, 0, 8), params)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def arguments() -> tuple[Any, ...]:
    return {"up": f32(LAYERS, WIDTH, HIDDEN), "down": f32(LAYERS, HIDDEN, WIDTH)}, f32(2048, WIDTH)


def peak_of(explanation: gshard.stages.Explanation) -> tuple[Held, ...]:
    cost = explanation.cost("h100:1x8")
    rows = held_at_peak(cost.memory, cost.program.block, explanation.plan.program, explanation.names)
    assert sum(row.bytes for row in rows) == sum(v.bytes for v, _ in cost.memory.alive)
    assert sum(row.count for row in rows) == len(cost.memory.alive)
    return rows


def test_weights_that_are_gathered_and_their_gradients_are_named() -> None:
    rows = peak_of(gshard.explain(step, *arguments(), mesh=MESH))
    names = {row.name for row in rows if row.type in (f"f32[{WIDTH},{HIDDEN}]", f"f32[{HIDDEN},{WIDTH}]")}
    assert names
    assert names <= {f"{what}params.{w}" for what in ("", "gradient of ") for w in ("up", "down")}


def test_the_report_and_errors_show_these_names() -> None:
    explanation = gshard.explain(step, *arguments(), mesh=MESH)
    shown = explanation.data("h100:1x8")["memory"]["alive"]
    assert [(row[0], row[2], row[4]) for row in shown] == [
        (row.type, row.name, row.count) for row in peak_of(explanation)[: len(shown)]
    ]
    with pytest.raises(gshard.stages.MemoryLimitError, match=r"params\.(up|down)"):
        gshard.jit(step, mesh=MESH, memory_limit="64KiB").lower(*arguments()).spmd  # noqa: B018
