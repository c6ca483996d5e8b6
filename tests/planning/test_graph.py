"""The problem of a program: what it says a plan takes is what the plan takes, and its best is the best there is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from every_choice import every_choice
from families import CASES
from gshard.comm.reshard import axes_of
from gshard.comm.steps import KINDS
from gshard.core.program import Value
from gshard.device.cost import cost, kernel_cost
from gshard.device.fusion_model import REGION
from gshard.device.machine import Machine
from gshard.device.roofline import copy_seconds
from gshard.emit.partition import partition
from gshard.lowering.seconds import Seconds
from gshard.planning.choices import graph_of
from gshard.planning.saved_plan import plan_of
from gshard.planning.strategies import components
from gshard.search.find import best_plan
from search.test_search import shape, slow

FOUR, EIGHT = gshard.Mesh.abstract(x=2, y=4), gshard.Mesh.abstract(x=8)
PREDICTED = (
    "layers/mlp_data", "layers/attention_data", "training/clipped_gradients", "contractions/cube",
    "statistics/extremes", "moves/reshape_across", "windows/convolution_grouped", "loops/tied_fsdp",
)  # fmt: skip


@pytest.mark.parametrize("name", PREDICTED)
@pytest.mark.one_in(3)
def test_the_time_of_a_plan_is_predicted(name):
    case = CASES[name]
    lowered = gshard.jit(case.function, mesh=case.jax_mesh).lower(*case.arguments)
    found = best_plan(lowered.program, lowered.mesh, slow())
    priced, alone = found.searched.cost, each_by_itself(found.searched.cost, lowered.mesh)
    # The search counts the copy of what was exchanged also where what reads it takes it as it lies.
    exchanged = [k.writes[0] for k, _ in priced.program.walk() if KINDS.get(k.equation.name) == "all_to_all"]
    copies = sum(copy_seconds(priced.machine, v.bytes) for v in exchanged)
    assert found.solution.value / alone >= 0.95
    assert found.solution.value / (alone + copies) <= 1.05
    assert not copies or name == "moves/reshape_across"


def each_by_itself(found, mesh):
    """The seconds of a program in which no message is shared, and nothing copied.

    The search knows nothing of these: they show when a plan is a program.
    """
    alone = {"copied": (), "slices": (), "joined": 0}
    kernels = [(dataclasses.replace(k, **alone), times) for k, times in found.program.walk() if k.kind != REGION]
    return sum(kernel_cost(kernel, times, mesh, found.machine).total_seconds for kernel, times in kernels)


def convolved(size):
    """The squares of two convolutions of one image, with kernels of 3 and of ``size`` rows, and their gradients."""

    def f(image, a, b):
        dims = ("NHWC", "HWIO", "NHWC")
        made = [jax.lax.conv_general_dilated(image, w, (1, 1), "SAME", dimension_numbers=dims) for w in (a, b)]
        return sum(jnp.sum(x * x) for x in made)

    return jax.value_and_grad(f, argnums=(1, 2))


SMALL = {
    "product": (lambda x, w: jnp.tanh(x @ w), (shape(2048, 1024), shape(1024, 4096))),
    "two": (lambda x, a, b: jax.nn.relu(x @ a) @ b, (shape(8, 2048), shape(2048, 8192), shape(8192, 2048))),
    "turned": (lambda x, w: (x.T @ w).sum(0) * 2, (shape(4096, 2048), shape(4096, 1024))),
    "attended": (
        lambda q, k: (scores := jnp.exp(q @ k.T)) / scores.sum(-1, keepdims=True), (shape(1024, 512), shape(8192, 512))
    ),
    "looked_up": (
        lambda table, ids: jnp.take(table, ids, axis=0).reshape(16, -1),
        (shape(65536, 512), shape(16, 512, dtype=jnp.int32)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [n if n == "product" else pytest.param(n, marks=pytest.mark.slow) for n in SMALL])
def test_no_plan_is_better(name):
    """All choices of a sharding for every group are planned, partitioned and priced."""
    f, arguments = SMALL[name]
    mesh, machine = gshard.Mesh.abstract(x=4), Machine.of("h100:1x4")
    program = gshard.stages.trace(f, *arguments)
    graph, least = graph_of(program, Seconds(mesh, machine, axes_of(mesh))), np.inf
    for chosen in every_choice(graph):
        plan = plan_of(program, graph.mesh, graph.shardings(chosen), graph.splits(chosen), *graph.moved(chosen))
        least = min(least, cost(partition(plan), machine).seconds)
    best = best_plan(program, mesh, machine)
    assert best.searched.cost.seconds <= least * 1.01
    assert best.gap < 1e-6


def test_a_value_is_gathered_once_for_products_and_the_sum_of_them():
    """Both products read all rows of ``x``, and what they are added to is to be cut."""

    def f(a):
        x = jnp.tanh(a).T
        return gshard.split(x @ a @ x + x, 0, 2)

    step = gshard.jit(f, mesh=gshard.Mesh.abstract(d=2), in_shardings=P(None, "d"))
    sent = sum(c.total_bytes for c in step.lower(shape(256, 512)).spmd.collectives)
    assert sent == 256 * 512 * 4 // 2


def test_sums_are_combined_before_they_are_widened():
    """Two products with weights split along what is summed, and a normalization in float32: one reduce-scatter."""

    def f(a, b, v, w):
        a, b = (gshard.shard(x, P(None, "d")) for x in (a, b))
        wide = (a @ v + b @ w).astype(jnp.float32)
        return gshard.split(wide * jnp.mean(wide, axis=-1, keepdims=True), 0, "d")

    arrays = [jax.ShapeDtypeStruct(dims, "bfloat16") for dims in ((64, 256), (64, 256), (256, 128), (256, 128))]
    step = gshard.jit(f, mesh=gshard.Mesh.abstract(d=8), in_shardings=(P(None, "d"),) * 2 + (P("d"),) * 2)
    (sent,) = step.lower(*arrays).spmd.collectives
    assert (sent.kind, sent.total_bytes) == ("reduce_scatter", 64 * 128 * 2 * 7 // 8)


def test_a_loop_counts_as_often_as_it_runs():
    once = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    often = lambda x, w: jax.lax.fori_loop(0, 12, lambda _, x: once(x, w), x)  # noqa: E731
    one, twelve = (best_plan(gshard.stages.trace(f, *[shape(32, 32)] * 2), FOUR, slow()) for f in (once, often))
    assert 8 < twelve.solution.value / one.solution.value < 14
    assert twelve.solution.value / twelve.searched.cost.seconds == pytest.approx(1, abs=0.1)


def layered(weights, x):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w[0]) @ w[1], None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


LAYERED = (shape(6, 1024, 4096), shape(6, 4096, 1024)), shape(512, 1024)


def test_each_operand_of_a_barrier_is_split_for_itself():
    """What is recomputed in the backward pass goes through one barrier, weights and activations together."""
    program = gshard.stages.trace(jax.grad(layered), *LAYERED)
    barrier = next(e for e in program.block.walk() if e.rule is not None and e.rule.passes and len(e.inputs) > 2)
    found = components(barrier.rule)
    assert [(component.operands, component.results) for component in found] == [
        ((i,), (i,)) for i in range(len(barrier.inputs))
    ]
    machine = slow()
    best = best_plan(program, EIGHT, machine)
    split = [v for v in barrier.inputs if isinstance(v, Value) and best.searched.plan.shardings[v].atoms]
    assert len(split) > 1, "one axis splits several of its operands"
    assert best.searched.cost.seconds <= 1.001 * min(o.cost.seconds for o in best.others)


@pytest.mark.parametrize("limit", [None, 0.9])
def test_what_a_loop_holds_is_known(limit):
    """Stacks that are gathered before a loop, and those that it makes, are there while it runs."""
    program = gshard.stages.trace(jax.grad(layered), *LAYERED)
    machine = Machine.of("h100:1x8")
    free = best_plan(program, EIGHT, machine)
    best = free if limit is None else best_plan(program, EIGHT, machine, memory_limit=limit * free.searched.kept)
    assert best.fits
    assert best.solution.peak == pytest.approx(best.searched.kept, rel=0.15)
