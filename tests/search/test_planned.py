"""The choice between plans: time, memory at the peak, and a memory limit with the values that it recomputes."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

import gshard
from gshard.device.cost import cost
from gshard.device.machine import Machine
from gshard.search.pipeline import CHOOSE_WITHIN_LIMIT, Draft, Settings, plans_of, run

MACHINE = Machine.of("h100:1x8")
MESH = gshard.Mesh.abstract(data=8)


def column_sums(x, w, *, x_split):
    """A product whose rows are on all devices, or split."""
    x = gshard.split(x, 0, "data") if x_split else gshard.replicate(x)
    return jnp.tanh(x @ gshard.replicate(w)).sum(0)


@functools.cache
def priced(*, x_split):
    arguments = ShapeDtypeStruct((65536, 256), "float32"), ShapeDtypeStruct((256, 256), "float32")
    program = gshard.stages.trace(functools.partial(column_sums, x_split=x_split), *arguments)
    planned = plans_of(program, MESH, MACHINE)[0]
    spmd = gshard.stages.partition(planned.plan)
    return dataclasses.replace(planned, spmd=spmd, cost=cost(spmd, MACHINE))


def changed(planned, *, seconds=1.0, memory=1.0, room=1.0):
    """A plan with other seconds, bytes at the peak and bytes of the machine's memory, as ratios."""
    assert planned.cost is not None
    kernels = tuple(dataclasses.replace(k, seconds=k.seconds * seconds) for k in planned.cost.kernels)
    machine = dataclasses.replace(MACHINE, memory=int(planned.cost.peak * room))
    made = dataclasses.replace(planned.cost, kernels=kernels, machine=machine)
    more = int(made.memory.peak * (memory - 1))
    made.__dict__["memory"] = dataclasses.replace(made.memory, temporaries=made.memory.temporaries + more)  # cached
    return dataclasses.replace(planned, cost=made)


@pytest.mark.parametrize(
    ("ratios", "is_better"),
    [
        ({"seconds": 0.97}, True),
        ({"seconds": 0.99}, False),
        ({"seconds": 0.99, "memory": 0.9}, True),
        ({"seconds": 1.0, "memory": 0.9}, True),
        ({"seconds": 1.01, "memory": 0.5}, False),  # time is not spent to save memory while all fits
        ({"seconds": 0.97, "memory": 1.5}, True),
        ({"seconds": 0.9, "memory": 3.0}, False),  # does not fit
    ],
)
def test_a_plan_is_better_if_it_saves_time_or_memory(ratios, is_better):
    kept = changed(priced(x_split=True), room=2.0)
    assert changed(priced(x_split=True), room=2.0, **ratios).is_better(kept) is is_better


def test_of_plans_that_do_not_fit_the_smaller_one_is_better():
    kept = changed(priced(x_split=True), room=0.5)
    assert changed(priced(x_split=True), room=0.5, seconds=2.0, memory=0.9).is_better(kept)
    assert not changed(priced(x_split=True), room=0.5, seconds=0.5, memory=0.99).is_better(kept)
    assert changed(priced(x_split=True), room=0.5, seconds=2.0, memory=0.4).is_better(kept)


def test_a_limit_is_kept_by_the_plan_that_is_fastest_within_it():
    fast, small = changed(priced(x_split=False), seconds=1e-3), priced(x_split=True)
    assert fast.cost is not None
    assert small.cost is not None
    assert small.cost.peak < fast.cost.memory.arguments, "which cannot be recomputed"

    def first(limit):
        settings = Settings(MESH, MACHINE, memory_limit=int(limit), recomputes=True)
        return run((CHOOSE_WITHIN_LIMIT,), Draft(plans=(fast, small)), settings).best

    assert first(fast.cost.peak) is fast, "it fits"
    assert first(small.cost.peak) is small, "the other one does not fit, whatever it recomputes"
    assert first(1) is fast, "neither fits; the error is that of the first plan"
