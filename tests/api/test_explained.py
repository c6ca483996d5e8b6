"""What ``explain`` takes: stages of functions from ``gshard.jit`` and ``jax.jit``, and shardings on abstract meshes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

NAMES = ("data", "model")
MESH = jax.make_mesh((2, 4), NAMES, axis_types=(AxisType.Auto,) * 2)
ABSTRACT = AbstractMesh((2, 4), NAMES)


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def arguments(mesh: Any) -> tuple[Any, Any]:
    shapes = ((64, 128), P(None, "model")), ((32, 64), P("data"))
    return tuple(jax.ShapeDtypeStruct(s, "float32", sharding=NamedSharding(mesh, spec)) for s, spec in shapes)  # type: ignore[return-value]


def told(found: Any) -> Any:
    return found.bytes_by_kind, found.argument_bytes, str(found.mesh), found.format()


@pytest.mark.parametrize("mesh", [MESH, ABSTRACT], ids=["devices", "abstract"])
def test_a_function_of_gshard_is_explained_at_each_stage(mesh: Any) -> None:
    jitted, given = gshard.jit(step, mesh=MESH, donate_argnums=0), arguments(mesh)
    lowered = jitted.lower(*given)
    expected = gshard.explain(jitted, *given)
    assert expected.bytes_by_kind == {"all_reduce": 64 * 32 * 4}
    for stage in jitted.trace(*given), lowered, lowered.compile():
        found = gshard.explain(stage)
        assert isinstance(found, gshard.stages.Explanation)
        assert told(found) == told(expected)
        assert found.cost().memory.shared == expected.cost().memory.shared == 64 * 32 * 4, "the donated argument"
        by_xla = gshard.explain(stage, partitioner="xla", machine="h100")
        assert isinstance(by_xla, gshard.stages.CompiledExplanation)
        assert by_xla.total_bytes == expected.total_bytes
        assert [a.name for a in by_xla.arguments] == ["w", "x"]
        assert "h100" in str(by_xla.machine)


@pytest.mark.parametrize(
    "options",
    [{"mesh": 8}, {"machine": "h100"}, {"memory_limit": "1GiB"}, {"finite": True}, {"donate_argnums": 0}, {"y": None}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_a_function_that_is_lowered_are_refused(options: dict[str, Any]) -> None:
    lowered = gshard.jit(step, mesh=MESH).lower(*arguments(MESH))
    for stage in lowered, lowered.compile():
        with pytest.raises(gshard.ArgumentError, match=f"(?s)has its arguments, its mesh.*{next(iter(options))}="):
            gshard.explain(stage, **options)
    with pytest.raises(gshard.ArgumentError, match="has its arguments"):
        gshard.explain(lowered, 3)


def test_a_function_that_jax_traced_is_compiled() -> None:
    jitted, given = jax.jit(step), arguments(MESH)
    assert told_by_xla(gshard.explain(jitted.trace(*given))) == told_by_xla(gshard.explain(jitted, *given))


def told_by_xla(found: Any) -> Any:
    return type(found), found.bytes_by_kind, found.peak


WAYS = {
    "jax.jit": lambda given: gshard.explain(jax.jit(step), *given, partitioner="gshard"),
    "function": lambda given: gshard.explain(step, *given),
    "axes": lambda given: gshard.explain(step, *given, mesh={"data": 2, "model": 4}),
    "other order": lambda given: gshard.explain(step, *given, mesh={"model": 4, "data": 2}),
    "other names": lambda given: gshard.explain(step, *given, mesh=8),
    "abstract": lambda given: gshard.explain(step, *given, mesh=ABSTRACT),
    "gshard.jit": lambda given: gshard.explain(gshard.jit(step, mesh=MESH), *given),
}


@pytest.mark.parametrize("way", WAYS)
def test_shardings_on_abstract_meshes_count(way: str) -> None:
    found = WAYS[way](arguments(ABSTRACT))
    assert found.argument_bytes == (64 * 128 * 4 + 32 * 64 * 4, 64 * 32 * 4 + 16 * 64 * 4)
    assert found.bytes_by_kind == {"all_reduce": 64 * 32 * 4}


def test_shardings_over_devices_count_on_an_abstract_mesh_of_their_axes() -> None:
    found = gshard.explain(step, *arguments(MESH), mesh=ABSTRACT)
    assert found.bytes_by_kind == {"all_reduce": 64 * 32 * 4}
    elsewhere = gshard.explain(step, *arguments(MESH), mesh=AbstractMesh((4, 4), NAMES))
    assert elsewhere.total_bytes == 0, "arrays on other devices are moved"


def test_axes_of_an_abstract_mesh_may_have_other_sizes_where_the_program_is_planned() -> None:
    found = gshard.explain(step, *arguments(AbstractMesh((8, 16, 1), (*NAMES, "x"))), mesh={"model": 2, "data": 4})
    assert found.argument_bytes[1] == 64 * 64 * 4 + 8 * 64 * 4


def test_a_sharding_over_another_number_of_abstract_devices_is_refused() -> None:
    with pytest.raises(gshard.ShardingError, match="a sharding over 64 devices cannot be one over 8"):
        gshard.explain(step, *arguments(AbstractMesh((8, 8), NAMES)), mesh=8)
