"""export_plan: a plan that was searched, for use with ``jax.jit`` and without gshard."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from gshard.api.explained import explain
from gshard.api.function_again import planned_by
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.memory_kinds import shape_in_memory
from gshard.core.planning_tables import with_tables
from gshard.explanation.compiled_source import CompiledSource
from gshard.explanation.exported_plan import ExportedPlan, shardings_on
from gshard.explanation.search_result import SearchResult
from gshard.explanation.tried_changes import SECONDS
from gshard.xla.described import described_mesh


@without_our_frames
@with_tables
def export_plan(found: SearchResult, seconds: float = SECONDS) -> ExportedPlan:
    """Writes a plan as shardings and sharding constraints for ``jax.jit``, and compiles the program to check them.

    XLA's partitioner decides what these leave open, and it may send more than the plan. So the program is compiled with
    them, and what XLA sends is compared with the plan, in all and line by line. If XLA does not follow the plan,
    constraints on values inside are sought, as by ``advise`` of an explanation.

    Args:
        found: what ``gshard.search`` returned.
        seconds: how long to seek constraints, about; with 0 none are sought.

    Returns:
        ``in_shardings`` and ``out_shardings`` as ``PartitionSpec``, the constraints that XLA needs besides, and the
        comparison; print it. The program that is compiled is the function as gshard traced it, for the devices of the
        mesh; for an abstract mesh by libtpu if the machine is a TPU, and else for the first devices that JAX has.

    Raises:
        ArgumentError: this is no result of a search for a plan, or a framework jits the function. MeshError,
            PlanningError: there are no devices to compile for; libtpu is missing, for a TPU.

    >>> import jax
    >>> from gshard.api.search import search
    >>> w, x = jax.ShapeDtypeStruct((8192, 8192), "float32"), jax.ShapeDtypeStruct((8, 8192), "float32")
    >>> exported = export_plan(search(lambda w, x: x @ w, w, x, mesh={"data": 8}, machine="h100:1x8"))
    >>> exported.in_shardings, exported.follows_plan
    ((P(None, 'data'), P(None, None)), True)
    """
    if not isinstance(found, SearchResult):
        raise ArgumentError(
            f"gshard.stages.export_plan takes what gshard.search returned, not {type(found).__name__}.",
            user_line(),
            hint="Write gshard.stages.export_plan(gshard.search(f, x, mesh=8, machine='h100:1x8')).",
        )
    found.refuse_framework()
    program, mesh, machine = found.plan.program, found.plan.mesh, found.cost.machine
    if program.references:
        raise ArgumentError(
            "jax.jit has no shardings for references (jax.Ref) that a function writes, so its plan is not exported.",
            user_line(),
            hint="Run it by gshard.jit(f, mesh=found.mesh, plan=found.plan), or return the new values instead.",
        )
    on = described_mesh(machine) if mesh.devices is None and machine.topology else mesh.on_first_devices()
    devices: Any = dataclasses.replace(mesh, devices=on.devices, made_from=None)
    assert found.function is not None, "no framework jits it"
    function, first, spmd = jaxpr_as_fun(found.function.jaxpr()), len(program.captured), found.explain().spmd
    entering, leaving = shardings_on(devices.user_jax_mesh, program, spmd)
    takes = [shape_in_memory(v.shape, v.dtype, on_host=v.on_host) for v in program.block.inputs[first:]]
    jitted = jax.jit(function, in_shardings=entering[first:], out_shardings=leaving)
    compiled = explain(jitted, *takes, partitioner="xla")
    made = ExportedPlan(found, spmd, compiled)
    if made.follows_plan or not isinstance(compiled.source, CompiledSource):
        return made
    advice = compiled.source.advise(compiled.machine, seconds, False, planned_by(found.plan, spmd))
    return dataclasses.replace(made, advice=advice)
