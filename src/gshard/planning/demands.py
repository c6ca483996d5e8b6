"""Resolves the marks of a program on a mesh, and decides how arguments enter and results leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from gshard.core.errors import ShardingError
from gshard.core.mark import Demand, Mark, resolve
from gshard.core.mesh import Mesh
from gshard.core.plan import AS_MARKED, Boundary, Plan, Reason, manual_axes
from gshard.core.program import MESH, Constant, Equation, Program, Value
from gshard.core.sharding import Sharding, cut_evenly


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


# Decides the shardings in which arguments enter and results leave, once the plan is chosen.


def at_boundary(plan: Plan, boundary: Boundary = AS_MARKED) -> Plan:
    """The plan with the shardings of its inputs and results (``Plan.entry``, ``Plan.leave``)."""
    block, results = plan.program.block, tuple(dict.fromkeys(plan.program.block.outputs))
    foreign = _marked_on_another_mesh(plan)
    leave = {v: _leaving_sharding(v, plan, foreign) for v in results}
    donated = _entry_of_donated(boundary.donated, leave, plan)
    entry = tuple(donated.get(i) or _even_dims(plan.sharding(v), v, plan) for i, v in enumerate(block.inputs))
    placed = _leave_of_placed(boundary.donated, entry, plan)
    leave |= {v: sharding for v, sharding in placed.items() if v in plan.leaves}
    leave |= {v: entry[i] for i, v in plan.program.final_values() if entry[i].is_even(plan.mesh, v.shape)}
    return dataclasses.replace(plan, entry=entry, leave=tuple(leave[v] for v in block.outputs))


def by_axes(sharding: Sharding, mesh: Mesh) -> Sharding:
    """The sharding without parts of axes: in each dimension, the longest prefix of whole mesh axes.

    >>> by_axes(Sharding((("x", "y.0"), ("z",))), Mesh.abstract(x=2, y=4, z=2)).dims
    (('x',), ('z',))
    """
    dims = []
    for atoms in sharding.dims:
        while mesh.spec_of((atoms,)) is None:
            atoms = atoms[:-1]
        dims.append(atoms)
    return Sharding(tuple(dims))


def as_returned(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Sharding:
    """The sharding in which a result leaves: in equal parts, and over whole axes if the user gave a mesh of JAX's.

    A mesh that was given as a number or by axis names is no mesh that JAX has set, so parts of its axes can be used.

    >>> split = Sharding((("x", "y.0"), ("y.1",)))
    >>> as_returned(split, (6, 4), Mesh.abstract(x=2, y=4)).dims
    (('x',), ('y.1',))
    >>> import jax
    >>> as_returned(split, (6, 4), Mesh.of(jax.sharding.AbstractMesh((2, 4), ("x", "y")))).dims
    (('x',), ())
    """
    even = cut_evenly(sharding, shape, mesh)
    return even if mesh.given is None else by_axes(even, mesh)


def _even_dims(sharding: Sharding, value: Value, plan: Plan) -> Sharding:
    """The sharding without the dimensions whose parts are unequal."""
    pairs = zip(value.shape, sharding.dims, strict=True)
    return Sharding(tuple(() if n % plan.mesh.count(atoms) else atoms for n, atoms in pairs))


def _leaving_sharding(value: Value | Constant, plan: Plan, foreign: Collection[Value]) -> Sharding:
    """The sharding in which a result leaves: the planned one, or else its own, in equal parts over whole axes."""
    sharding = plan.leaves.get(value, plan.sharding(value)) if isinstance(value, Value) else plan.sharding(value)
    sharding = Sharding(sharding.dims)  # reduced, even if a mark leaves the value unreduced inside
    return (cut_evenly if value in foreign else as_returned)(sharding, value.shape, plan.mesh)


def _marked_on_another_mesh(plan: Plan) -> set[Value]:
    """The values that are marked with a sharding over another mesh than that of the plan."""
    block = plan.program.block
    marks = [(v, e.mark) for e in block.equations for v in e.outputs]
    marks += zip(block.inputs, plan.program.input_marks, strict=True)
    return {v for v, mark in marks if mark is not None and mark.is_foreign(plan.mesh)}


def _entry_of_donated(
    donated: Sequence[int], leave: Mapping[Value | Constant, Sharding], plan: Plan
) -> dict[int, Sharding]:
    """For donated arguments whose memory a result takes, the sharding in which that result leaves."""
    marks = plan.program.input_marks
    pairs = ((i, after) for i, after in plan.program.state(donated) if marks[i] is None)
    inside = {i: plan.sharding(plan.program.block.inputs[i]) for i in donated}
    return {i: leave[after] for i, after in pairs if after in plan.leaves or inside[i] == plan.sharding(after)}


def _leave_of_placed(donated: Sequence[int], entry: Sequence[Sharding], plan: Plan) -> dict[Value | Constant, Sharding]:
    """For results that take the memory of donated arguments that were passed with a sharding, that sharding."""
    marks = plan.program.input_marks
    pairs = ((entry[i], v) for i, v in plan.program.state(donated) if marks[i] is not None)
    return {v: argument_sharding for argument_sharding, v in pairs if argument_sharding.is_even(plan.mesh, v.shape)}
