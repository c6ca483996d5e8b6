"""``gshard.search``: its plans are right, no worse than those of people, keep marks and memory, always the same."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from families import CASES
from gshard.device.cost import cost
from gshard.device.machine import Machine
from gshard.search.find import best_plan
from gshard.testing import assert_proved

f32 = jnp.float32
ONE_OF_EACH = (
    "layers/mlp_data", "training/clipped_gradients", "vocabulary/embedding_of_batch'", "contractions/uneven_sum",
    "statistics/extremes", "moves/pad'", "order/cholesky_beside", "indexing/segment_sum",
    "windows/convolution_grouped", "loops/tied_fsdp",
)  # fmt: skip


def slow():
    """A machine on which work takes so long, and messages so little, that it pays to split everything."""
    cpu = Machine.of("cpu:8")
    network = tuple(dataclasses.replace(d, latency=1e-7, bandwidth=1e9) for d in cpu.network)
    rates = {dtype: rate / 1e4 for dtype, rate in cpu.flops.items()}
    return dataclasses.replace(
        cpu, name="slow", flops=rates, vector_flops=5e5, memory_bandwidth=1e7, launch=0.0, network=network
    )


def shape(*sizes, dtype=f32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def residual(x, weights, marked=False):
    for a, b in weights:
        if marked:
            a, b = gshard.split(a, 1, 8), gshard.split(b, 0, 8)
        x = x + jax.nn.relu(x @ a) @ b
    return x


def trained(marked):
    def step(weights, x):
        gradients = jax.grad(lambda w: jnp.mean(residual(x, w, marked) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


RESIDUAL = ([(shape(2048, 8192), shape(8192, 2048)) for _ in range(3)], shape(4, 2048))


EVERY = [name if name in ONE_OF_EACH else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.one_in(3)
def test_a_plan_that_was_found_computes_the_same(name):
    case = CASES[name]
    found = gshard.search(case.function, *case.arguments, mesh=case.jax_mesh, machine=slow())
    assert_proved(gshard.jit(case.function, mesh=found.mesh, plan=found.best.searched.plan), case.arguments)
    assert found.cost.seconds <= min(other.cost.seconds for other in found.best.others) * (1 + 1e-12)  # sums, rounded
    assert found.best.solution.value >= found.bound * (1 - 1e-9)
    assert found.gap is None or found.gap >= 0


EIGHT, H100 = gshard.Mesh.abstract(devices=8), Machine.of("h100:1x8")


def donated(step):
    return jax.jit(step, donate_argnums=0)


@functools.cache
def free():
    return gshard.search(donated(trained(False)), *RESIDUAL, mesh=EIGHT, machine=H100)


def cost_of(jitted, *args):
    lowered = jitted.lower(*args)
    return cost(lowered.spmd, H100, lowered.donated)


def test_megatron_is_found_without_a_mark():
    """Shoeybi et al. 2019: columns of the first product, rows of the second, one all-reduce a layer and direction."""
    found, by_hand = free(), cost_of(gshard.jit(trained(True), mesh=EIGHT, donate_argnums=0), *RESIDUAL)
    assert found.cost.seconds <= by_hand.seconds * 1.0001
    assert found.cost.sent <= by_hand.sent
    assert found.gap < 1e-6
    assert abs(found.best.predicted / found.cost.seconds - 1) < 0.1


def test_loops_are_searched_too():
    def stack(weights, x):
        return jax.lax.scan(lambda x, w: (x + jax.nn.relu(x @ w[0]) @ w[1], None), x, weights)[0]

    weights = (shape(6, 2048, 8192), shape(6, 8192, 2048))
    found = gshard.search(stack, weights, shape(4, 2048), mesh=EIGHT, machine=H100)
    a, b, _ = found.plan.program.block.inputs
    assert [found.plan.format(v) for v in (a, b)] == ["f32[6,2048,8192@devices]", "f32[6,8192@devices,2048]"]
    assert [(k.name, k.times) for k in found.cost.kernels if k.kind == "collective"] == [("all_reduce", 6)]


def test_memory_is_kept_to():
    """What does not fit is split, as ZeRO (Rajbhandari et al. 2020) does by hand."""

    def step(state, x):
        weights, momentum = state
        gradients = jax.grad(lambda w: jnp.mean(residual(x, w) ** 2))(weights)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum

    weights = [(shape(1024, 4096), shape(4096, 1024))]
    arguments = ((weights, weights), shape(8192, 1024))
    marked = gshard.jit(lambda s, x: step(s, gshard.split(x, 0, 8)), mesh=EIGHT, donate_argnums=0)
    data_parallel = cost_of(marked, *arguments)
    limit = int(data_parallel.peak * 0.55)
    least, found, nothing = (
        gshard.search(donated(step), *arguments, mesh=EIGHT, machine=H100, memory_limit=n)
        for n in (None, limit, 1 << 20)
    )
    assert found.best.fits
    assert found.cost.peak <= limit < data_parallel.peak
    assert found.cost.seconds >= least.cost.seconds * 0.9999
    assert not nothing.best.fits
    assert "DOES NOT FIT" in str(nothing)


def test_marks_are_kept_and_what_they_cost_is_seen():
    def marked(weights, x):
        (a, b), *rest = weights
        return trained(False)([(gshard.split(a, 0, 8), b), *rest], x)

    found = gshard.search(donated(marked), *RESIDUAL, mesh=EIGHT, machine=H100)
    (mark,) = [e for e in found.plan.program.block.walk() if e.mark is not None]
    assert found.plan.format(mark.outputs[0]) == "f32[2048@devices,8192]"
    assert found.cost.seconds > free().cost.seconds * 1.01
    pinned = gshard.jit(trained(False), mesh=EIGHT, in_shardings=([(P("devices"), None)] + [None] * 2, None))
    again = gshard.search(pinned, *RESIDUAL, machine=H100)
    assert again.plan.format(again.plan.program.block.inputs[0]) == "f32[2048@devices,8192]"


def test_a_number_of_devices_tries_all_shapes_of_the_mesh_and_a_list_those_that_are_given():
    heard = []
    found = gshard.search(donated(trained(False)), *RESIDUAL, mesh=8, machine="h100:1x8", progress=heard.append)
    better = [line.partition("best so far: ")[2] for line in heard if "best so far" in line]
    assert str(found.best.chosen.cost) in better[-1], "progress reports each better plan"
    sizes = [tuple(dict(best.mesh.axes).items()) for best in found.tried]
    assert sizes == [(("data", 8),), (("data", 2), ("model", 4)), (("data", 4), ("model", 2))]
    assert found.cost.seconds == min(best.chosen.cost.seconds for best in found.tried)
    assert "mesh (data=2, model=4):" in str(found) or "mesh (data=8):" in str(found)
    given = [gshard.Mesh.abstract(a=8), gshard.Mesh.abstract(a=2, b=4)]
    found = gshard.search(small, shape(64, 64), shape(64, 64), mesh=given, machine="h100:1x8")
    assert {best.mesh for best in found.tried} == set(given)
    with pytest.raises(gshard.MeshError, match="one size"):
        gshard.search(small, shape(8, 8), shape(8, 8), mesh=[*given, gshard.Mesh.abstract(a=4)], machine="h100:1x8")


def test_a_plan_is_said_in_few_marks_that_were_tried():
    """One mark on the first weights of each layer is all that Megatron's plan needs."""
    found = free()
    (mark,) = found.marks.marks
    assert (mark.text, mark.at) == ("gshard.shard(x, P(None, 'devices'))", "f32[2048,8192] of weights/*/0")
    assert mark.values == 3
    specs = [(P(None, "devices"), None)] * 3, None
    written = gshard.jit(trained(False), mesh=EIGHT, in_shardings=specs, donate_argnums=0, machine="h100:1x8")
    assert cost_of(written, *RESIDUAL).seconds == pytest.approx(found.marks.seconds, rel=1e-9)
    assert found.marks.seconds <= found.cost.seconds * 1.01
    assert found.marks.without - mark.saved == pytest.approx(found.marks.seconds)
    assert "as the plan" in str(found.marks)


def small(w, x):
    return jnp.tanh(x @ w)


def test_a_saved_plan_runs_in_another_trace_and_refuses_another_program(tmp_path):
    w, x = np.ones((64, 32), np.float32), np.ones((16, 64), np.float32)
    found = gshard.search(small, w, x, mesh=8, machine=slow())
    found.save(tmp_path / "plan.json")
    plan = gshard.SavedPlan.load(tmp_path / "plan.json")
    assert plan == gshard.SavedPlan.of(found.plan)
    run = gshard.jit(small, mesh=found.mesh, plan=plan)
    np.testing.assert_allclose(run(w, x), small(w, x), rtol=1e-6)
    lowered = run.lower(w, x)
    assert list(lowered.plan.shardings.values()) == list(found.plan.shardings.values())
    with pytest.raises(gshard.PlanError, match=r"(?s)is not the program.*-.*tanh.*Search again"):
        gshard.jit(lambda w, x: jnp.sin(x @ w), mesh=found.mesh, plan=plan).lower(w, x)
    with pytest.raises(gshard.MeshError, match=r"(?s)another mesh.*devices"):
        gshard.jit(small, mesh=8, plan=plan).on({"devices": 8})(w, x)
    with pytest.raises(gshard.PlanError, match=r"(?s)- .*f32\[64,32\].*\+ .*f32\[64,48\]"):  # what differs is shown
        gshard.jit(small, mesh=found.mesh, plan=plan)(np.ones((64, 48), np.float32), x)
    cut = dataclasses.replace(plan, shardings=plan.shardings[:-1])
    with pytest.raises(gshard.PlanError, match="the plan is not whole"):
        gshard.jit(small, mesh=found.mesh, plan=cut)(w, x)
    for wrong in (str(tmp_path / "plan.json"), found):
        with pytest.raises(gshard.PlanError, match=r"(?s)plan= takes a plan.*found\.plan.*SavedPlan\.load"):
            gshard.jit(small, mesh=found.mesh, plan=wrong)
    for text, why in (("{}", "it has no 'format'"), ("[1]", "it is other JSON"), ("{", "Expecting property name")):
        (tmp_path / "none.json").write_text(text)
        with pytest.raises(gshard.PlanError, match=rf"none\.json cannot be read as a plan: {why}"):
            gshard.SavedPlan.load(tmp_path / "none.json")


def test_products_become_collective_matmuls_where_nothing_else_fits(tmp_path):
    def f(a, b):
        return gshard.split(a @ b, 0, 8)

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, s).astype(np.float32) for s in ((256, 512), (512, 512)))
    step = gshard.jit(f, mesh=8, machine="h100:1x8", in_shardings=(P("devices"), P("devices")))
    at_once = gshard.search(step, a, b)
    assert not at_once.plan.rings
    found = gshard.search(step, a, b, memory_limit=at_once.cost.peak // 2)
    assert len(found.plan.rings) == 1
    assert found.best.fits
    assert found.cost.sent <= at_once.cost.sent
    assert not gshard.search(step, a, b, memory_limit=at_once.cost.peak // 4).best.fits
    found.save(tmp_path / "plan.json")
    plan = gshard.SavedPlan.load(tmp_path / "plan.json")
    assert plan == gshard.SavedPlan.of(found.plan)
    run = gshard.jit(f, mesh=8, in_shardings=(P("devices"), P("devices")), plan=plan)
    np.testing.assert_array_equal(run(a, b), a @ b)
    kinds = gshard.explain(run, a, b).bytes_by_kind
    assert max(kinds, key=lambda kind: kinds[kind]) == "collective_permute"


def test_jit_searches_once_for_a_kind_of_calls(monkeypatch):
    searched = []

    def counted(program, *args, **kwargs):
        searched.append(program.name)
        return best_plan(program, *args, **kwargs)

    monkeypatch.setattr(sys.modules["gshard.search.find"], "best_plan", counted)

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)

    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s).astype(np.float32) for s in ((32, 64), (16, 32)))
    run = gshard.jit(step, mesh={"data": 2, "model": 4}, machine=slow(), search=True, donate_argnums=0)
    state = w
    for _ in range(3):  # the state comes back sharded as the plan has it
        expected = jax.jit(step)(state, x)
        state = run(state, x)
        np.testing.assert_allclose(state, expected, rtol=1e-5, atol=1e-6)
    assert searched == ["step"]
    found = gshard.search(donated(step), w, x, mesh={"data": 2, "model": 4}, machine=slow())
    assert list(run.lower(w, x).plan.shardings.values()) == list(found.plan.shardings.values())
    assert not state.sharding.is_fully_replicated
    inside = jax.jit(lambda w: run(w, x).sum())
    np.testing.assert_allclose(inside(w), jax.jit(step)(w, x).sum(), rtol=1e-4)
    assert len(searched) > 1, "inside of another program too"


def test_what_is_wrong_is_told():
    with pytest.raises(gshard.stages.MachineError, match="4 devices, and the mesh has 8"):
        gshard.search(small, shape(8, 8), shape(8, 8), mesh=gshard.Mesh.abstract(x=8), machine="h100:1x4")
    for wrong in (0, -1.0, "60"):
        with pytest.raises(gshard.ArgumentError, match="is no time to search for"):
            gshard.search(small, shape(8, 8), shape(8, 8), mesh=8, budget_seconds=wrong)
    with pytest.raises(gshard.MeshError, match="no mesh was given"):
        gshard.search(small, shape(8, 8), shape(8, 8))


def test_marked_plans_are_priced_as_they_run():
    """A state that came sharded leaves as it came, which takes a move where the step would make it otherwise."""
    weights = [(shape(1024, 4096), shape(4096, 1024))], shape(4096, 1024)
    given = [(P(None, "model"), P("model", None))], P(None, "data")
    mesh = gshard.Mesh.abstract(data=2, model=4)
    pinned = gshard.jit(trained(False), mesh=mesh, machine=H100, in_shardings=given, donate_argnums=0)
    found = gshard.search(pinned, *weights)
    (marked,) = [other for other in found.best.others if other.name == "as it is marked"]
    assert marked.cost.seconds == cost_of(pinned, *weights).seconds
