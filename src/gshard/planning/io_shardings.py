"""At the boundary: the shardings in which arguments enter and results leave, once the plan is chosen.

JAX has no arrays with unequal parts. So arguments enter replicated along dimensions that do not divide evenly, and
results leave split only as far as their parts are equal; inside the program both are split further. On a mesh of JAX's
that the user gave, results leave split over whole axes, as a ``NamedSharding`` over it says: under ``jax.set_mesh`` JAX
computes with no others. Padded parts (``UnevenArray``) enter and leave unchanged. A result that is marked with a
sharding over another mesh of the same devices keeps that. A donated argument has the sharding of the result that takes
its memory. If the argument was passed with a sharding, the result gets that one, so that a training state keeps its
sharding from call to call. The final value of a reference always has the sharding that it came with.
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
    """The plan with how its inputs come and its results leave (``Plan.entry``, ``Plan.leave``)."""
    block, results = plan.program.block, tuple(dict.fromkeys(plan.program.block.outputs))
    foreign = _marked_on_another_mesh(plan)
    leave = {v: _outgoing(v, plan, foreign, keep_uneven=boundary.keep_uneven) for v in results}
    come = dict(boundary.padded)
    if not boundary.keep_uneven:
        come = {**_as_they_leave(boundary.donated, leave, plan), **come}
    entry = tuple(come.get(i) or _whole_if_uneven(plan.sharding(v), v, plan) for i, v in enumerate(block.inputs))
    if not boundary.keep_uneven:
        leave |= {v: s for v, s in _as_they_came(boundary.donated, entry, plan).items() if v in plan.leaves}
    leave |= {v: entry[i] for i, v in plan.program.final_values() if entry[i].is_even(plan.mesh, v.shape)}
    return dataclasses.replace(plan, entry=entry, leave=tuple(leave[v] for v in block.outputs))


def by_axes(sharding: Sharding, mesh: Mesh) -> Sharding:
    """The sharding as far as it cuts over whole axes of the mesh.

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
    """The sharding of a result: in equal parts, and over whole axes of the mesh of JAX's that the user gave, if any.

    A mesh that was given as a number or by axis names is no mesh that JAX has set, so parts of its axes can be used.

    Args:
        sharding: how the array is split inside.
        shape: its shape.
        mesh: the devices.
        padded: whether an array in unequal parts leaves as these are.

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


def _whole_if_uneven(sharding: Sharding, value: Value, plan: Plan) -> Sharding:
    """The same without dimensions that are cut into unequal parts."""
    pairs = zip(value.shape, sharding.dims, strict=True)
    return Sharding(tuple(() if n % plan.mesh.count(atoms) else atoms for n, atoms in pairs))


def _outgoing(value: Value | Constant, plan: Plan, foreign: Collection[Value], *, keep_uneven: bool) -> Sharding:
    """How a result leaves: as decided; else in its own sharding, in equal parts, over whole axes."""
    sharding = plan.leaves.get(value, plan.sharding(value)) if isinstance(value, Value) else plan.sharding(value)
    sharding = Sharding(sharding.dims)  # finished, if a mark has it in parts inside
    if value in foreign and not keep_uneven:
        return cut_evenly(sharding, value.shape, plan.mesh)
    return sharding if value in foreign else as_returned(sharding, value.shape, plan.mesh, padded=keep_uneven)


def _marked_on_another_mesh(plan: Plan) -> set[Value]:
    """The values that are marked with a sharding over another mesh than that of the plan."""
    block = plan.program.block
    marks = [(v, e.mark) for e in block.equations for v in e.outputs]
    marks += zip(block.inputs, plan.program.input_marks, strict=True)
    return {v for v, mark in marks if mark is not None and mark.is_foreign(plan.mesh)}


def _as_they_leave(
    donated: Sequence[int], leave: Mapping[Value | Constant, Sharding], plan: Plan
) -> dict[int, Sharding]:
    """How donated arguments come whose place a result takes: as it leaves."""
    marks = plan.program.input_marks
    pairs = ((i, after) for i, after in plan.program.state(donated) if marks[i] is None)
    inside = {i: plan.sharding(plan.program.block.inputs[i]) for i in donated}
    return {i: leave[after] for i, after in pairs if after in plan.leaves or inside[i] == plan.sharding(after)}


def _as_they_came(donated: Sequence[int], entry: Sequence[Sharding], plan: Plan) -> dict[Value | Constant, Sharding]:
    """How results leave that take the place of donated arguments which came sharded."""
    marks = plan.program.input_marks
    pairs = ((entry[i], v) for i, v in plan.program.state(donated) if marks[i] is not None)
    return {v: came for came, v in pairs if came.is_even(plan.mesh, v.shape)}
