"""A search tries pipelines over the layers of a program; what it finds runs, and is written as marks."""

import dataclasses
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.core.errors import ShardingError
from gshard.device.machine import Machine
from gshard.planning.layer_stacks import schedules_of
from search.test_statements import write_statements
from training_files import loaded

SOURCE = """
import jax
import jax.numpy as jnp


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def loss(params, x, y):
    h, _ = jax.lax.scan(jax.checkpoint(layer), x @ params["first"], params["layers"])
    return ((h - y) ** 2).mean()


@jax.jit
def step(state, x, y):
    params, moments = state
    value, gradient = jax.value_and_grad(loss)(params, x, y)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, params, moments), moments), value
"""
LAYERS, UNITS, HIDDEN, ROWS = 8, 64, 128, 64
RNG = np.random.default_rng(5)


def normal(*shape):
    return (RNG.standard_normal(shape) / 8).astype(np.float32)


def arguments():
    params = {
        "first": normal(UNITS, UNITS),
        "layers": {"up": normal(LAYERS, UNITS, HIDDEN), "down": normal(LAYERS, HIDDEN, UNITS)},
    }
    return (params, jax.tree.map(np.zeros_like, params)), normal(ROWS, UNITS), normal(ROWS, UNITS)


ARGUMENTS = arguments()


def slow_network():
    """Eight H100 on links with a thousandth of the bandwidth, without launches, which hold a third of the state."""
    machine = Machine.of("h100:8x1", 8)
    network = tuple(dataclasses.replace(d, bandwidth=d.bandwidth / 1000, latency=1e-7) for d in machine.network)
    return dataclasses.replace(machine, network=network, launch=1e-9, memory=3 * 2**19)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(SOURCE)
    return loaded(path, "pipelined_model").step


@pytest.fixture(scope="module")
def found(step):
    return gshard.search(
        gshard.jit(step.__wrapped__, mesh={"data": 2, "model": 4}, donate_argnums=0), *ARGUMENTS,
        machine=slow_network(), progress=False,
    )  # fmt: skip


def searched(f, *args, mesh=None, machine=None, **options):
    mesh = gshard.Mesh.abstract(stage=8) if mesh is None else mesh
    machine = slow_network() if machine is None else machine
    return gshard.search(f, *args, mesh=mesh, machine=machine, progress=False, **options)


def check_steps(run, step, arguments):
    state, expected = (jax.tree.map(jnp.asarray, arguments[0]) for _ in range(2))
    for _ in range(3):
        state, value = run(state, *arguments[1:])
        expected, expected_value = step(expected, *arguments[1:])
        np.testing.assert_allclose(value, expected_value, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state, expected)
    return state


def test_rounds_are_tried_and_run(step):
    """Few rows, so that the bubble is large, and slow products."""
    machine = Machine.of("h100:4x1", 4)
    network = tuple(dataclasses.replace(d, bandwidth=d.bandwidth / 1000, latency=1e-9) for d in machine.network)
    flops = {dtype: flops / 1e5 for dtype, flops in machine.flops.items()}
    machine = dataclasses.replace(machine, network=network, launch=1e-9, flops=flops)
    arguments = ARGUMENTS[0], ARGUMENTS[1][:8], ARGUMENTS[2][:8]
    found = gshard.search(
        gshard.jit(step.__wrapped__, mesh={"stage": 4}, donate_argnums=0), *arguments, machine=machine, progress=False
    )
    assert found.best.chosen.name == "pipeline over stage, 8 micro-batches"
    (other,) = [other for other in found.best.others if "2 rounds" in other.name]
    of_rounds, of_one = other.cost.by_bound, found.cost.by_bound
    assert of_rounds["compute"] < 0.9 * of_one["compute"]  # 19 turns of one layer instead of 11 of two
    assert of_rounds["network"] > of_one["network"]  # the weights move to their stages
    check_steps(gshard.jit(step.__wrapped__, mesh=found.mesh, plan=other.plan, donate_argnums=0), step, arguments)


def test_a_pipeline_is_found_and_runs(step, found, tmp_path):
    assert found.best.chosen.name.startswith("pipeline over ")
    others = [
        other.cost.seconds
        for other in found.best.others
        if "pipeline" not in other.name and other.cost.peak <= found.best.limit
    ]
    assert found.cost.seconds < 0.8 * min([*others, found.best.searched.cost.seconds])
    assert found.gap is None
    assert found.plan.program.pipelines
    found.save(tmp_path / "plan.json")
    for plan in (found.plan, gshard.SavedPlan.load(tmp_path / "plan.json")):
        run = gshard.jit(step.__wrapped__, mesh=found.mesh, plan=plan, donate_argnums=0)
        state = check_steps(run, step, ARGUMENTS)
        text = gshard.explain(run, *ARGUMENTS).format(tensors=0)
        assert "loops that run as pipelines" in text
        layers = state[0]["layers"]["up"].sharding
        assert layers.shard_shape((LAYERS, UNITS, HIDDEN))[0] < LAYERS


def test_a_plan_with_a_pipeline_is_for_its_program_only(found, step):
    run = gshard.jit(lambda s, x, y: step.__wrapped__(s, 2 * x, y), mesh=found.mesh, plan=found.plan)
    with pytest.raises(gshard.PlanError, match="is not the program"):
        run(*ARGUMENTS)


def test_where_no_pipeline_is_planned(step):
    def marked(state, x, y):
        return step.__wrapped__(gshard.pipeline(state, "stage", micro_batches=2, paths="0/layers"), x, y)

    def mixed(layers, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh((x - x.mean(0)) @ w), None), x, layers)[0]

    launches = dataclasses.replace(Machine.of("h100:1x8", 8), launch=1e-3)  # and little else, repeated in each turn
    kept = searched(marked, *ARGUMENTS)
    assert "2 micro-batches" in kept.plan.program.pipelines[0], "the user's pipeline is kept"
    none = searched(step.__wrapped__, *ARGUMENTS, machine=launches), searched(mixed, normal(8, 16, 16), normal(32, 16))
    for found in (kept, *none):
        assert not any("pipeline" in other.name for other in found.best.others)


def test_paths_choose_the_stacks():
    params, x = ARGUMENTS[0][0], ARGUMENTS[1]
    layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
    by_paths = lambda p: gshard.pipeline(p, "stage", micro_batches=4, paths=["layers/*"])["layers"]  # noqa: E731
    by_hand = lambda p: gshard.pipeline(p["layers"], "stage", micro_batches=4)  # noqa: E731
    plans = [
        gshard.explain(lambda p, x, f=f: jax.lax.scan(layer, x, f(p))[0], params, x, mesh=gshard.Mesh.abstract(stage=4))
        for f in (by_paths, by_hand)
    ]
    assert plans[0].total_bytes == plans[1].total_bytes > 0
    assert plans[0].plan.program.pipelines
    with pytest.raises(ShardingError, match="'layrs' matches no path"):
        gshard.pipeline(params, "stage", micro_batches=4, paths="layrs")
    with pytest.raises(ShardingError, match="one dimension of layers"):
        gshard.pipeline(params, "stage", micro_batches=4, paths=["first", "layers"])


def test_the_statements_have_the_pipeline(found, step):
    """At the end, since it changes the file."""
    path = Path(inspect.getsourcefile(step.__wrapped__))
    (schedule,) = set(schedules_of(found.plan.program).values())
    assert f"with {schedule} for its layers" in str(found.marks)
    write_statements(path, "step", found.marks)
    assert 'paths=["0/layers/down", "0/layers/up"])' in path.read_text()
    patched = gshard.jit(loaded(path, "model_patched").step.__wrapped__, mesh=dict(found.mesh.axes), donate_argnums=0)
    machine = slow_network()
    cost = gshard.explain(patched.on(found.mesh), *ARGUMENTS, machine=machine).cost(machine)
    assert cost.seconds == pytest.approx(found.cost.seconds, rel=0.02)
    np.testing.assert_allclose(patched(*ARGUMENTS)[1], step(*ARGUMENTS)[1], rtol=1e-5)
