"""Manual regions: parts of a program that the user has already partitioned.

    shard_map(body, mesh, in_specs, out_specs)      JAX's regions: ``in_specs`` determine the parts of the operands;
                                                    the body runs unchanged on the parts, with its collectives
    sum_of_devices                                  the last sum of such a region (``tracing.region_sums``)

Each of these equations has only one possible split (``Rule.fixed``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax

from gshard.comm.shards import Shards
from gshard.core.errors import ShardingError
from gshard.core.mark import Mark, resolve
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.core.split import Split
from gshard.language.function_primitive import function_primitive
from gshard.language.per_device import renamed
from gshard.language.registry import Call, rule


@rule("shard_map")
def shard_map(call: Call) -> Rule:
    """The spec of an array determines its split. Each array has its own factors, because the body is opaque.

    gshard has already opened a ``shard_map`` with automatic axes (``tracing.partly_manual``), unless these axes have
    one device each.
    """
    user_mesh, body = call.params["mesh"], call.params["jaxpr"]
    axes, devices = axes_of_mesh(user_mesh)
    specs = (*call.params["in_specs"], *call.params["out_specs"])
    make = RuleMaker()
    operands = [make.parallel(shape) for shape in call.in_shapes]
    results = [make.parallel(shape) for shape in call.out_shapes]

    def fixed(mesh: Mesh) -> Split:
        check_devices(axes, devices, mesh)
        split: Split = {}
        for dims, spec, shape in zip((*operands, *results), specs, (*call.in_shapes, *call.out_shapes), strict=True):
            split |= _split(dims, spec, axes, mesh, shape)
        return split

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        return shards.run_program(renamed(body, atoms_of_axes(axes, shards.mesh)), arrays)

    return make.rule(operands, results, local=local, fixed=fixed)


def _sum_of_addends(x: Any, *, mesh: Any, spec: Any) -> Any:
    return lax.reduce_sum(x, (0,))


def _type_of_sum(x: Any, *, mesh: Any, spec: Any) -> Any:
    return jax.core.ShapedArray(x.shape[1:], x.dtype, weak_type=x.weak_type)


sum_of_devices_p = function_primitive("sum_of_devices", _sum_of_addends, _type_of_sum)


@rule("sum_of_devices")
def sum_of_devices(call: Call) -> Rule:
    """The last sum of a ``shard_map``: dimension 0 of the operand has an addend of each device along the summed axes.

    The result is unreduced over these axes. It is split otherwise as the spec of the region's result says.
    """
    axes, _ = axes_of_mesh(call.params["mesh"])
    ((count, *shape),) = call.in_shapes
    make = RuleMaker()
    operand = [make.factor(count, REDUCE, "add"), *make.parallel(shape)]

    def fixed(mesh: Mesh) -> Split:
        return _split(operand, call.params["spec"], axes, mesh, (count, *shape))

    return make.rule([operand], [operand[1:]], local=lambda shards, x: [x[0]], fixed=fixed, flops=0)


def axes_of_mesh(mesh: Any) -> tuple[tuple[tuple[str, int], ...], tuple[Any, ...]]:
    """Names and sizes of the axes of a JAX mesh, and its devices in row-major order; () for an abstract mesh."""
    devices = tuple(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else ()
    return tuple((str(name), int(size)) for name, size in mesh.shape.items()), devices


def check_devices(axes: tuple[tuple[str, int], ...], devices: tuple[Any, ...], mesh: Mesh) -> None:
    """Refuses a ``shard_map`` over a mesh that is not the program's."""
    differ = bool(devices) and mesh.devices is not None and devices != mesh.devices
    if math.prod(size for _, size in axes) != mesh.size or differ:
        raise ShardingError(
            "a shard_map inside the program is over other devices than the program.",
            got=f"its mesh: {dict(axes)}; the program's: {mesh}",
            hint="Make both over the same devices in the same order.",
        )


@tabulated(64)
def atoms_of_axes(axes: tuple[tuple[str, int], ...], mesh: Mesh) -> Mapping[str, Atoms]:
    """The atoms of each axis of the user's mesh."""
    return {name: _cuts((name,), axes, mesh, (mesh.size,))[0] for name, _ in axes}


def _split(dims: Any, spec: Any, axes: tuple[tuple[str, int], ...], mesh: Mesh, shape: tuple[int, ...]) -> Split:
    """The split of the factors of an array that a spec over the user's axes states."""
    cuts = _cuts(tuple(spec), axes, mesh, shape)
    return {dim[0]: atoms for dim, atoms in zip(dims, cuts, strict=True) if atoms}


def _cuts(
    spec: tuple[Any, ...], axes: tuple[tuple[str, int], ...], mesh: Mesh, shape: tuple[int, ...]
) -> tuple[Atoms, ...]:
    demand = resolve(Mark("spec", spec=spec, axes=axes), mesh, shape, "")
    if demand.order != mesh.order:
        raise ShardingError(
            "a shard_map inside the program cuts its devices otherwise than the axes of the program's mesh do.",
            got=f"its mesh: {dict(axes)}; the program's: {mesh}",
            hint="Make both over the same mesh.",
        )
    return demand.dims
