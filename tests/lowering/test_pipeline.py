"""The pipeline: its stages in order, what they log, and the settled program that propagation and rewrites end with."""

import logging

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

import gshard
from gshard.lowering.pipeline import PARTITION, PLANNING, RECOMPUTE, Draft, Settings, run
from gshard.planning.settled import settled

MESH = gshard.Mesh.abstract(data=8)


def f32(*shape):
    return ShapeDtypeStruct(shape, "float32")


def products(x, w):
    return jnp.tanh(gshard.split(x, 0, "data") @ gshard.split(w, 0, "data"))


REWRITTEN = {
    # A loop over a split dimension: an operator once that is known.
    "rounds": (
        lambda x, w: jax.lax.map(lambda row: jnp.tanh(row @ w), gshard.split(x, 0, "data")).sum(),
        (f32(16, 4, 32), f32(32, 8)),
    ),
    "transform": (lambda x: jnp.abs(jnp.fft.fft2(gshard.split(x, 1, "data"))), (f32(8, 16, 16),)),
}


def stages(f, *arguments, caplog, **options):
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "gshard.stages"):
        gshard.jit(f, mesh=MESH, **options).lower(*arguments).spmd  # noqa: B018  made
    return [record.getMessage().split("'")[1] for record in caplog.records if record.name == "gshard.stages"]


def test_stages_run_in_order_and_log_what_they_made(caplog):
    assert stages(products, f32(64, 64), f32(64, 64), caplog=caplog) == ["propagate", "choose", "partition"]
    last = caplog.records[-1].getMessage()
    assert last.startswith("products: after 'partition'\nspmd program products on data=8")
    options = {"machine": "v5e:2x4", "memory_limit": "1GiB"}
    named = stages(products, f32(64, 64), f32(64, 64), caplog=caplog, **options)
    assert named == [
        "propagate", "choose", "choose within the memory limit", "collective matmuls", "partition", "recompute",
    ]  # fmt: skip
    names = [stage.name for stage in (*PLANNING, PARTITION, RECOMPUTE)]
    assert [name for name in named if name in names] == sorted(named[1:], key=names.index)


def test_a_program_that_is_rewritten_is_propagated_again(caplog):
    f, arguments = REWRITTEN["rounds"]
    logged = stages(f, *arguments, caplog=caplog)
    assert logged == ["propagate", "rewrite where split", "propagate", "choose", "partition"]


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_settled_program_stays(name):
    f, arguments = REWRITTEN[name]
    program = gshard.stages.trace(f, *arguments)
    propagated = settled(program, MESH)
    assert propagated.program.block is not program.block, "the example is rewritten"
    again = settled(propagated.program, MESH)
    assert again.program is propagated.program
    assert again.shardings == propagated.shardings
    assert settled(program, MESH).program.block is propagated.program.block
    plan = gshard.stages.propagate(program, MESH)
    assert plan.program.block is propagated.program.block


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_plan_of_a_rewritten_program_is_read_back(name):
    f, arguments = REWRITTEN[name]
    program = gshard.stages.trace(f, *arguments)
    settings = Settings(MESH)
    made = run(PLANNING, Draft(program), settings).best
    recorded = gshard.SavedPlan.of_json(gshard.SavedPlan.of(made.plan).as_json())
    given = Settings(MESH, given=recorded.plan)
    back = run(PLANNING, Draft(program), given).best.plan
    assert back.program.block is made.plan.program.block
    assert back.shardings == made.plan.shardings
    assert {e: s for e, s in back.splits.items() if s} == {
        e: {f: atoms for f, atoms in s.items() if atoms} for e, s in made.plan.splits.items() if any(s.values())
    }
    assert recorded.plan(program, MESH).shardings == made.plan.shardings
    assert run((PARTITION, RECOMPUTE), Draft(plans=(made,)), settings).spmd.collectives is not None
