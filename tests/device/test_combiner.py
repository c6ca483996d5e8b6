"""Sums that XLA finishes in one message cost its latency once; those that need each other do not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from device.models import f32
from families import CASES
from gshard.device.cost import cost
from gshard.device.machine import Machine
from gshard.emit.partition import partition
from gshard.planning.propagate import propagate
from gshard.search.pipeline import plans_of
from gshard.search.seconds import on_machine, seconds_on

MESH, MACHINE = gshard.Mesh.abstract(x=4, y=2), Machine.of("v5e:2x4")


def all_reduces(f: Any, specs: Any, *arguments: Any) -> list[float]:
    """Seconds of each."""
    lowered = gshard.jit(f, mesh=MESH, in_shardings=specs, out_shardings=P()).lower(*arguments)
    return [k.seconds for k in cost(lowered.spmd, MACHINE).kernels if k.name == "all_reduce"]


ROWS = P("x"), P("x")
ARRAYS = f32(8, 1024), f32(8, 1024)


def test_sums_that_do_not_need_each_other_are_one_message():
    def f(a: Any, b: Any) -> Any:
        return jnp.sum(jnp.sin(a), 0), jnp.sum(b * b, 0)

    first, second = all_reduces(f, ROWS, *ARRAYS)
    (alone,) = all_reduces(lambda a: jnp.sum(jnp.sin(a), 0), (P("x"),), ARRAYS[0])
    assert first == alone
    assert second < first / 2, "its bytes, without the latency"


def test_a_sum_that_needs_another_is_a_message_of_its_own():
    def f(a: Any, b: Any) -> Any:
        return jnp.sum(b * jnp.sin(jnp.sum(a, 0)), 0)

    first, second = all_reduces(f, ROWS, *ARRAYS)
    assert first == second


def test_sums_over_other_devices_or_of_another_kind_are_messages_of_their_own():
    (sums, other) = all_reduces(lambda a, b: (jnp.sum(a, 0), jnp.sum(b, 0)), (P("x"), P("y")), *ARRAYS)
    assert min(sums, other) > 1e-6
    (total, most) = all_reduces(lambda a, b: (jnp.sum(a, 0), jnp.max(b, 0)), ROWS, *ARRAYS)
    assert total == most


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


SLOW = {("layers/attention_sequence", "h100:1x8"), ("layers/layer_data'", "v5e:2x4")}


@pytest.mark.parametrize(
    "name, machine",
    [
        pytest.param(name, machine, marks=pytest.mark.slow if (name, machine) in SLOW else ())
        for name in ("layers/attention_sequence", "layers/layer_data'", "contractions/uneven_rows")
        for machine in ("v5e:2x4", "h100:1x8")
    ],
)
@pytest.mark.one_in(2)
def test_with_a_machine_no_plan_is_slower_there_than_the_one_by_bytes(name: str, machine: str):
    case, where = CASES[name], Machine.of(machine)
    steps = [gshard.jit(case.function, mesh=case.jax_mesh, machine=m) for m in (None, machine)]
    by_bytes, chosen = (cost(step.lower(*case.arguments).spmd, where).seconds for step in steps)
    assert chosen <= by_bytes
    if (name, machine) == ("layers/attention_sequence", "v5e:2x4"):
        assert chosen < by_bytes / 2, "few messages between devices that are far apart"
    expected = jax.tree.leaves(jax.jit(case.function)(*case.arguments))
    for found, want in zip(jax.tree.leaves(steps[1](*case.arguments)), expected, strict=True):
        # Sums of large numbers of both signs in another order: relative to the largest.
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))
