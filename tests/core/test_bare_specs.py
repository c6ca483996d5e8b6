"""A bare ``PartitionSpec`` in a function means the mesh of ``gshard.jit``, where no mesh is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
PLAN_MESH = gshard.Mesh.abstract(data=4, model=2)
Function = Callable[[Any], Any]


def mark(x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, P(*spec))


@jax.custom_vjp
def sine(x: Any) -> Any:
    return jnp.sin(mark(x, "data"))


sine.defvjp(lambda x: (sine(x), x), lambda x, g: (mark(jnp.cos(x) * g, "data"),))

# Each with the sharding of its result.
PROGRAMS: dict[str, tuple[Function, P]] = {
    "constraint": (lambda x: mark(x, "data") * 2, P("data")),
    "nested jit": (lambda x: jax.jit(lambda x: mark(x, "data") * 2)(x), P("data")),
    "out_shardings of a nested jit": (lambda x: jax.jit(jnp.sin, out_shardings=P("data"))(x), P("data")),
    "in_shardings of a nested jit": (lambda x: jax.jit(jnp.sin, in_shardings=P("data"))(x), P("data")),
    "device_put": (lambda x: jax.device_put(x, P("data")) * 2, P("data")),
    "scan": (lambda x: lax.scan(lambda c, _: (mark(jnp.sin(c), "data"), None), x, length=2)[0], P("data")),
    "cond": (lambda x: lax.cond(x[0, 0] < 9, lambda x: mark(x, "data") * 2, lambda x: x, x), P("data")),
    "vmap": (jax.vmap(lambda r: mark(r, "model") * 2), P(None, "model")),
    "grad": (jax.grad(lambda x: jnp.sum(mark(x, "data") ** 2)), P("data")),
    "remat": (jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(mark(x, "data")))(x))), P("data")),
    "custom_vjp": (jax.grad(lambda x: jnp.sum(sine(x))), P("data")),
    "shard_map": (lambda x: jax.shard_map(jnp.sin, in_specs=P("data"), out_specs=P("data"))(x), P("data")),
    "nested gshard.jit": (lambda x: gshard.jit(lambda x: mark(x, "data") * 2, mesh=PLAN_MESH)(x) + 1, P("data")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bare_spec_is_over_the_mesh_of_jit(name: str) -> None:
    f, expected = PROGRAMS[name]
    plan = gshard.jit(f, mesh=PLAN_MESH).lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).plan
    assert plan.mesh.spec_of(plan.leave[0].dims) == expected


def test_calls_with_arguments_placed_in_any_way() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    run = gshard.jit(lambda x: sine(mark(jax.device_put(x, P(None, "model")), "data")), mesh=mesh)
    around: list[Function] = [run, jax.jit(lambda x: run(x) + 0), jax.jit(jax.grad(lambda x: jnp.sum(run(x))))]
    for place in (P(), P("data"), P(None, "model"), P("model", "data")):
        x = jax.device_put(X, NamedSharding(mesh, place))
        for f, right in zip(around, (np.sin(X), np.sin(X), np.cos(X)), strict=True):
            np.testing.assert_allclose(f(x), right, rtol=1e-5, atol=1e-6)
    for f in around:  # of no mesh
        assert f(X).sharding.spec == P("data")


def test_a_mesh_that_is_set_counts() -> None:
    run = gshard.jit(lambda x: mark(x, "rows") * 2, mesh={"data": 8})
    with pytest.raises(ValueError, match="rows"):
        run(X)
    with jax.set_mesh(jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))):
        assert run(X).sharding.spec == P("data")
    assert jax.sharding.get_abstract_mesh().empty


def test_a_function_without_bare_specs_sees_no_mesh() -> None:
    seen: list[bool] = []

    def f(x: Any) -> Any:
        seen.append(jax.sharding.get_abstract_mesh().empty)
        other = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        return jax.shard_map(jnp.sin, mesh=other, in_specs=P("a", "b"), out_specs=P("a", "b"))(x)

    np.testing.assert_allclose(gshard.jit(f, mesh={"data": 8})(X), np.sin(X), rtol=1e-6)
    assert seen == [True]
