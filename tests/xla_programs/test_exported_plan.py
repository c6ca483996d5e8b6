"""Plans as shardings for jax.jit: they run there, and what XLA makes of them is told."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.xla.hlo_collectives import collectives

Params = dict[str, jax.Array]


def loss(params: Params, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def step(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def arguments(rows: int = 64) -> tuple[Params, jax.Array]:
    rng = np.random.default_rng(0)
    up, down, x = rng.normal(size=(64, 256)) / 8, rng.normal(size=(256, 64)) / 16, rng.normal(size=(rows, 64))
    return {"up": jnp.float32(up), "down": jnp.float32(down)}, jnp.float32(x)


@pytest.fixture(scope="module")
def exported() -> gshard.ExportedPlan:
    def marked(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        params = {"up": gshard.split(params["up"], 1, "model"), "down": gshard.split(params["down"], 0, "model")}
        return step(params, gshard.split(x, 0, "data"))

    return gshard.export_plan(gshard.search(marked, *arguments(), mesh={"data": 2, "model": 4}, machine="h100:1x8"))


def test_the_shardings_are_those_of_the_plan(exported: gshard.ExportedPlan) -> None:
    params, x = exported.in_shardings
    assert params == {"up": P(None, "model"), "down": P("model", None)}
    assert x == P("data", None)
    assert jax.tree.structure(exported.out_shardings) == jax.tree.structure((params, x))


def test_jax_jit_runs_it_and_sends_what_is_told(exported: gshard.ExportedPlan) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ins, outs = exported.named(mesh)
    jitted = jax.jit(step, in_shardings=ins, out_shardings=outs)
    given = arguments()
    for _ in range(3):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jitted(*given), jax.jit(step)(*given))
    sent = sum(c.total_bytes for c in collectives(jitted.lower(*given).compile().as_text()))
    assert sent == exported.tried["shardings alone"]
    assert exported.ratio == exported.compiled.total_bytes / exported.planned


def test_a_plan_that_xla_follows_needs_no_constraint() -> None:
    array = jax.ShapeDtypeStruct
    w, x = array((2048, 2048), "float32"), array((8, 2048), "float32")
    exported = gshard.export_plan(gshard.search(lambda w, x: x @ w, w, x, mesh={"data": 8}, machine="h100:1x8"))
    assert exported.follows_plan
    assert exported.constraints == ()
    assert not exported.everywhere
    assert list(exported.tried) == ["shardings alone"]
    assert "times the plan's" in str(exported)
    assert "in_shardings = (P(None, 'data'), P(None, None))" in str(exported)


def test_constraints_are_tried_where_xla_sends_more(exported: gshard.ExportedPlan) -> None:
    alone = exported.tried["shardings alone"]
    assert (alone > 1.05 * exported.planned) == (len(exported.tried) > 1)
    assert exported.compiled.total_bytes == min(exported.tried.values())
    assert exported.everywhere == (exported.tried.get("a constraint on every value") == exported.compiled.total_bytes)


def test_where_xla_sends_more_the_lines_are_named() -> None:
    """The activations are split over both axes inside, which no argument or result tells."""

    def inside(params: Params, x: jax.Array) -> jax.Array:
        h = gshard.shard(jnp.tanh(x @ params["up"]), P("data", "model"))
        h = gshard.shard(h * 2, P("model", "data"))
        return gshard.replicate(jnp.sin(h) @ params["down"])

    found = gshard.search(inside, *arguments(), mesh={"data": 2, "model": 4}, machine="h100:1x8")
    exported = gshard.export_plan(found)
    assert len(exported.tried) >= 1
    assert exported.compiled.total_bytes == min(exported.tried.values())
    for row in exported.worse:
        assert row.compiled > row.planned
        assert row.line.startswith("test_exported_plan.py:")
    assert exported.follows_plan or exported.worse


def test_a_part_of_an_axis_is_exported_as_it_is_compiled() -> None:
    """JAX has no name for it: the argument is whole, in what is told and in what is compiled."""

    def halved(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        return step({**params, "up": gshard.split(params["up"], 1, 2)}, gshard.split(x, 0, "data"))

    exported = gshard.export_plan(gshard.search(halved, *arguments(), mesh={"data": 8}, machine="h100:1x8"))
    assert exported.in_shardings[0]["up"] == P(None, None)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    ins, outs = exported.named(mesh)
    jitted = jax.jit(step, in_shardings=ins, out_shardings=outs)
    given = arguments()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jitted(*given), jax.jit(step)(*given))


def test_only_a_result_of_a_search_is_exported() -> None:
    wrong: Any = "h100"
    with pytest.raises(gshard.ArgumentError, match="not str"):
        gshard.export_plan(wrong)
