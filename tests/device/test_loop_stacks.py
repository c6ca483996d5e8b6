"""Loops copy slices of their stacks and fill stacks with zeros as XLA does, and planning pays for both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from device.models import f32
from gshard.device.compiled_kernels import stack_slices
from gshard.device.cost import cost
from gshard.device.fusion_model import kernels_of
from gshard.device.machine import COMPILERS, Compiler, Machine
from gshard.device.roofline import copy_seconds
from gshard.search.seconds import seconds_on
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

SQUARES = f32(32, 32), f32(4, 32, 32)
CPU, TPU = COMPILERS["cpu"], Machine.of("v5e:1x1").compiler


def slicing_in_place(machine: Machine) -> Machine:
    """The machine with a compiler that slices stacks as libtpu does."""
    compiler = dataclasses.replace(machine.compiler, products_slice_stacks=True, fills_forward_stacks=False)
    return dataclasses.replace(machine, compiler=compiler)


def modelled(f: Callable[..., Any], compiler: Compiler) -> tuple[int, int]:
    """The number of slices that are copied in an iteration, and of stacks that are filled."""
    slices = list(stack_slices(kernels_of(trace(f, *SQUARES).block), compiler))
    return sum(x.copied for x in slices), sum(x.filled for x in slices)


@pytest.mark.parametrize(
    "f",
    [layers, kept_products, elementwise, kept_carry, gradient, both_ways, backwards, nested],
    ids=lambda f: f.__name__,
)
def test_as_many_slices_are_copied_and_stacks_filled_as_in_the_compiled_program(f: Callable[..., Any]):
    compiled = jax.jit(f).lower(*SQUARES).compile()
    assert modelled(f, CPU) == copies_and_fills(compiled.as_text())


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (layers, (0, 0)),
        (kept_products, (0, 0)),
        (elementwise, (0, 0)),
        (kept_carry, (1, 0)),
        (gradient, (1, 1)),
        (both_ways, (1, 0)),
        (backwards, (0, 1)),
        (nested, (1, 0)),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_libtpu_slices_inside_of_products_and_fills_stacks_of_loops_that_count_down(
    f: Callable[..., Any], expected: tuple[int, int]
):
    assert modelled(f, TPU) == expected


def test_a_look_up_reads_a_slice_inside_the_stack():
    def looked_up(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x + w[jnp.arange(4) * 2].sum(), None), x, ws)[0]

    assert modelled(looked_up, CPU) == (0, 0)


def test_the_cost_of_a_loop_has_its_copies_and_fills():
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


@pytest.mark.parametrize("f", [layers, kept_products, gradient, nested], ids=lambda f: f.__name__)
def test_planning_pays_what_the_cost_has(f: Callable[..., Any]):
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
    def split_gradient(x: Any, ws: Any) -> Any:
        return gradient(gshard.shard(x, P(None, "x")), gshard.shard(ws, P(None, "x")))

    def found(machine: Machine) -> tuple[float, float]:
        """The seconds of the plan in the model of the search, and in full."""
        plan = gshard.search(split_gradient, f32(64, 1024), f32(16, 1024, 1024), mesh=mesh, machine=machine)
        return plan.best.predicted, plan.cost.seconds

    mesh, machine = gshard.Mesh.abstract(x=8), Machine.of("h100:1x8")
    predicted, priced = found(machine)
    predicted_in_place, priced_in_place = found(slicing_in_place(machine))
    assert predicted - predicted_in_place == pytest.approx(priced - priced_in_place)
    assert priced > 1.5 * priced_in_place, "small slices: the launches of their copies take most of the time"
