"""Devices without work of their own: axes that split nothing, dimensions with too few elements; the time of both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from device.models import f32

MESH = gshard.Mesh.abstract(data=4, model=2)


def net(p: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) - y) ** 2)


def arguments(rows: int) -> tuple[Any, ...]:
    return {"a": f32(64, 64), "b": f32(64, 8)}, f32(rows, 64), f32(rows, 8)


def test_a_program_without_marks_is_computed_by_every_device() -> None:
    told = gshard.explain(net, *arguments(32), mesh=MESH)
    (line,) = told.replicated
    assert line.startswith("no array is split: each of the 8 devices computes the whole program; split(x, 0, 'data')")
    assert line in str(told)
    assert gshard.explain(net, *arguments(32), mesh=gshard.Mesh.abstract(data=1)).replicated == ()


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (P("data"), "axis 'model' splits no array: its 2 devices repeat the same work"),
        (P("model"), "axis 'data' splits no array: its 4 devices repeat the same work"),
        (P(("data", "model")), None),
    ],
)
def test_an_axis_that_splits_nothing_is_named(spec: P, line: str | None) -> None:
    told = gshard.explain(lambda x: gshard.shard(jnp.sin(gshard.shard(x, spec)), spec), f32(32, 8), mesh=MESH)
    assert told.replicated == (() if line is None else (line,))


def test_a_part_of_an_axis_that_splits_nothing_is_named() -> None:
    def f(x: Any) -> Any:
        return gshard.split(jnp.sin(gshard.split(x, 0, 2)), 0, 2)

    told = gshard.explain(f, f32(32, 8), mesh=gshard.Mesh.abstract(data=8))
    assert told.replicated == ("axis 'data' splits arrays into 2 parts of 8: 4 devices repeat the same work",)


def test_a_batch_smaller_than_the_mesh_leaves_devices_without_rows() -> None:
    def f(p: Any, x: Any, y: Any) -> Any:
        return net(p, gshard.split(x, 0, "data"), y)

    mesh = gshard.Mesh.abstract(data=8)
    told = gshard.explain(f, *arguments(3), mesh=mesh)
    line = "dimension 0 of x has 3 elements, and is split over data (8 parts): 5 of 8 devices have none of it"
    assert told.replicated == (line,), "x and y have as many rows: one line"
    assert gshard.explain(f, *arguments(8), mesh=mesh).replicated == ()


def test_a_search_says_which_devices_have_no_work_and_shows_split_arguments_first() -> None:
    idle = gshard.search(net, *arguments(4), mesh=gshard.Mesh.abstract(data=8), machine="h100:1x8", progress=False)
    assert "no array is split: each of the 8 devices computes the whole program" in str(idle)

    def product(w: Any, x: Any) -> Any:
        return jnp.tanh(gshard.split(x, 0, "x") @ w)

    small = gshard.search(product, f32(4096, 4096), f32(512, 4096), mesh={"x": 2}, machine="h100:1x2", progress=False)
    assert "the mesh has 2 of the 8 devices that there are; the others are not used" in str(small)
    rows = str(small).partition("\narguments\n")[2].splitlines()
    assert "@x" in rows[0] or "@x" not in "".join(rows)
    assert [("@" in row) for row in rows] == sorted((("@" in row) for row in rows), reverse=True)


def test_the_verdict_says_what_splitting_the_batch_would_take() -> None:
    """On a machine a small batch is gathered: said with the time of the plan that splits it."""

    def f(p: Any, x: Any, y: Any) -> Any:
        g = jax.grad(net)(p, gshard.split(x, 0, "data"), y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, g)

    mesh = gshard.Mesh.abstract(data=8)
    told = gshard.explain(f, *arguments(32), mesh=mesh, machine="h100:1x8")
    verdict = told.verdict()
    assert verdict.work == pytest.approx(8.0)
    split = gshard.explain(f, *arguments(32), mesh=mesh).verdict("h100:1x8")
    assert split.work == pytest.approx(1.0)
    assert verdict.unsplit.startswith("x is not split over 'data' at test_idle.py:")
    assert "(8 times its share)" in verdict.unsplit
    took = [f"{v.cost.seconds * 1e6:.3g} µs" for v in (split, verdict)]
    assert f"a call would take {took[0]} instead of {took[1]}." in verdict.unsplit
    assert verdict.unsplit in str(verdict)
    assert not split.unsplit
