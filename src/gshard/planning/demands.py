"""Resolves the marks and argument shardings of a program on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gshard.core.dropped import MESH
from gshard.core.errors import ShardingError
from gshard.core.manual_axes import manual_axes
from gshard.core.mark import Demand, Mark, resolve
from gshard.core.mesh import Mesh
from gshard.core.plan import Reason
from gshard.core.program import Equation, Program, Value


def _demand_of(e: Equation, mesh: Mesh, program: Program) -> Demand:
    """The demand of a user's mark. Inside a partly manual ``shard_map``, it covers automatic axes only."""
    (value,), manual = e.outputs, manual_axes(program.block, mesh)
    assert e.mark is not None
    barred = manual.at(e)
    if not barred:
        try:
            return resolve(e.mark, mesh, value.shape, e.line)
        except ShardingError as reason:
            meshes = [(d.line, d.option[1]) for d in program.dropped if d.option is not None and d.option[0] == MESH]
            if not meshes:
                raise
            line, axes = meshes[0]
            hint = (
                f"The gshard.jit that is called at {line} has mesh ({axes}), and runs on the mesh of the gshard.jit "
                f"around it ({mesh}). Give both the same mesh, or name axes of the outer one."
            )
            raise ShardingError(reason.what, reason.where, reason.got, f"{reason.hint} {hint}".strip()) from None
    # A mark with axis names refers to the whole mesh; one with a number of parts refers to the automatic axes.
    mark_mesh = mesh if e.mark.axes else manual.mesh_without(barred)
    try:
        demand = resolve(e.mark, mark_mesh, value.shape, e.line)
    except ShardingError as reason:
        hint = f"Over {mesh.format_atoms([a for a in mesh.atoms if a in barred])} this shard_map is manual."
        raise ShardingError(reason.what, e.line, reason.got, f"{hint} {reason.hint}".strip()) from None
    if not barred.isdisjoint(demand.sharding.atoms):
        raise ShardingError(
            "a mark splits an array over an axis over which the shard_map around it is manual.",
            e.line,
            str(e.mark),
            "Name automatic axes only; the specs of the shard_map say what is split over manual ones.",
        )
    return dataclasses.replace(demand, order=mesh.order)


def demands(program: Program, mesh: Mesh) -> Iterator[tuple[Value, Demand, Reason]]:
    """The demands of the user's marks and of the shardings of arguments, each with its value and its reason."""
    captured = len(program.captured)
    for value, mark, name in zip(
        program.block.inputs[captured:], program.argument_marks, program.names[captured:], strict=True
    ):
        if mark is not None:
            _refuse_unreduced(mark, value, f"argument {name}")
            source = f"{name}, {mark.source_text}" if mark.source_text else name
            yield value, resolve(mark, mesh, value.shape, f"argument {name}"), Reason("argument", "", source)
    for e in program.block.walk():
        if e.mark is not None:
            (value,) = e.outputs
            yield value, _demand_of(e, mesh, program), Reason("mark", e.line, e.mark.text_on(mesh))


def _refuse_unreduced(mark: Mark, value: Value, name: str) -> None:
    if mark.unreduced:
        raise ShardingError(
            f"{name} is unreduced, and what comes from outside of a program is finished.",
            "",
            f"{value.dtype_name}[{','.join(map(str, value.shape))}], {mark.spec_text}",
            "Finish it outside, by jax.sharding.reshard or jax.device_put, or mark it inside of the function.",
        )
