"""Options of a ``gshard.jit`` that another one calls: kept where both have the same, else listed with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.core.errors import PlanError

H100 = "h100:1x8"
OPTIONS: dict[str, dict[str, Any]] = {
    "machine": {"machine": H100},
    "search": {"machine": H100, "search": True},
    "strict": {"strict": True},
    "collective_matmul": {"collective_matmul": True},
    "finite": {"finite": True},
    "compiler_options": {"compiler_options": {"xla_cpu_enable_fast_math": False}},
}
OTHER: dict[str, dict[str, Any]] = {
    "machine": {"machine": "v5e:2x4"},
    "search": {"machine": H100},
    "collective_matmul": {"collective_matmul": gshard.stages.CollectiveMatmul(above=1)},
}


def body(x: Any) -> Any:
    return jnp.sin(x) @ x


CONTAINERS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "as it is": lambda inner: lambda x: inner(x) + 1,
    "scan": lambda inner: lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0],
    "grad": lambda inner: jax.grad(lambda x: inner(x).sum()),
    "jax.jit": lambda inner: jax.jit(lambda x: inner(x) * 2),
}


def dropped(container: str, inner: dict[str, Any], outer: dict[str, Any]) -> list[str]:
    f = CONTAINERS[container](gshard.jit(body, mesh=8, **inner))
    explained = gshard.explain(gshard.jit(f, mesh=8, **outer), jnp.ones((8, 8)))
    return [line for line in map(str, explained.dropped) if "inner gshard.jit" in line]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_the_outer_one_does_not_have_is_listed(option: str, container: str) -> None:
    listed = dropped(container, OPTIONS[option], {})
    assert any(f"{option} of an inner gshard.jit is" in line for line in listed), listed
    assert all("test_inner_options.py" in line for line in listed)
    assert dropped(container, OPTIONS[option], OPTIONS[option]) == []
    if option in OTHER:
        listed = dropped(container, OPTIONS[option], OTHER[option])
        assert any(f"{option} of an inner gshard.jit is" in line for line in listed)


def test_options_of_the_outer_one_alone_are_kept() -> None:
    for outer in OPTIONS.values():
        assert dropped("as it is", {}, outer) == []


def test_strict_refuses_them_with_the_line() -> None:
    inner = gshard.jit(body, mesh=8, machine=H100)
    outer = gshard.jit(lambda x: inner(x) + 1, mesh=8, strict=True)
    with pytest.raises(PlanError, match=r"machine of an inner gshard\.jit is not kept") as error:
        outer(jnp.ones((8, 8)))
    assert "test_inner_options.py" in str(error.value)
    gshard.jit(lambda x: inner(x) + 1, mesh=8, strict=True, machine=H100)(jnp.ones((8, 8)))


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.one_in(2)
def test_results_are_those_of_jax_in_each_call(container: str) -> None:
    x = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
    expected = CONTAINERS[container](body)(x)
    outer = gshard.jit(CONTAINERS[container](gshard.jit(body, mesh=8, machine=H100)), mesh=8)
    mesh = jax.make_mesh((8,), ("devices",))
    for spec in (None, jax.P("devices"), jax.P(None, "devices"), jax.P()):
        placed = x if spec is None else jax.device_put(x, jax.NamedSharding(mesh, spec))
        np.testing.assert_allclose(np.asarray(outer(placed)), np.asarray(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("inner", [{"data": 4, "model": 2}, {"data": 2, "model": 4}, 8])
def test_the_mesh_of_an_inner_one_is_listed_unless_it_is_the_same(inner: Any) -> None:
    """The same mesh is used; another one is replaced by the mesh of the outer ``gshard.jit``, and strict refuses it."""
    f = gshard.jit(lambda x: gshard.split(jnp.sin(x), 0, 2), mesh=inner)
    mesh = {"data": 4, "model": 2}
    explained = gshard.explain(gshard.jit(lambda x: f(x) * 2, mesh=mesh), jnp.ones((8, 8)))
    listed = [line for line in map(str, explained.dropped) if "mesh of an inner gshard.jit" in line]
    is_other = inner != mesh
    assert len(listed) == is_other
    if is_other:
        assert "test_inner_options.py" in listed[0]
        with pytest.raises(PlanError, match="mesh of an inner"):
            gshard.jit(lambda x: f(x) * 2, mesh=mesh, strict=True)(jnp.ones((8, 8)))
    np.testing.assert_allclose(
        gshard.jit(lambda x: f(x) * 2, mesh=mesh)(jnp.ones((8, 8))), 2 * np.sin(np.ones((8, 8))), rtol=1e-6
    )
