"""gshard.jit is used like jax.jit: static values, donation, pytrees, keywords, caching, stages, bad input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import shard, split
from invented import invented


def test_static_arguments_by_number_and_name() -> None:
    traced = []

    @gshard.jit(mesh=8, static_argnames=("scale", "kind"))
    def f(x: Any, scale: int, *, kind: str = "plus") -> Any:
        traced.append((scale, kind))
        return split(x, 0, 8) * scale + (1 if kind == "plus" else -1)

    x = jnp.arange(8.0)
    np.testing.assert_array_equal(f(x, 2), np.arange(8.0) * 2 + 1)
    np.testing.assert_array_equal(f(x, scale=2), np.arange(8.0) * 2 + 1)
    np.testing.assert_array_equal(f(x, 3, kind="minus"), np.arange(8.0) * 3 - 1)
    np.testing.assert_array_equal(f(x, 3, kind="minus"), np.arange(8.0) * 3 - 1)
    assert len(traced) == 3  # 2 by number, 2 by name, 3 with another kind; the fourth call is remembered


def test_traces_once_for_each_kind_of_arguments() -> None:
    traced = []

    @gshard.jit(mesh=8)
    def f(tree: Any, *, extra: Any) -> Any:
        traced.append(1)
        return {"sum": split(tree["x"], 0, 8) + extra}

    x = np.arange(8.0, dtype=np.float32)
    first = f({"x": x}, extra=1.0)
    f({"x": x + 1}, extra=2.0)
    assert len(traced) == 1
    f({"x": first["sum"]}, extra=3.0)  # sharded as the program would have put it
    assert len(traced) == 1
    f({"x": x.astype(np.int32)}, extra=1.0)
    f({"x": np.concatenate([x, x])}, extra=1.0)
    assert len(traced) == 3


def test_donated_arguments_are_consumed() -> None:
    step = gshard.jit(lambda state, x: (split(state, 0, 8) + x, x.sum()), mesh=8, donate_argnums=0)
    state, _ = step(jnp.zeros(16), jnp.ones(16))
    after, _ = step(state, jnp.ones(16))
    assert state.is_deleted()
    np.testing.assert_array_equal(after, 2 * np.ones(16))


def test_every_stage_can_be_had_and_printed(mesh_2x4: jax.sharding.Mesh) -> None:
    lowered = gshard.jit(lambda x: jnp.tanh(split(x, 0, "data")).sum(), mesh=mesh_2x4).lower(jnp.ones((4, 6)))
    assert "tanh" in str(lowered.program)
    assert "f32[4@data,6]" in str(lowered.plan)
    assert "shard_map" in str(lowered.spmd)
    assert "all-reduce" in str(lowered.executable)


def test_shapes_without_arrays_are_enough_to_lower() -> None:
    x = jax.ShapeDtypeStruct((1024, 8), jnp.float32)
    lowered = gshard.jit(lambda x: split(x, 0, 8).sum(), mesh=8).lower(x)
    assert [c.kind for c in lowered.spmd.collectives] == ["all_reduce"]


def test_shardings_of_arguments_are_marks(mesh_2x4: jax.sharding.Mesh) -> None:
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh_2x4, P("model", "data")))
    lowered = gshard.jit(lambda x: jnp.sin(x), mesh=mesh_2x4).lower(x)
    assert lowered.plan.format(lowered.program.block.inputs[0]) == "f32[8@model,4@data]"
    assert lowered.plan.format(lowered.program.block.outputs[0]) == "f32[8@model,4@data]"


def test_an_argument_on_another_mesh_of_the_same_devices_keeps_its_cut() -> None:
    other = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(other, P("b", "a")))
    jitted = gshard.jit(lambda x: x * 2, mesh=8)
    np.testing.assert_array_equal(jitted(x), 2 * np.arange(32.0).reshape(8, 4))
    entry = jitted.lower(x).spmd.in_shardings[0]
    assert entry.dims == (("devices.2",), ("devices.0", "devices.1"))


def test_arguments_from_elsewhere_are_moved() -> None:
    x = jax.device_put(jnp.arange(4.0), jax.devices()[5])
    np.testing.assert_array_equal(gshard.jit(lambda x: split(x, 0, 4) + 1, mesh=4)(x), np.arange(4.0) + 1)


def test_results_go_in_again_with_other_shapes_beside_them() -> None:
    """A training loop with batches of two shapes: the state of the first program is traced into the second."""

    def step(w: Any, x: Any) -> Any:
        scale = jnp.broadcast_to(w.sum() * 0.1, x.shape)
        return w + split(x * scale, 0, 8).mean(0), jnp.reshape(x, (-1,)).sum()

    jitted, w = gshard.jit(step, mesh=8), jnp.arange(4.0)
    plain, v = jax.jit(step), jnp.arange(4.0)
    for rows in (8, 16, 5, 8):
        x = np.linspace(-1, 2, rows * 4, dtype=np.float32).reshape(rows, 4)
        (w, _), (v, _) = jitted(w, x), plain(v, x)
        np.testing.assert_allclose(w, v, rtol=1e-5)


def test_in_and_out_shardings(mesh_2x4: jax.sharding.Mesh) -> None:
    jitted = gshard.jit(
        lambda x, w: {"product": x @ w, "sum": x.sum()},
        mesh=mesh_2x4,
        in_shardings=(P("data"), P(None, "model")),
        out_shardings={"product": P("data", "model"), "sum": None},
    )
    x, w = np.arange(16.0).reshape(4, 4), np.eye(4, 8)
    out = jitted(x, w)
    np.testing.assert_array_equal(out["product"], x @ w)
    assert {c.kind for c in jitted.lower(x, w).spmd.collectives} == {"all_reduce"}
    assert out["product"].addressable_shards[0].data.shape == (2, 2)


def test_weak_types_promote_as_in_jax() -> None:
    out = gshard.jit(lambda x, s: split(x, 0, 8) * s, mesh=8)(jnp.ones(8, jnp.bfloat16), 2.0)
    assert out.dtype == jnp.bfloat16


def test_inside_another_gshard_function_marks_count() -> None:
    inner = gshard.jit(lambda x: split(x, 0, 8).sum(), mesh=8)
    outer = gshard.jit(lambda x: inner(x * 2), mesh=8)
    assert [c.kind for c in outer.lower(jnp.ones(8)).spmd.collectives] == ["all_reduce"]
    assert outer(jnp.ones(8)) == 16


def test_a_context_mesh_does_not_disturb(mesh_2x4: jax.sharding.Mesh) -> None:
    with jax.set_mesh(mesh_2x4):
        f = gshard.jit(lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), P("data")).sum(), mesh=mesh_2x4)
        np.testing.assert_allclose(f(np.arange(4.0)), np.sin(np.arange(4.0)).sum(), rtol=1e-6)


def bad(x: Any) -> Any:
    return x if x.sum() > 0 else -x


BAD_INPUT = [
    (lambda x: split(x, 0, "nope"), gshard.ShardingError, "no axis 'nope'", "'data', 'model'"),
    (lambda x: split(x, 0, ("data", "data")), gshard.ShardingError, "axis 'data' splits dimension 0 twice", "once"),
    (lambda x: shard(x, P("data", "data")), gshard.ShardingError, "axis 'data' splits dimensions 0 and 1", "once"),
    (lambda x: split(x, 0, 16), gshard.ShardingError, "16 partitions", "at most 8"),
    (lambda x: split(x, 0, 3), gshard.ShardingError, "3 partitions", "1, 2, 4, 8"),
    (lambda x: split(x, 0, 0), gshard.ShardingError, "0 partitions", "from 1"),
    (lambda x: split(x, 2, 2), gshard.ShardingError, "no dimension 2", "0 to 1"),
    (lambda x: split(x.sum(), 0, 2), gshard.ShardingError, "0 dimensions", "replicate"),
    (lambda x: shard(x, np.array([[0, 1], [1, 2]])), gshard.ShardingError, "device 1 stands twice", "one part"),
    (lambda x: shard(x, np.array([[0, 2]])), gshard.ShardingError, "device 1 is missing", "0 to n-1"),
    (lambda x: shard(x, np.array([[9, 8]])), gshard.ShardingError, "names device 9", "0 to 7"),
    (lambda x: shard(x, np.arange(4)), gshard.ShardingError, "rank 1 cannot cut an array of rank 2", "each dimension"),
    (lambda x: shard(x, np.ones((1, 2))), gshard.ShardingError, "array of integers", "arange"),
    (lambda x: shard(x, P("data", None, "model")), gshard.ShardingError, "3 dimensions", "at most one entry"),
    (bad, gshard.TraceError, "needs the value of an array", "jax.lax.cond"),
]


@pytest.mark.parametrize(("f", "kind", "what", "hint"), BAD_INPUT, ids=[b[2] for b in BAD_INPUT])
def test_bad_input_gets_one_clear_error(
    f: Any, kind: type[Exception], what: str, hint: str, mesh_2x4: jax.sharding.Mesh
) -> None:
    with pytest.raises(kind) as caught:
        gshard.jit(f, mesh=mesh_2x4)(jnp.ones((4, 6)))
    text = str(caught.value)
    assert what in text
    assert hint in text
    assert "test_jit.py" in text, "the user's line is missing"


def test_strict_refuses_what_has_no_rule() -> None:
    def f(x: Any) -> Any:
        return invented(split(x, 0, 8))

    loose = gshard.jit(f, mesh=8)
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    np.testing.assert_allclose(loose(x), np.cumsum(x[::-1], axis=0), atol=1e-5)
    with pytest.raises(gshard.PlanError, match="'invented' has no rule"):
        gshard.jit(f, mesh=8, strict=True)(x)


@pytest.mark.parametrize(("mesh", "what"), [(9, "9 devices"), (0, "0 devices"), ([], "at least one"), (1.5, "float")])
def test_bad_meshes(mesh: Any, what: str) -> None:
    with pytest.raises(gshard.MeshError, match=what):
        gshard.jit(lambda x: x, mesh=mesh)


def test_a_device_twice_in_the_mesh() -> None:
    with pytest.raises(gshard.MeshError, match="stands twice"):
        gshard.jit(lambda x: x, mesh=[jax.devices()[0]] * 2)


def test_a_planned_mesh_explains_but_does_not_run() -> None:
    mesh = gshard.Mesh.abstract(data=64, expert=32)
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    found = gshard.explain(lambda x: split(x, 0, 2048).sum(), x, mesh=mesh)
    assert found.bytes_by_kind == {"all_reduce": 7}
    with pytest.raises(gshard.MeshError, match="abstract mesh"):
        gshard.jit(lambda x: x + 1, mesh=mesh)(jnp.ones(3))


def test_uneven_results_may_stay_where_they_are(rng: np.random.Generator) -> None:
    """A state of 11 rows over 8 devices goes from call to call without being gathered."""

    def step(state: Any, x: Any) -> Any:
        table = split(state["table"], 0, 8)
        return {"table": table * 2 + x, "count": state["count"] + 1}

    x = rng.standard_normal((11, 3), np.float32)
    start = {"table": x, "count": np.int32(0)}
    keep = gshard.jit(step, mesh=8, uneven="keep")
    state = keep(start, 1.0)
    assert isinstance(state["table"], gshard.stages.UnevenArray)
    assert isinstance(state["count"], jax.Array)
    assert state["table"].shape == (11, 3)
    assert str(state["table"]) == "UnevenArray(float32[11@devices,3] on devices=8)"
    assert state["table"].padded.addressable_shards[0].data.shape == (2, 3)
    for _ in range(3):
        state = keep(state, 1.0)
    lowered = keep.lower(state, 1.0)
    assert lowered.spmd.collectives == ()
    np.testing.assert_allclose(state["table"], 16 * x + 15, rtol=1e-6)
    np.testing.assert_allclose(jnp.sin(jnp.asarray(state["table"].block_until_ready())), np.sin(16 * x + 15), atol=1e-5)
    assert (state["table"].ndim, state["table"].size, state["table"].dtype) == (2, 33, np.float32)
    # Elsewhere it is taken too: whole on other devices and under transformations, gathered where that is asked for.
    gathered = gshard.jit(step, mesh=8)(state, 1.0)
    assert isinstance(gathered["table"], jax.Array)
    np.testing.assert_allclose(gathered["table"], 32 * x + 31, rtol=1e-6)
    fewer = gshard.jit(lambda s: split(s["table"], 0, 4) + 0, mesh=4)(state)
    np.testing.assert_allclose(fewer, 16 * x + 15, rtol=1e-6)
    gradient = jax.grad(lambda v: keep({**state, "count": 1}, v)["table"].sum())(1.0)
    assert gradient == 33
    with pytest.raises(gshard.ShardingError, match="uneven='padded' is not known"):
        gshard.jit(step, mesh=8, uneven="padded")


def test_an_uneven_argument_may_be_needed_otherwise(rng: np.random.Generator) -> None:
    x = rng.standard_normal((11, 10), np.float32)
    rows = gshard.jit(lambda x: split(x, 0, 8) + 0, mesh=8, uneven="keep")(x)
    columns = gshard.jit(lambda x: split(x, 1, 8) + 0, mesh=8, uneven="keep")
    np.testing.assert_array_equal(columns(rows), x)
    given = gshard.jit(lambda x: x + 0, mesh=8, uneven="keep", in_shardings=P(None, "devices"))
    assert given(rows).partitioning.dims == columns(rows).partitioning.dims
    np.testing.assert_array_equal(given(rows), x)


@pytest.mark.parametrize("parts", [4, 8])
def test_a_donated_state_comes_as_it_leaves(parts: int, mesh_2x4: jax.sharding.Mesh, rng: np.random.Generator) -> None:
    """6 rows over 4 or 8 devices leave in halves. So they come, and one program serves all steps, the first too."""
    traced, mesh = [], 4 if parts == 4 else mesh_2x4

    def step(state: Any, x: Any) -> Any:
        traced.append(1)
        rows = split(state["rows"], 0, parts)
        return {"rows": rows * 2 + x.sum(), "kept": state["kept"] + split(x, 0, parts).sum(0)}

    plain = {"rows": rng.standard_normal((6, 3), np.float32), "kept": np.zeros(3, np.float32)}
    x = rng.standard_normal((8, 3), np.float32)
    jitted = gshard.jit(step, mesh=mesh, donate_argnums=0)
    spmd = jitted.lower(plain, x).spmd
    assert spmd.in_shardings[:2] == spmd.out_shardings
    assert any(spmd.in_shardings[1].dims), "not whole"
    whole = gshard.jit(step, mesh=mesh).lower(plain, x).spmd
    assert not any(whole.in_shardings[1].dims), "what is not donated comes whole, which sends nothing"
    traced.clear()
    state = plain
    for _ in range(3):
        state, plain = jitted(state, x), jax.jit(step)(plain, x)
        for name in plain:
            np.testing.assert_allclose(state[name], plain[name], rtol=1e-5)
    assert len(traced) <= 1, "by jax.jit; ours was traced before"


def test_what_is_donated_is_given_once(mesh_2x4: jax.sharding.Mesh) -> None:
    """XLA would crash, or read what is no longer there."""
    step = gshard.jit(lambda x, y: (split(x, 0, 8) + 1, y * 2), mesh=mesh_2x4, donate_argnums=(0, 1))
    start = step(jnp.arange(8.0), jnp.arange(8.0) + 1)[0]
    with pytest.raises(gshard.ShardingError, match="given twice, as x and y"):
        step(start, start)
    step(start, jnp.arange(8.0))
    with pytest.raises(gshard.ShardingError, match="an earlier call has overwritten, as x"):
        step(start, jnp.arange(8.0))


def test_values_where_only_shapes_are_known() -> None:
    for bad in (lambda n: jnp.zeros(gshard.replicate(n)), lambda n: jnp.zeros(4) if n > 3 else n):
        with pytest.raises(gshard.TraceError, match="only shapes are known"):
            gshard.jit(bad, mesh=8)(4)
    with pytest.raises(gshard.ArgumentError, match=r"Non-hashable static arguments.*argument 1 of"):
        gshard.jit(lambda x, sizes: x, mesh=8, static_argnums=1)(jnp.ones(3), [1, 2])
    with pytest.raises(TypeError, match="unsupported operand"):
        gshard.jit(lambda x: x + "a", mesh=8)(jnp.ones(3))
