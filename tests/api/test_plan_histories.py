"""A given plan runs in every call, wherever the arguments are, on meshes of both types of axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

RNG = np.random.default_rng(3)
W = RNG.standard_normal((16, 24)).astype(np.float32)
X = RNG.standard_normal((8, 16)).astype(np.float32)


def step(w: Any, x: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


TRACES: list[int] = []


def typed(w: Any, x: Any) -> Any:
    """A function that cannot be traced without the types of its arguments."""
    TRACES.append(1)
    assert jax.typeof(w).sharding.spec == P("d", None)
    return step(w, x)


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def placements(mesh: jax.sharding.Mesh, w: Any) -> list[Any]:
    return [
        w,
        jnp.asarray(w),
        *(jax.device_put(w, NamedSharding(mesh, P(*spec))) for spec in ((), ("d",), (None, "d"))),
    ]


@pytest.mark.parametrize("searched_placed", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("way", ["jit", "block"])
def test_a_plan_runs_in_every_call(way: str, kind: AxisType, searched_placed: bool) -> None:
    mesh = mesh_of(kind)
    w = placements(mesh, W)[3] if searched_placed else W
    found = gshard.search(step, w, X, mesh=mesh, machine="h100:1x8", progress=False)
    if way == "block":
        if kind == AxisType.Explicit:
            with pytest.raises(gshard.PlanError, match="with axes of type Explicit, and a plan is for one program"):
                gshard.instead_of_jit(mesh=mesh, plan=found.plan)
            with (
                jax.set_mesh(mesh),
                gshard.instead_of_jit(plan=found.plan),
                pytest.raises(gshard.PlanError, match="with axes of type Explicit"),
            ):
                jax.jit(lambda w: w + 1)(jnp.ones(8))
            return
        jitted, block = jax.jit(step), gshard.instead_of_jit(mesh=mesh, plan=found.plan)
    else:
        jitted, block = gshard.jit(step, mesh=mesh, plan=found.plan), gshard.instead_of_jit(mesh=mesh)
    one = jax.jit(step)
    expected = [W]
    for _ in range(3):
        expected.append(np.asarray(one(expected[-1], X)[0]))
    with block:
        state = w
        for value in expected[1:]:
            state, loss = jitted(state, X)
            np.testing.assert_allclose(state, value, rtol=1e-5, atol=1e-6)
        assert np.isfinite(loss)
        for placed in placements(mesh, W):
            np.testing.assert_allclose(jitted(placed, X)[0], expected[1], rtol=1e-5, atol=1e-6)
            lowered = jitted.lower(placed, X)
            assert gshard.SavedPlan.of(lowered.plan) == gshard.SavedPlan.of(found.plan)


def test_a_function_that_needs_the_types_is_traced_with_them() -> None:
    mesh = mesh_of(AxisType.Explicit)
    w = placements(mesh, W)[3]
    found = gshard.search(typed, w, X, mesh=mesh, machine="h100:1x8", progress=False)
    jitted = gshard.jit(typed, mesh=mesh, plan=found.plan)
    jitted(w, X)
    traced = len(TRACES)
    for _ in range(3):
        jitted.lower(w, X)
        assert len(TRACES) == traced, "what cannot be traced is not tried again"
        np.testing.assert_allclose(jitted(w, X)[0], jax.jit(step)(W, X)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_constant_with_which_a_gradient_begins_is_no_mark(kind: AxisType) -> None:
    """JAX moves it to the mesh where arguments are on one."""
    mesh = mesh_of(kind)
    for placed in placements(mesh, W):
        jitted = gshard.jit(step, mesh=mesh)
        equations = [e for e in jitted.lower(placed, X).program.block.walk() if e.name == "reshard"]
        assert not any(e.outputs[0].shape == () for e in equations)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        finished = gshard.jit(lambda x: jax.sharding.reshard(jnp.sum(x, 0), P()))
        np.testing.assert_array_equal(finished(jnp.arange(8.0)), 28.0)
