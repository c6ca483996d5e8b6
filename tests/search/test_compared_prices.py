"""What planning compares: prices of equations with ways of their own, estimates, plans; and how much is traced."""

import dataclasses
import functools
import importlib
import math

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

import gshard
from families import CASES, SMALL
from gshard.api.configure import estimated
from gshard.comm.reshard import axes_of
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import tables
from gshard.device.cost import cost
from gshard.device.machine import Machine
from gshard.device.network import interchangeable
from gshard.lowering import seconds as emitted
from gshard.lowering.pipeline import CHOOSE_WITHIN_LIMIT, Draft, Settings, run
from gshard.lowering.seconds import OwnWays, Seconds, emitted_alone, has_own_way, on_machine
from gshard.planning.strategies import components, splits
from gshard.rewrite import driver
from gshard.search.pricing import plans_of
from gshard.tracing.trace import trace
from sampled import crossed

MESH = Mesh.abstract(a=2, b=2, c=2)


def stencil(x):
    return x[1:-1, :, 2:] + jnp.pad(x, ((0, 0), (1, 2), (0, 0)))[1:-1, 1:-2, 2:] + jnp.cumsum(x, 1)[2:, :, :-2]


def program():
    return trace(stencil, jax.ShapeDtypeStruct((10, 8, 9), jnp.float32))


@pytest.mark.parametrize("name", ["h100", "h100:4x2"])
def test_axes_in_each_others_places_change_no_time(name):
    """All that is emitted, as if the split itself were traced."""
    machine = Machine.of(name, MESH.size)
    mesh = on_machine(MESH, machine)
    ways, compared = OwnWays(mesh, machine), 0
    with tables():
        for e in program().block.walk():
            own = [s for s in splits(e.rule, components(e.rule)[0], mesh, axes_of(mesh)) if has_own_way(e.rule, s)]
            for split in own[::8]:
                assert ways.of(e, split) == pytest.approx(emitted_alone(e, split, mesh, machine), rel=1e-12)
                compared += 1
    assert compared > 5


def test_axes_across_a_network_keep_their_places():
    assert interchangeable(MESH, Machine.of("h100:4x2")) == (("a", "b"), ("c",))
    assert all(len(alike) == 1 for alike in interchangeable(MESH, Machine.of("v5p", 8)))


def convolved(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def convolution():
    def step(x, w, d):
        return convolved(x, w), jax.vjp(lambda w: convolved(x, w), w)[1](d)[0]

    image, kernel = jax.ShapeDtypeStruct((2, 16, 16, 8), jnp.float32), jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)
    return trace(step, image, kernel, image)


@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_what_is_emitted_takes_no_less_than_is_assumed(name):
    machine, compared = Machine.of(name, MESH.size), 0
    mesh = on_machine(MESH, machine)
    costs = Seconds(mesh, machine, axes_of(mesh))
    with tables():
        for program_of in (program, convolution):
            for kernel, _ in costs.kernels(program_of().block):
                rule = kernel.equation.rule
                some = splits(rule, components(rule)[0], mesh, axes_of(mesh))[::14]
                own = [split for split in some if has_own_way(rule, split)]
                least = Seconds(mesh, machine, axes_of(mesh)).assuming().split_costs(kernel, own, math.inf)
                assert (costs.split_costs(kernel, own, math.inf) >= least * (1 - 1e-9)).all()
                compared += len(own)
    assert compared > 10


@pytest.mark.parametrize("mode", ["wrap", pytest.param("symmetric", marks=pytest.mark.slow)])
def test_few_ways_of_a_padding_are_traced(mode, monkeypatch):
    """Of some thousand ways to split the equations of one padding, on three axes."""
    traced = []

    def counted(*args):
        traced.append(args)
        return emitted_alone(*args)

    monkeypatch.setattr(emitted, "emitted_alone", counted)

    def padded(v, w):
        return jnp.pad(v, [(0, 2), (1, 0), (3, 2)], mode=mode), 2 * gshard.split(w, 0, ("b", "c"))

    shapes = jax.ShapeDtypeStruct((19, 9, 12), jnp.uint32), jax.ShapeDtypeStruct((16, 4), jnp.float32)
    machine = Machine.of("h100", MESH.size)
    with tables():
        found = plans_of(trace(padded, *shapes), on_machine(MESH, machine), machine)
        assert found[0].cost is not None
        assert len(traced) <= 12, "what is chosen splits nothing that has to be fetched"
        monkeypatch.setattr(of_propagate, "_ROUNDS", 0)  # every choice is priced
        assert len(plans_of(trace(padded, *shapes), on_machine(MESH, machine), machine)) == len(found)
    assert 0 < len(traced) <= 120
    assert len({(e.rule, tuple(sorted(split.items()))) for e, split, *_ in traced}) == len(traced)


ARRAY = jax.ShapeDtypeStruct


def products(w, x):
    return jnp.mean(jax.nn.relu(x @ w) @ w.T)


def attended(w, x):
    q = (x @ w).reshape(8, -1, 4, 64)
    return jax.nn.dot_product_attention(q, q, q).sum()


BOUNDED = {
    "products": products,
    "step": lambda w, x: w - 0.1 * jax.grad(products)(w, x),
    "looped": lambda w, x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0],
    "attended": attended,
}


@pytest.mark.parametrize(("name", "machine"), crossed(list(BOUNDED), ["h100:1x8", "v5e:2x4", "cpu:8"], one_in=4))
def test_no_plan_holds_less_than_the_least(name, machine):
    f = BOUNDED[name]
    w, x = ARRAY((256, 256), "float32"), ARRAY((512, 256), "float32")
    found = gshard.search(f, w, x, mesh=Mesh.abstract(a=2, b=4), machine=machine, progress=False)
    program = gshard.jit(f, mesh=Mesh.abstract(a=8)).lower(w, x).program
    *_, least_bytes = estimated(program, Mesh.abstract(a=8), Machine.of(machine), ())
    for plan in (found.best.chosen, *found.best.others):
        memory = plan.cost.memory
        assert memory.arguments + memory.results - memory.shared >= least_bytes * (1 - 1e-9)


def test_an_even_share():
    w, x = ARRAY((2048, 2048), "float32"), ARRAY((4096, 2048), "float32")
    program = gshard.jit(lambda w, x: x @ w, mesh=Mesh.abstract(a=8)).lower(w, x).program
    estimate = estimated(program, Mesh.abstract(a=8), Machine.of("h100:1x8"), ())
    alone = estimated(program, Mesh.abstract(a=1), Machine.of("h100:1x1"), ())
    assert estimate == pytest.approx([figure / 8 for figure in alone])
    assert estimate[1] == pytest.approx(4 * (2048**2 + 2 * 4096 * 2048) / 8)


def test_parts_for_one_device_have_no_least_bytes(rng):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    program = gshard.jit(part, mesh=mesh).lower(ARRAY((64, 8), "float32")).program
    *_, least_bytes = estimated(program, gshard.Mesh.of(mesh), Machine.of("cpu:8"), ())
    assert least_bytes == 0


MACHINE = Machine.of("h100:1x8")
DATA = gshard.Mesh.abstract(data=8)


def column_sums(x, w, *, x_split):
    x = gshard.split(x, 0, "data") if x_split else gshard.replicate(x)
    return jnp.tanh(x @ gshard.replicate(w)).sum(0)


@functools.cache
def priced(*, x_split):
    arguments = ShapeDtypeStruct((65536, 256), "float32"), ShapeDtypeStruct((256, 256), "float32")
    program = gshard.stages.trace(functools.partial(column_sums, x_split=x_split), *arguments)
    planned = plans_of(program, DATA, MACHINE)[0]
    spmd = gshard.stages.partition(planned.plan)
    return dataclasses.replace(planned, spmd=spmd, cost=cost(spmd, MACHINE))


def changed(planned, *, seconds=1.0, memory=1.0, room=1.0):
    """A plan with other seconds, bytes at the peak and bytes of the machine's memory, as ratios."""
    kernels = tuple(dataclasses.replace(k, seconds=k.seconds * seconds) for k in planned.cost.kernels)
    machine = dataclasses.replace(MACHINE, memory=int(planned.cost.peak * room))
    made = dataclasses.replace(planned.cost, kernels=kernels, machine=machine)
    more = int(made.memory.peak * (memory - 1))
    made.__dict__["memory"] = dataclasses.replace(made.memory, temporaries=made.memory.temporaries + more)  # cached
    return dataclasses.replace(planned, cost=made)


@pytest.mark.parametrize(("room", "ratios", "is_better"), [
    (2.0, {"seconds": 0.97}, True), (2.0, {"seconds": 0.99}, False),
    (2.0, {"seconds": 0.99, "memory": 0.9}, True), (2.0, {"seconds": 1.0, "memory": 0.9}, True),
    (2.0, {"seconds": 1.01, "memory": 0.5}, False),  # time is not spent to save memory while all fits
    (2.0, {"seconds": 0.97, "memory": 1.5}, True),
    (2.0, {"seconds": 0.9, "memory": 3.0}, False),  # does not fit
    # Of plans that do not fit, the smaller one is better.
    (0.5, {"seconds": 2.0, "memory": 0.9}, True), (0.5, {"seconds": 0.5, "memory": 0.99}, False),
    (0.5, {"seconds": 2.0, "memory": 0.4}, True),
])  # fmt: skip
def test_a_plan_is_better_if_it_saves_time_or_memory(room, ratios, is_better):
    kept = changed(priced(x_split=True), room=room)
    assert changed(priced(x_split=True), room=room, **ratios).is_better(kept) is is_better


def test_a_limit_is_kept_by_the_plan_that_is_fastest_within_it():
    fast, small = changed(priced(x_split=False), seconds=1e-3), priced(x_split=True)
    assert small.cost.peak < fast.cost.memory.arguments, "which cannot be recomputed"

    def first(limit):
        settings = Settings(DATA, MACHINE, memory_limit=int(limit), recomputes=True)
        return run((CHOOSE_WITHIN_LIMIT,), Draft(plans=(fast, small)), settings).best

    assert first(fast.cost.peak) is fast, "it fits"
    assert first(small.cost.peak) is small, "the other one does not fit, whatever it recomputes"
    assert first(1) is fast, "neither fits; the error is that of the first plan"


of_propagate = importlib.import_module("gshard.planning.propagate")


def counting(monkeypatch, module, name):
    original, calls = getattr(module, name), list[None]()

    def counted(*args, **options):
        calls.append(None)
        return original(*args, **options)

    monkeypatch.setattr(module, name, counted)
    return calls


@pytest.mark.parametrize("name", [
    "windows/convolution_two_axes", "vocabulary/tied",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "windows/convolution_two_axes'", "small/unet_both_step", "small/lstm_both_step", "small/graphs_both_step",
    )),
])  # fmt: skip
def test_few_choices_are_traced_and_the_best_is_the_best_of_all(name, monkeypatch):
    """What has to be traced to be priced is assumed to take little until it is chosen.

    The plan costs what the best one costs if every choice is priced first. That takes several times as many traces, and
    few rewrites in each: some fired a thousand times, since what had been composed was composed again.
    """
    case = {**CASES, **SMALL}[name]
    program = trace(case.function, *case.arguments)
    fired, alone = (counting(monkeypatch, *what) for what in ((driver, "recorded"), (emitted, "emitted_alone")))
    chosen, decided = list[float](), of_propagate.decided

    def noted(graph, states, propagated):
        chosen.append(graph.problem.value(states))
        return decided(graph, states, propagated)

    monkeypatch.setattr(of_propagate, "decided", noted)
    mesh = Mesh.abstract(**case.mesh)
    costs, traced = [], []
    with tables():
        for rounds in (of_propagate._ROUNDS, 0):  # without rounds every choice is priced first
            monkeypatch.setattr(of_propagate, "_ROUNDS", rounds)
            plans_of(program, mesh, Machine.of("h100", mesh.size))
            traced.append(len(alone))
            costs.append(sorted(chosen))
            chosen.clear()
    assert len(costs[0]) == 3
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)
    assert 2 * traced[0] <= traced[1]
    assert len(fired) <= 3 * (len(alone) + 3), "some in each of them, and in the programs of three plans"
