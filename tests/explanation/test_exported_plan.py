"""Exported plans: jax.jit runs with their shardings, and they state what XLA sends with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.xla.hlo_collectives import collectives

DATA, BOTH = {"data": 8}, {"data": 2, "model": 4}


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def arguments():
    rng = np.random.default_rng(0)
    up, down, x = rng.normal(size=(64, 256)) / 8, rng.normal(size=(256, 64)) / 16, rng.normal(size=(64, 64))
    return {"up": jnp.float32(up), "down": jnp.float32(down)}, jnp.float32(x)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def mesh_of(axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def quick(function, *args, kwargs=None, **options):
    made = gshard.jit(function, **({"mesh": DATA} | options))
    found = gshard.search(made, *args, machine="h100:1x8", progress=False, budget_seconds=1e-3, **(kwargs or {}))
    return gshard.stages.export_plan(found)


def in_jax(function, plan, devices, **options):
    ins, outs = plan.named(devices)
    return jax.jit(function, in_shardings=ins, out_shardings=outs, **options), ins


def close(got, want, tolerance=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=tolerance), got, want)


@pytest.fixture(scope="module")
def exported():
    def marked(params, x):
        params = {"up": gshard.split(params["up"], 1, "model"), "down": gshard.split(params["down"], 0, "model")}
        return step(params, gshard.split(x, 0, "data"))

    return gshard.stages.export_plan(gshard.search(marked, *arguments(), mesh=BOTH, machine="h100:1x8"))


def test_jax_jit_runs_it_with_the_shardings_of_the_plan_and_sends_what_is_told(exported):
    params, x = exported.in_shardings
    assert (params, x) == ({"up": P(None, "model"), "down": P("model", None)}, P("data", None))
    assert jax.tree.structure(exported.out_shardings) == jax.tree.structure((params, x))
    jitted, _ = in_jax(step, exported, mesh_of(BOTH))
    given = arguments()
    for _ in range(3):
        close(jitted(*given), jax.jit(step)(*given))
    sent = sum(c.total_bytes for c in collectives(jitted.lower(*given).compile().as_text()))
    assert sent >= exported.compiled.total_bytes  # which is counted as GPUs and TPUs send it
    assert exported.ratio == exported.sent / exported.planned


def test_a_plan_that_xla_follows_needs_no_constraint():
    found = gshard.search(lambda w, x: x @ w, f32(2048, 2048), f32(8, 2048), mesh=DATA, machine="h100:1x8")
    plan = gshard.stages.export_plan(found)
    assert plan.follows_plan
    assert plan.advice is None
    assert "times the plan's" in str(plan)
    assert "in_shardings = (P(None, 'data'), P(None, None))" in str(plan)


def test_constraints_are_tried_where_xla_sends_more_and_the_lines_are_named(exported):
    """The activations are split over both axes inside, which no argument or result tells."""

    def inside(params, x):
        h = gshard.shard(jnp.tanh(x @ params["up"]), P("data", "model"))
        h = gshard.shard(h * 2, P("model", "data"))
        return gshard.replicate(jnp.sin(h) @ params["down"])

    other = gshard.stages.export_plan(gshard.search(inside, *arguments(), mesh=BOTH, machine="h100:1x8"))
    for plan in (exported, other):
        assert (plan.advice is None) == (max(plan.compiled.total_bytes / plan.planned, plan.products) <= 1.05)
        assert plan.sent <= plan.compiled.total_bytes
        assert plan.advice is None or plan.advice.planned == plan.planned
    for row in other.worse:
        assert row.after.sent > row.before.sent
        assert row.place.startswith("test_exported_plan.py:")
    assert other.follows_plan or other.worse


def test_a_part_of_an_axis_is_exported_as_it_is_compiled():
    """JAX has no name for it: the argument is whole, in what is told and in what is compiled."""

    def halved(params, x):
        return step({**params, "up": gshard.split(params["up"], 1, 2)}, gshard.split(x, 0, "data"))

    plan = quick(halved, *arguments())
    assert plan.in_shardings[0]["up"] == P(None, None)
    assert any("a part of an axis has no name" in line for line in plan.less_split)
    close(in_jax(step, plan, mesh_of(DATA))[0](*arguments()), jax.jit(step)(*arguments()))
    # 60 rows over 8 devices: the plan splits them inside, jax.jit takes and returns them whole, or split less.
    plan = quick(lambda x, w: gshard.split(x, 0, 8) @ gshard.split(w, 1, 2), f32(60, 512), f32(512, 64))
    assert plan.in_shardings == (P(None, None), P(None, None))
    assert "60 does not divide evenly" in "\n".join(plan.less_split)
    assert "split less than by the plan: " in str(plan)


def test_what_is_not_exported():
    with pytest.raises(gshard.ArgumentError, match="not str"):
        gshard.stages.export_plan("h100")
    with pytest.raises(gshard.ArgumentError, match="no shardings for references"):
        quick(lambda total, x: total[...] + x, jax.new_ref(jnp.zeros(())), jnp.ones((64, 64)))


def test_keywords_static_and_captured_arguments():
    """Shardings of keyword arguments are beside the positional ones; static arguments have none, as in jax.jit."""
    table = jnp.ones((64, 256))

    def stepped(kind, x, *, scale):
        h = gshard.split(x, 0, "data") @ table
        return (jnp.tanh(h) if kind == "tanh" else h) * gshard.split(scale, 0, "data")

    x, scale = jnp.ones((64, 64)), jnp.ones((64, 1))
    plan = quick(stepped, "tanh", x, kwargs={"scale": scale}, static_argnums=0)
    assert (plan.in_shardings, plan.keywords) == ((P("data", None),), {"scale": P("data", None)})
    assert [a.path for a in plan.arguments] == ["x", "scale"]
    assert "by keyword, which have no in_shardings: {'scale': P('data', None)}" in str(plan)
    devices = mesh_of(DATA)
    ins, outs = plan.named(devices)
    jitted = jax.jit(stepped, static_argnums=0, out_shardings=outs)
    on = jax.device_put(x, ins[0]), jax.device_put(scale, jax.NamedSharding(devices, plan.keywords["scale"]))
    close(jitted("tanh", on[0], scale=on[1]), jnp.tanh(x @ table))
    assert not collectives(jitted.lower("tanh", on[0], scale=on[1]).compile().as_text())


def test_arrays_in_the_memory_of_the_host_stay_there():
    devices = mesh_of(DATA)
    on_host = jax.NamedSharding(devices, P("data"), memory_kind="pinned_host")

    def added(state, x):
        return jax.device_put(state, jax.memory.Space.Device) * 2 + x

    plan = quick(added, f32(64, 64), f32(64, 64), mesh=devices, in_shardings=(on_host, P("data")))
    jitted, ins = in_jax(added, plan, devices)
    assert [sharding.memory_kind for sharding in ins] == ["pinned_host", "device"]
    assert "in the memory of the host, with its memory kind in exported.named(mesh): state" in str(plan)
    found = jitted(*(jax.device_put(jnp.ones((64, 64)), sharding) for sharding in ins))
    np.testing.assert_array_equal(found, np.full((64, 64), 3.0))


@pytest.mark.parametrize("kind", ["abstract", "Explicit"])
def test_meshes_without_devices_and_with_axes_of_type_explicit(kind):
    types = jax.sharding.AxisType
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(types.Auto,) * 2)
    if kind == "Explicit":
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(types.Explicit,) * 2)
    product = lambda w, x: gshard.split(x, 1, "model") @ gshard.split(w, 0, "model")  # noqa: E731
    plan = quick(product, f32(64, 64), f32(64, 64), mesh=mesh)
    assert plan.in_shardings == (P("model", None), P(None, "model"))
    assert ("axes of type Explicit" in str(plan)) == (kind == "Explicit")
    assert plan.compiled.total_bytes > 0


def test_the_function_is_compiled_as_written():
    """The rows of a cross entropy are scattered in jax.jit's program, and not in gshard's, which rewrites it."""

    def loss(w, x, labels):
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1))

    given = f32(64, 512), f32(64, 64), jax.ShapeDtypeStruct((64,), "int32")
    plan = quick(jax.grad(loss), *given)
    compiled = in_jax(jax.grad(loss), plan, mesh_of(DATA))[0].lower(*given).compile()
    assert plan.compiled.total_bytes == gshard.explain(compiled).total_bytes


def test_a_result_that_is_empty_and_none_among_arguments():
    def scaled(state, x):
        return {**state, "w": state["w"] * x.sum()}, None

    state = {"w": f32(64), "none": None, "empty": []}
    plan = quick(scaled, state, f32(0, 8))
    assert plan.in_shardings[0].keys() == state.keys()
