"""Presets: the plans that people write by hand, made by marks on the arguments and ``propagate``.

They are priced beside what search finds, which is never worse than one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from gshard.core.errors import GShardError
from gshard.core.mark import Mark, mark_of_cut
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.program import Program, Value
from gshard.passes.propagate import propagate


def presets(program: Program, mesh: Mesh, donated: Collection[int] = ()) -> Iterator[tuple[str, Plan]]:
    """The plans, each with its name.

    Args:
        program: with the user's marks, which are kept: a preset says something of other arguments only.
        mesh: the devices.
        donated: inputs of the program (captured arrays counted) that are a training state.
    """
    yield "as it is marked", propagate(program, mesh)
    state = set(donated) or {i for i, _ in program.state(range(len(program.block.inputs)))}
    data = [i for i, v in enumerate(program.block.inputs) if v.shape and i not in state]
    by_batch = {i: _along(program.block.inputs[i], 0, mesh.atoms, mesh) for i in data}
    whole = {i: _along(program.block.inputs[i], None, (), mesh) for i in state}
    cut = {i: _along(v, _largest(v, mesh), mesh.atoms, mesh) for i in state for v in (program.block.inputs[i],)}
    for name, marks in (
        ("data parallel", {**whole, **by_batch}),
        ("data parallel, state split (ZeRO, FSDP)", {**cut, **by_batch}),
        ("state split", cut),
    ):
        marked = _marked(program, {i: mark for i, mark in marks.items() if mark is not None})
        if marked is None:
            continue
        try:
            yield name, propagate(marked, mesh)
        except GShardError:  # a mark that does not fit one of the user's
            continue


def _largest(v: Value, mesh: Mesh) -> int | None:
    """The largest dimension that all devices can have equal parts of."""
    even = [d for d, n in enumerate(v.shape) if n and n % mesh.size == 0]
    return max(even, key=lambda d: (v.shape[d], -d), default=None)


def _along(v: Value, dim: int | None, atoms: Atoms, mesh: Mesh) -> Mark | None:
    """The mark that cuts a dimension over these atoms; the one that replicates, where there is none."""
    if not v.shape:
        return None
    if dim is None or v.shape[dim] % mesh.count(atoms):
        return Mark("replicate")
    return mark_of_cut([atoms if d == dim else () for d in range(len(v.shape))], mesh)


def _marked(program: Program, marks: dict[int, Mark]) -> Program | None:
    """The program with marks on arguments that have none; None if nothing is new."""
    first = len(program.captured)
    new = tuple(mark or marks.get(first + i) for i, mark in enumerate(program.argument_marks))
    return None if new == program.argument_marks else dataclasses.replace(program, argument_marks=new)
