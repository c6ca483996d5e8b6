"""What steps take on a machine: bounds that the search for ways relies on."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near_largest
from device.models import f32
from families import CASES
from gshard.comm.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Step
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.device.cost import cost
from gshard.device.fusion_model import as_compiled, kernels_of
from gshard.device.machine import COMPILERS, Machine
from gshard.device.network import StepTimes, seconds
from gshard.device.roofline import copy_seconds
from gshard.emit.partition import partition
from gshard.lowering.seconds import on_machine, seconds_on
from gshard.planning.propagate import propagate
from gshard.search.pricing import plans_of
from gshard.tracing.trace import trace
from loop_slices import (
    backwards,
    both_ways,
    copies_and_fills,
    elementwise,
    gradient,
    kept_carry,
    kept_products,
    layers,
    nested,
)

MACHINES = ["v5e:2x4", "v3:4x2", "h100:2x8", "cpu:8"]


@pytest.mark.parametrize("named", MACHINES)
def test_steps_take_what_they_copy_and_what_they_make_a_message_longer(named):
    machine = Machine.of(named)
    mesh = Mesh.abstract(d=machine.size)
    times, joined = StepTimes(machine), StepTimes(machine, joined=True)
    shape, n = (256, 512), mesh.size
    whole, local = Sharding(((), ())), 4 * 256 * 512 // n

    def taken(step, of=times):
        return of.seconds(step, shape, 4, mesh)

    rows, columns = Sharding((mesh.atoms, ())), Sharding(((), mesh.atoms))
    gathers = [Step(ALL_GATHER, mesh.atoms, cut, whole, d) for d, cut in enumerate((rows, columns))]
    copies = 0.0
    if machine.compiler.copies_for_collectives:
        whole_copy = 0.0 if machine.compiler.products_take_layouts else copy_seconds(machine, local * n)
        copies = copy_seconds(machine, local) + whole_copy
    assert taken(gathers[1]) - taken(gathers[0]) >= copies * (1 - 1e-9)
    sums, largest = (
        Step(ALL_REDUCE, mesh.atoms, whole.with_unreduced(dict.fromkeys(mesh.atoms, monoid)), whole, monoid=monoid)
        for monoid in ("add", "max")
    )
    assert taken(largest) - taken(sums) == pytest.approx(
        copy_seconds(machine, local * n) + 14 * 256 * 512 / machine.vector_flops
    )
    latency = seconds(ALL_REDUCE, 1, mesh, machine, mesh.atoms)
    assert taken(sums) - taken(sums, joined) == pytest.approx(latency, rel=1e-3)
    exchange = Step(ALL_TO_ALL, mesh.atoms, rows, columns, 0, 1)
    assert taken(exchange, joined) == taken(exchange), "no compiler puts these together"
    tiles = dataclasses.replace(exchange, dim=-1, to=-1)
    assert taken(tiles) >= seconds(ALL_TO_ALL, local, mesh, machine, mesh.atoms) + copy_seconds(machine, local)


@pytest.mark.parametrize("named", MACHINES)
def test_what_uneven_parts_pad_and_cut_is_copied(named):
    machine = Machine.of(named)
    mesh = Mesh.abstract(d=machine.size)
    times, n = StepTimes(machine), mesh.size
    rows, columns, whole = Sharding((mesh.atoms, ())), Sharding(((), mesh.atoms)), Sharding(((), ()))
    gather = Step(ALL_GATHER, mesh.atoms, rows, whole, 0)
    # The same parts are sent; of the second array the last part is padded, and the whole is cut after the gather.
    even, uneven = (times.seconds(gather, (size, n), 4, mesh) for size in (2 * n, 2 * n - 1))
    assert uneven - even == pytest.approx(copy_seconds(machine, 4 * (2 * n - 1) * n))
    exchange = Step(ALL_TO_ALL, mesh.atoms, rows, columns, 0, 1)
    local = 4 * (2 * n - 1)  # one row, which is padded, and whose parts lie in order
    sent = seconds(ALL_TO_ALL, local, mesh, machine, mesh.atoms) + 0.1 * machine.launch
    assert times.seconds(exchange, (n, 2 * n - 1), 4, mesh) - sent == pytest.approx(copy_seconds(machine, local))


# Loops copy slices of their stacks and fill stacks with zeros as XLA does, and planning pays for both.


SQUARES = f32(32, 32), f32(4, 32, 32)
CPU, TPU = COMPILERS["cpu"], Machine.of("v5e:1x1").compiler


def slicing_in_place(machine):
    """The machine with a compiler that slices stacks as libtpu does."""
    compiler = dataclasses.replace(machine.compiler, products_slice_stacks=True)
    return dataclasses.replace(machine, compiler=compiler)


def modelled(f, compiler):
    """The number of slices that are copied in an iteration, and of stacks that are filled."""
    kernels = as_compiled(kernels_of(trace(f, *SQUARES).block), compiler)
    slices = [piece for kernel, _ in kernels.walk() for piece in kernel.slices]
    return sum(x.copied for x in slices), sum(x.filled for x in slices)


@pytest.mark.parametrize(("f", "of_libtpu"), [
    (layers, (0, 0)), (kept_products, (0, 0)), (elementwise, (0, 0)), (kept_carry, (1, 0)), (gradient, (1, 1)),
    (both_ways, (1, 0)), (backwards, (0, 1)), (nested, (1, 0)),
], ids=lambda f: getattr(f, "__name__", ""))  # fmt: skip
def test_as_many_slices_are_copied_and_stacks_filled_as_in_the_compiled_program(f, of_libtpu):
    """libtpu slices inside of products, and fills stacks of loops that count down."""
    compiled = jax.jit(f).lower(*SQUARES).compile()
    assert modelled(f, CPU) == copies_and_fills(compiled.as_text())
    assert modelled(f, TPU) == of_libtpu


def test_the_cost_of_a_loop_has_its_copies_and_fills():
    def looked_up(x, ws):
        return jax.lax.scan(lambda x, w: (x + w[jnp.arange(4) * 2].sum(), None), x, ws)[0]

    assert modelled(looked_up, CPU) == (0, 0), "a look-up reads a slice inside of the stack"
    lowered = gshard.jit(kept_products, mesh=gshard.Mesh.abstract(x=1)).lower(*SQUARES)
    machine = Machine.of("h100:1x1")
    rounds, slice_bytes = SQUARES[1].shape[0], 4 * math.prod(SQUARES[0].shape)
    with_stacks, without = cost(lowered.spmd, machine), cost(lowered.spmd, slicing_in_place(machine))
    copies = 2  # the weights that the product reads, and the product that is kept
    expected = copies * copy_seconds(machine, slice_bytes) + slice_bytes / machine.memory_bandwidth
    assert with_stacks.seconds - without.seconds == pytest.approx(rounds * expected)
    assert with_stacks.by_bound["launch"] - without.by_bound["launch"] == pytest.approx(
        rounds * copies * machine.launch
    )


@pytest.mark.parametrize("f", [kept_products, gradient, nested], ids=lambda f: f.__name__)
def test_planning_pays_what_the_cost_has(f):
    mesh, machine = gshard.Mesh.abstract(x=1), Machine.of("h100:1x1")
    in_place = slicing_in_place(machine)
    lowered = gshard.jit(f, mesh=mesh).lower(*SQUARES)
    stacks = seconds_on(machine)(mesh, ()).stack_costs(lowered.program.block)
    free = seconds_on(in_place)(mesh, ()).stack_costs(lowered.program.block)
    paid, paid_in_place = (
        sum(x.runs * (x.value.bytes * x.byte_cost + x.run_cost) for x in costs) for costs in (stacks, free)
    )
    assert paid > paid_in_place
    assert paid - paid_in_place == pytest.approx(
        cost(lowered.spmd, machine).seconds - cost(lowered.spmd, in_place).seconds
    )


def test_a_search_pays_for_the_part_of_a_stack_that_a_device_has():
    def split_gradient(x, ws):
        return gradient(gshard.shard(x, P(None, "x")), gshard.shard(ws, P(None, "x")))

    def found(machine):
        """The seconds of the plan in the model of the search, and in full."""
        plan = gshard.search(split_gradient, f32(64, 1024), f32(16, 1024, 1024), mesh=mesh, machine=machine)
        return plan.best.predicted, plan.cost.seconds

    mesh, machine = gshard.Mesh.abstract(x=8), Machine.of("h100:1x8")
    predicted, priced = found(machine)
    predicted_in_place, priced_in_place = found(slicing_in_place(machine))
    assert predicted - predicted_in_place == pytest.approx(priced - priced_in_place)
    assert priced > 1.5 * priced_in_place, "small slices: the launches of their copies take most of the time"


# Sums that XLA finishes in one message cost its latency once; those that need each other do not.


MESH, MACHINE = gshard.Mesh.abstract(x=4, y=2), Machine.of("v5e:2x4")


def all_reduces(f, specs, *arguments):
    """Seconds of each."""
    lowered = gshard.jit(f, mesh=MESH, in_shardings=specs, out_shardings=P()).lower(*arguments)
    return [k.seconds for k in cost(lowered.spmd, MACHINE).kernels if k.name == "all_reduce"]


ROWS = P("x"), P("x")
ARRAYS = f32(8, 1024), f32(8, 1024)


def test_sums_that_do_not_need_each_other_are_one_message():
    first, second = all_reduces(lambda a, b: (jnp.sum(jnp.sin(a), 0), jnp.sum(b * b, 0)), ROWS, *ARRAYS)
    (alone,) = all_reduces(lambda a: jnp.sum(jnp.sin(a), 0), (P("x"),), ARRAYS[0])
    assert first == alone
    assert second < first / 2, "its bytes, without the latency"
    first, second = all_reduces(lambda a, b: jnp.sum(b * jnp.sin(jnp.sum(a, 0)), 0), ROWS, *ARRAYS)
    assert first == second, "one needs the other"
    sums, other = all_reduces(lambda a, b: (jnp.sum(a, 0), jnp.sum(b, 0)), (P("x"), P("y")), *ARRAYS)
    assert min(sums, other) > 1e-6, "they are over other devices"
    total, most = all_reduces(lambda a, b: (jnp.sum(a, 0), jnp.max(b, 0)), ROWS, *ARRAYS)
    assert total == most, "they are of other kinds"


def test_gathers_are_one_message_where_the_compiler_makes_them_one():
    lowered = gshard.jit(lambda a, b: (a, b), mesh=MESH, in_shardings=ROWS, out_shardings=P()).lower(*ARRAYS)
    for machine, shared in (("h100:1x8", True), ("v5e:2x4", False)):
        kernels = cost(lowered.spmd, Machine.of(machine)).kernels
        first, second = [k.seconds for k in kernels if k.name == "all_gather"]
        assert second < first / 2 if shared else second == first


def test_sums_that_share_a_message_are_taken_before_scatters_that_do_not():
    case, where = CASES["training/adam_zero"], Machine.of("v5e:2x4")
    program = gshard.jit(case.function, mesh=case.jax_mesh).lower(*case.arguments).program
    mesh = on_machine(gshard.Mesh.of(case.jax_mesh), where)
    alone = propagate(program, mesh, objective=seconds_on(where))
    chosen, *others = plans_of(program, mesh, where)
    assert chosen.seconds == min(made.seconds for made in others + [chosen])
    assert chosen.seconds < 0.8 * cost(partition(alone), where).seconds


@pytest.mark.parametrize("name, machine", [
    ("layers/attention_sequence", "v5e:2x4"), ("contractions/uneven_rows", "h100:1x8"),
    pytest.param("layers/layer_data'", "v5e:2x4", marks=pytest.mark.slow),
])  # fmt: skip
def test_with_a_machine_no_plan_is_slower_there_than_the_one_by_bytes(name, machine):
    case, where = CASES[name], Machine.of(machine)
    steps = [gshard.jit(case.function, mesh=case.jax_mesh, machine=m) for m in (None, machine)]
    by_bytes, chosen = (cost(step.lower(*case.arguments).spmd, where).seconds for step in steps)
    assert chosen <= by_bytes
    if (name, machine) == ("layers/attention_sequence", "v5e:2x4"):
        assert chosen < by_bytes / 2, "few messages between devices that are far apart"
    near_largest(steps[1](*case.arguments), jax.jit(case.function)(*case.arguments))
