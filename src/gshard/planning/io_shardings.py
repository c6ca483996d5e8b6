"""Decides the shardings in which arguments enter and results leave, once the plan is chosen.

- JAX has no arrays with unequal parts. Arguments enter replicated along dimensions that do not divide evenly, and
  results leave split as far as their parts are equal. Inside the program both are split further.
- On a mesh of JAX's that the user gave, results leave split over whole axes, so that a ``NamedSharding`` can express
  it: under ``jax.set_mesh``, JAX computes with no other shardings.
- Padded parts (``UnevenArray``) enter and leave unchanged.
- A result that is marked with a sharding over another mesh of the same devices keeps that sharding.
- A donated argument has the sharding of the result that takes its memory. If the argument was passed with a sharding,
  the result gets that one, so a training state keeps its sharding from call to call.
- The final value of a reference has the sharding in which the reference entered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Constant, Value
from gshard.core.program_boundary import AS_MARKED, Boundary
from gshard.core.sharding import Sharding
from gshard.core.uneven import cut_evenly


def at_boundary(plan: Plan, boundary: Boundary = AS_MARKED) -> Plan:
    """The plan with the shardings of its inputs and results (``Plan.entry``, ``Plan.leave``)."""
    block, results = plan.program.block, tuple(dict.fromkeys(plan.program.block.outputs))
    foreign = _marked_on_another_mesh(plan)
    leave = {v: _leaving_sharding(v, plan, foreign, keep_uneven=boundary.keep_uneven) for v in results}
    fixed_entry = dict(boundary.padded)
    if not boundary.keep_uneven:
        fixed_entry = {**_entry_of_donated(boundary.donated, leave, plan), **fixed_entry}
    entry = tuple(fixed_entry.get(i) or _even_dims(plan.sharding(v), v, plan) for i, v in enumerate(block.inputs))
    if not boundary.keep_uneven:
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


def as_returned(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh, *, padded: bool = False) -> Sharding:
    """The sharding in which a result leaves: in equal parts, and over whole axes if the user gave a mesh of JAX's.

    A mesh that was given as a number or by axis names is no mesh that JAX has set, so parts of its axes can be used.

    >>> split = Sharding((("x", "y.0"), ("y.1",)))
    >>> as_returned(split, (6, 4), Mesh.abstract(x=2, y=4)).dims
    (('x',), ('y.1',))
    >>> import jax
    >>> as_returned(split, (6, 4), Mesh.of(jax.sharding.AbstractMesh((2, 4), ("x", "y")))).dims
    (('x',), ())
    """
    if padded and not sharding.is_even(mesh, shape):
        return sharding
    even = cut_evenly(sharding, shape, mesh)
    return even if mesh.given is None else by_axes(even, mesh)


def _even_dims(sharding: Sharding, value: Value, plan: Plan) -> Sharding:
    """The sharding without the dimensions whose parts are unequal."""
    pairs = zip(value.shape, sharding.dims, strict=True)
    return Sharding(tuple(() if n % plan.mesh.count(atoms) else atoms for n, atoms in pairs))


def _leaving_sharding(
    value: Value | Constant, plan: Plan, foreign: Collection[Value], *, keep_uneven: bool
) -> Sharding:
    """The sharding in which a result leaves: the planned one, or else its own, in equal parts over whole axes."""
    sharding = plan.leaves.get(value, plan.sharding(value)) if isinstance(value, Value) else plan.sharding(value)
    sharding = Sharding(sharding.dims)  # reduced, even if a mark leaves the value unreduced inside
    if value in foreign and not keep_uneven:
        return cut_evenly(sharding, value.shape, plan.mesh)
    return sharding if value in foreign else as_returned(sharding, value.shape, plan.mesh, padded=keep_uneven)


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
