"""Partitions a function that is called inside of a ``jax.shard_map`` over the axes that the region leaves automatic.

    jax.shard_map(lambda x: gshard.jit(f, mesh=mesh)(x), mesh=mesh, in_specs=P("stage"), ..., axis_names={"stage"})

The function is planned on the whole mesh as the body of such a region (``tracing.partly_manual``): nothing in it is
split over manual axes, and marks name automatic ones. Its per-device program becomes a ``jax.shard_map`` over the
automatic axes, inside of the user's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from gshard.api.operands import tell_unknown
from gshard.api.target import Target
from gshard.core.errors import TraceError
from gshard.core.jax_adapter import closed, no_mesh_set, shapes_of, user_line
from gshard.core.jax_adapter_manual import PMAP_AXIS, with_mapping
from gshard.core.jax_adapter_retracing import as_traced_here
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.language.over_axes import OverAxes
from gshard.planning.io_shardings import by_axes


def target_inside(target: Target, jaxpr: Any, name: str) -> Target:
    """The target of a call; inside of a ``jax.shard_map`` one on the whole mesh of the region."""
    around = jax.sharding.get_abstract_mesh()
    if not around.manual_axes:
        return target
    sizes = {str(n): s for n, s in around.shape.items()}
    automatic = {n: s for n, s in sizes.items() if n not in around.manual_axes and s > 1}
    own = {n: s for n, s in target.mesh.axes if s > 1}
    outside = "jax.shard_map"
    if not automatic:
        why = "all axes of its mesh are manual: arrays are one device's parts."
        hint = "Leave axes automatic (axis_names={...}), or partition outside: gshard.jit of what holds the shard_map."
        if PMAP_AXIS in around.manual_axes:
            outside = "jax.pmap, which is a jax.shard_map"
            hint = "Leave out jax.pmap: gshard.jit takes whole arrays and splits them itself."
    elif any(n in around.explicit_axes for n in automatic):
        why = "its other axes are of type Explicit."
        hint = "Make them of type Auto, or call gshard.jit outside, of the function that holds the jax.shard_map."
    elif any(sizes.get(n) != s for n, s in own.items()) or not own.keys() & automatic.keys():
        why = "its mesh is another one."
        hint = f"Give gshard.jit the mesh of the jax.shard_map, or its automatic axes: mesh={automatic}."
    elif closed(jaxpr)[0].effects:
        why = "the function has effects."
        hint = "Move callbacks, and collectives over manual axes, out of gshard.jit."
    elif target.recorded is not None or target.search:
        why = "the plan is searched or given for a mesh without manual axes."
        hint = "Leave plan= and search= out, or use them in a gshard.jit of the function that holds the jax.shard_map."
    else:
        # Costs in seconds are those of a whole machine, which runs other positions along the manual axes as well.
        mesh = target.mesh if target.mesh.axes == tuple(sizes.items()) else Mesh.of(_automatic(around))
        return dataclasses.replace(
            target, mesh=mesh, around=around, reorders=False, collective_matmul=None, machine=None
        )
    manual = ", ".join(map(str, around.manual_axes))
    got = f"manual axes: {manual}; automatic: {_text(automatic)}; mesh of {name}: {target.mesh}"
    raise TraceError(f"{name} is called inside {outside}, and {why}", user_line(), got, hint)


def run_inside(arrays: Sequence[Any], jaxpr: Any, target: Target, planned: Callable[..., SpmdProgram]) -> list[Any]:
    """Runs a function on arrays of the region, partitioned over the axes that the region leaves automatic."""
    around = target.around
    assert around is not None
    spmd = planned(as_region(jaxpr, around), dataclasses.replace(target, leaves_by_axes=True))
    mesh, over_axes, captured = spmd.mesh, OverAxes(spmd.mesh), spmd.program.captured
    come = spmd.in_shardings[len(captured) :]
    tell_unknown(jaxpr, target, [in_region(s) for s in come])
    outer, constants = closed(spmd.jaxpr)
    (mapping,) = outer.eqns
    run = over_axes.function(mapping.params["jaxpr"])
    taken = [by_axes(s, mesh) for s in come]

    def on_device(*parts: Any) -> list[Any]:
        held = map(over_axes.cut, captured, (Sharding.replicated(x.ndim) for x in captured), spmd.in_shardings)
        given = map(over_axes.cut, (x[None] for x in parts), taken, come)
        return [x[0] for x in with_mapping(outer, run, (*constants, *held, *given))]

    def specs(shardings: Sequence[Sharding]) -> list[Any]:
        return [mesh.spec_of(in_region(s).dims) for s in shardings]

    names, out = {*around.axis_names} - {*around.manual_axes}, specs(spmd.out_shardings)
    mapped = jax.shard_map(on_device, in_specs=tuple(specs(taken)), out_specs=out, axis_names=names, check_vma=False)
    return list(mapped(*arrays))


def as_region(jaxpr: Any, around: Any) -> Any:
    """Makes a closed jaxpr the body of a ``jax.shard_map``.

    Its arrays get a first dimension for the positions along the manual axes.
    """
    spec = PartitionSpec(tuple(around.manual_axes))
    positions = math.prod(around.shape[n] for n in around.manual_axes)

    def body(*parts: Any) -> list[Any]:
        return [x[None] for x in jaxpr_as_fun(as_traced_here(jaxpr))(*(x[0] for x in parts))]

    manual, mesh = {*around.manual_axes}, _automatic(around)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=manual, check_vma=False)
    types = shapes_of(jaxpr.in_avals)
    shapes = (jax.ShapeDtypeStruct((positions, *x.shape), x.dtype, weak_type=x.weak_type) for x in types)
    with no_mesh_set():
        return jax.make_jaxpr(mapped)(*shapes)


def in_region(sharding: Sharding) -> Sharding:
    """The sharding of an array of one position, from that of ``as_region``."""
    return Sharding(sharding.dims[1:])


def _automatic(around: Any) -> jax.sharding.AbstractMesh:
    """The same mesh, all its axes of type Auto."""
    return around.update_axis_types(dict.fromkeys(around.axis_names, jax.sharding.AxisType.Auto))  # type: ignore[no-any-return]


def _text(axes: dict[str, int]) -> str:
    return ", ".join(f"{n}={s}" for n, s in axes.items()) or "none"
