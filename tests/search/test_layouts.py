"""The best table of names and axes: jit plans the same with it, what the user said is kept, none is no better."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.device.cost import cost
from gshard.device.machine import Machine
from gshard.search.layouts import LayoutResult
from search.test_search import RESIDUAL, shape, small, trained

GRID, LINE = gshard.Mesh.abstract(data=2, model=4), gshard.Mesh.abstract(x=8)
MACHINE = Machine.of("h100:1x8")


def seconds_of(f: Any, arguments: Any, found: LayoutResult, **options: Any) -> float:
    """What a call takes where the user writes the table."""
    told = gshard.jit(f, mesh=found.mesh, machine=MACHINE, layout=found.layout, names=found.names, **options)
    lowered = told.lower(*arguments)
    return cost(lowered.spmd, MACHINE, lowered.donated).seconds


def named(weights: Any, x: Any) -> Any:
    """A step with names inside, whose rows are marks there."""

    def loss(weights: Any) -> Any:
        h = gshard.name(x, "batch embed")
        for a, b in weights:
            h = gshard.name(h + jax.nn.relu(h @ a) @ b, "batch embed")
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def test_megatrons_plan_is_one_row() -> None:
    """The hidden dimension, which is one name in all layers."""
    found = gshard.search(
        trained(False), *RESIDUAL, mesh=LINE, machine=MACHINE, donate_argnums=0, over="layout"
    )  # fmt: skip
    (row,) = found.layout.rows
    assert row.axes == ("x",)
    assert found.dimensions[row.name].size == 8192
    assert len(found.dimensions[row.name].arguments) == 6
    assert set(found.names) == {"weights/*/0", "weights/*/1", "x"}
    assert "8192 of weights/0/0.1, weights/0/1.0" in str(found)
    assert "as the plan" in str(found)
    assert seconds_of(trained(False), RESIDUAL, found, donate_argnums=0) == found.cost.seconds
    assert found.cost.seconds == pytest.approx(found.goal.cost.seconds, rel=1e-6)


@pytest.mark.slow
def test_a_plan_has_the_table_as_well() -> None:
    free = gshard.search(trained(False), *RESIDUAL, mesh=LINE, machine=MACHINE, donate_argnums=0)
    assert free.layout.cost.seconds == pytest.approx(free.cost.seconds)
    insisted = free.with_mark("weights[0][0]", P("x"))
    with pytest.raises(gshard.ArgumentError, match="Write the mark into the function"):
        _ = insisted.layout


@pytest.mark.parametrize("batch", [8, pytest.param(2048, marks=pytest.mark.slow)])
def test_names_inside_are_priced_as_the_marks_that_they_become(batch: int) -> None:
    """And no table is worse than none, or than one of the usual ones."""
    arguments = [(shape(512, 2048), shape(2048, 512))], shape(batch, 512)
    found = gshard.search(named, *arguments, mesh=GRID, machine=MACHINE, over="layout", donate_argnums=0)
    assert seconds_of(named, arguments, found, donate_argnums=0) == found.cost.seconds
    for usual in (gshard.Layout(), gshard.Layout(batch="data"), gshard.Layout(batch=("data", "model"))):
        made = gshard.jit(named, mesh=GRID, machine=MACHINE, layout=usual, names={"x": "batch _"}, donate_argnums=0)
        lowered = made.lower(*arguments)
        assert found.cost.seconds <= cost(lowered.spmd, MACHINE, lowered.donated).seconds


@pytest.mark.slow
def test_what_the_user_said_is_kept() -> None:
    """Names, rows of a layout, in_shardings; the table holds them too."""
    arguments = [(shape(512, 2048), shape(2048, 512))], shape(512, 512)
    given = gshard.Layout(batch="model")
    f = gshard.jit(named, mesh=GRID, layout=given, names={"weights/*/0": "_ hidden"}, machine=MACHINE)
    found = gshard.search(f, *arguments, over="layout")
    assert set(given.rows) <= set(found.layout.rows)
    assert found.names["weights/*/0"] == "embed hidden"
    assert seconds_of(named, arguments, found) == found.cost.seconds
    pinned = gshard.jit(named, mesh=GRID, machine=MACHINE, in_shardings=(None, P("model")))
    found = gshard.search(pinned, *arguments, over="layout")
    assert "x" not in found.names
    seconds = seconds_of(named, arguments, found, in_shardings=(None, P("model")))
    assert seconds == found.cost.seconds


def test_the_table_runs() -> None:
    rng = np.random.default_rng(0)
    weights = [tuple(rng.standard_normal(s).astype(np.float32) for s in ((48, 96), (96, 48)))]
    x = rng.standard_normal((40, 48)).astype(np.float32)
    found = gshard.search(named, weights, x, mesh={"data": 2, "model": 4}, machine="cpu:8", over="layout")
    run = gshard.jit(named, mesh=found.mesh, layout=found.layout, names=found.names, machine="cpu:8")
    expected = jax.jit(named)(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), run(weights, x), expected)


def test_arguments_by_name_have_names_too() -> None:
    def f(w: Any, *, x: Any) -> Any:
        return jnp.tanh(x @ w)

    found = gshard.search(f, shape(1024, 4096), x=shape(8, 1024), mesh=LINE, machine=MACHINE, over="layout")
    assert set(found.names) == {"w", "x"}
    told = gshard.jit(f, mesh=LINE, machine=MACHINE, layout=found.layout, names=found.names)
    lowered = told.lower(shape(1024, 4096), x=shape(8, 1024))
    assert cost(lowered.spmd, MACHINE).seconds == found.cost.seconds


@pytest.mark.slow
def test_a_table_keeps_to_the_memory() -> None:
    weights = [(shape(1024, 4096), shape(4096, 1024)) for _ in range(3)]
    arguments = weights, shape(4096, 1024)
    options: dict[str, Any] = {"mesh": LINE, "machine": MACHINE, "donate_argnums": 0}
    free = gshard.search(trained(False), *arguments, over="layout", **options)
    limit = gshard.search(trained(False), *arguments, **options, memory_limit=free.cost.peak // 2).cost.peak * 5 // 4
    found = gshard.search(trained(False), *arguments, over="layout", memory_limit=limit, **options)
    assert found.cost.peak <= limit
    nothing = gshard.search(trained(False), *arguments, over="layout", memory_limit=1 << 20, **options)
    assert "DOES NOT FIT" in str(nothing)


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(gshard.ArgumentError, match=r"(?s)called 'table'.*over='plan'.*over='layout'"):
        gshard.search(small, shape(8, 8), shape(8, 8), mesh=LINE, machine=MACHINE, over="table")  # type: ignore[call-overload]
    rules = gshard.Layout.of([("batch", "x")])
    ordered = gshard.jit(small, mesh=LINE, layout=rules, names=("embed hidden", "batch embed"), machine=MACHINE)
    with pytest.raises(gshard.ArgumentError, match="ordered rules"):
        gshard.search(ordered, shape(8, 8), shape(8, 8), over="layout")
