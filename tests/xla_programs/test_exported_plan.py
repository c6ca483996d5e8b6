"""Plans as shardings for jax.jit: they run there, and what XLA makes of them is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.program import format_bytes
from gshard.xla.hlo_collectives import collectives

Params = dict[str, jax.Array]


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def arguments(rows=64):
    rng = np.random.default_rng(0)
    up, down, x = rng.normal(size=(64, 256)) / 8, rng.normal(size=(256, 64)) / 16, rng.normal(size=(rows, 64))
    return {"up": jnp.float32(up), "down": jnp.float32(down)}, jnp.float32(x)


@pytest.fixture(scope="module")
def exported():
    def marked(params, x):
        params = {"up": gshard.split(params["up"], 1, "model"), "down": gshard.split(params["down"], 0, "model")}
        return step(params, gshard.split(x, 0, "data"))

    return gshard.export_plan(gshard.search(marked, *arguments(), mesh={"data": 2, "model": 4}, machine="h100:1x8"))


def test_the_shardings_are_those_of_the_plan(exported):
    params, x = exported.in_shardings
    assert params == {"up": P(None, "model"), "down": P("model", None)}
    assert x == P("data", None)
    assert jax.tree.structure(exported.out_shardings) == jax.tree.structure((params, x))


def test_jax_jit_runs_it_and_sends_what_is_told(exported):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ins, outs = exported.named(mesh)
    jitted = jax.jit(step, in_shardings=ins, out_shardings=outs)
    given = arguments()
    for _ in range(3):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jitted(*given), jax.jit(step)(*given))
    sent = sum(c.total_bytes for c in collectives(jitted.lower(*given).compile().as_text()))
    assert sent == exported.tried["shardings alone"]
    assert exported.ratio == exported.compiled.total_bytes / exported.planned


def test_a_plan_that_xla_follows_needs_no_constraint():
    array = jax.ShapeDtypeStruct
    w, x = array((2048, 2048), "float32"), array((8, 2048), "float32")
    exported = gshard.export_plan(gshard.search(lambda w, x: x @ w, w, x, mesh={"data": 8}, machine="h100:1x8"))
    assert exported.follows_plan
    assert exported.constraints == ()
    assert not exported.everywhere
    assert list(exported.tried) == ["shardings alone"]
    assert "times the plan's" in str(exported)
    assert "in_shardings = (P(None, 'data'), P(None, None))" in str(exported)


def test_constraints_are_tried_where_xla_sends_more(exported):
    alone = exported.tried["shardings alone"]
    assert (alone > 1.05 * exported.planned) == (len(exported.tried) > 1)
    assert exported.compiled.total_bytes == min(exported.tried.values())
    assert exported.everywhere == (exported.tried.get("a constraint on every value") == exported.compiled.total_bytes)


def test_where_xla_sends_more_the_lines_are_named():
    """The activations are split over both axes inside, which no argument or result tells."""

    def inside(params, x):
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


def test_a_part_of_an_axis_is_exported_as_it_is_compiled():
    """JAX has no name for it: the argument is whole, in what is told and in what is compiled."""

    def halved(params, x):
        return step({**params, "up": gshard.split(params["up"], 1, 2)}, gshard.split(x, 0, "data"))

    exported = gshard.export_plan(gshard.search(halved, *arguments(), mesh={"data": 8}, machine="h100:1x8"))
    assert exported.in_shardings[0]["up"] == P(None, None)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    ins, outs = exported.named(mesh)
    jitted = jax.jit(step, in_shardings=ins, out_shardings=outs)
    given = arguments()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jitted(*given), jax.jit(step)(*given))


def test_only_a_result_of_a_search_is_exported():
    wrong = "h100"
    with pytest.raises(gshard.ArgumentError, match="not str"):
        gshard.export_plan(wrong)


def test_keywords_static_and_captured_arguments():
    """Shardings of keyword arguments are beside the positional ones; static arguments have none, as in jax.jit."""
    table = jnp.ones((64, 256))

    def stepped(kind, x, *, scale):
        h = gshard.split(x, 0, "data") @ table
        return (jnp.tanh(h) if kind == "tanh" else h) * gshard.split(scale, 0, "data")

    x, scale = jnp.ones((64, 64)), jnp.ones((64, 1))
    made = gshard.jit(stepped, mesh={"data": 8}, static_argnums=0)
    plan = gshard.export_plan(gshard.search(made, "tanh", x, scale=scale, machine="h100:1x8", progress=False))
    assert plan.in_shardings == (P("data", None),)
    assert plan.keywords == {"scale": P("data", None)}
    assert [a.path for a in plan.arguments] == ["x", "scale"]
    assert "by keyword, which have no in_shardings: {'scale': P('data', None)}" in str(plan)
    devices = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    ins, outs = plan.named(devices)
    on = jax.NamedSharding(devices, plan.keywords["scale"])
    jitted = jax.jit(stepped, static_argnums=0, out_shardings=outs)
    found = jitted("tanh", jax.device_put(x, ins[0]), scale=jax.device_put(scale, on))
    np.testing.assert_allclose(found, jnp.tanh(x @ table), rtol=1e-6)
    assert not collectives(
        jitted.lower("tanh", jax.device_put(x, ins[0]), scale=jax.device_put(scale, on)).compile().as_text()
    )


def test_what_jax_cannot_split_is_told():
    """60 rows over 8 devices: the plan splits them inside, jax.jit takes and returns them whole, or split less."""

    def rows(x, w):
        return gshard.split(x, 0, 8) @ gshard.split(w, 1, 2)

    x, w = jax.ShapeDtypeStruct((60, 512), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
    found = gshard.search(rows, x, w, mesh={"data": 8}, machine="h100:1x8", progress=False, budget_seconds=1e-3)
    plan = gshard.export_plan(found)
    assert plan.in_shardings == (P(None, None), P(None, None))
    told = "\n".join(plan.less_split)
    assert "60 does not divide evenly" in told
    assert "split less than by the plan: " in str(plan)


def test_arrays_in_the_memory_of_the_host_stay_there():
    devices = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    on_host = jax.NamedSharding(devices, P("data"), memory_kind="pinned_host")

    def step(state, x):
        return jax.device_put(state, jax.memory.Space.Device) * 2 + x

    made = gshard.jit(step, mesh=devices, in_shardings=(on_host, P("data")))
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = gshard.export_plan(gshard.search(made, x, x, machine="h100:1x8", progress=False, budget_seconds=1e-3))
    ins, outs = plan.named(devices)
    assert [sharding.memory_kind for sharding in ins] == ["pinned_host", "device"]
    assert "in the memory of the host, with its memory kind in exported.named(mesh): state" in str(plan)
    state, given = jax.device_put(jnp.ones((64, 64)), ins[0]), jax.device_put(jnp.ones((64, 64)), ins[1])
    found = jax.jit(step, in_shardings=ins, out_shardings=outs)(state, given)
    np.testing.assert_array_equal(found, np.full((64, 64), 3.0))
    assert 'mhlo.memory_kind = "pinned_host"' in plan.stablehlo()


@pytest.mark.parametrize("kind", ["abstract", "Explicit"])
def test_meshes_without_devices_and_with_axes_of_type_explicit(kind):
    types = jax.sharding.AxisType
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(types.Auto,) * 2)
    if kind == "Explicit":
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(types.Explicit,) * 2)
    array = jax.ShapeDtypeStruct((64, 64), "float32")

    def product(w, x):
        return gshard.split(x, 1, "model") @ gshard.split(w, 0, "model")

    found = gshard.search(product, array, array, mesh=mesh, machine="h100:1x8", progress=False, budget_seconds=1e-3)
    plan = gshard.export_plan(found)
    assert plan.in_shardings == (P("model", None), P(None, "model"))
    assert ("axes of type Explicit" in str(plan)) == (kind == "Explicit")
    assert plan.compiled.total_bytes > 0


def test_rewrites_in_what_is_compiled_are_told():
    """The rows of a cross entropy are scattered in jax.jit's program, and not in that which gshard compiles."""

    def step(w, x, labels):
        def loss(w):
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1))

        return jax.grad(loss)(w)

    shapes = [jax.ShapeDtypeStruct((64, 512), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")]
    labels = jax.ShapeDtypeStruct((64,), "int32")
    found = gshard.search(
        step, *shapes, labels, mesh={"data": 8}, machine="h100:1x8", progress=False, budget_seconds=1e-3
    )
    assert "sum_of_scatter" in [fired.rewrite for fired in found.plan.program.fired]
    plan = gshard.export_plan(found)
    devices = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    ins, outs = plan.named(devices)
    compiled = jax.jit(step, in_shardings=ins, out_shardings=outs).lower(*shapes, labels).compile()
    sent = format_bytes(gshard.explain(compiled).total_bytes)
    told = next(line for line in str(plan).splitlines() if line.startswith("without gshard's rewrites (sum_of_scatter"))
    assert f"with the shardings alone: XLA sends {sent}, " in told


def test_references_are_refused():
    def counted(total, x):
        total[...] += x.sum()
        return x * 2

    total, x = jax.new_ref(jnp.zeros(())), jnp.ones((64, 64))
    found = gshard.search(counted, total, x, mesh={"data": 8}, machine="h100:1x8", progress=False, budget_seconds=1e-3)
    with pytest.raises(gshard.ArgumentError, match="no shardings for references"):
        gshard.export_plan(found)


def test_a_result_that_is_empty_and_none_among_arguments():
    def step(state, x):
        return {**state, "w": state["w"] * x.sum()}, None

    state = {"w": jax.ShapeDtypeStruct((64,), "float32"), "none": None, "empty": []}
    x = jax.ShapeDtypeStruct((0, 8), "float32")
    found = gshard.search(step, state, x, mesh={"data": 8}, machine="h100:1x8", progress=False, budget_seconds=1e-3)
    plan = gshard.export_plan(found)
    assert plan.in_shardings[0].keys() == state.keys()
    assert plan.jax_export().nr_devices == 8
