"""Presets: makes the plans that people write by hand, from marks on arguments (``propagated``).

Data parallelism, a state that is split (ZeRO, FSDP), and one dimension over all devices or, beside the batch, over the
last axis: the hidden one is Megatron's plan, that of experts GShard's, the length is sequence parallelism, the height
of images spatial partitioning (``naming.dimension_classes`` finds which are the same). They are priced beside
what search finds, which is never worse than one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from gshard.core.errors import GShardError
from gshard.core.mark import Mark, mark_of_cut
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.program import Program, Value
from gshard.core.program_boundary import AS_MARKED, Boundary
from gshard.device.machine import Machine
from gshard.naming.dimension_classes import Dimensions
from gshard.naming.dimension_names import DimensionNames
from gshard.planning.reshard_costs import axes_of, joined
from gshard.planning.settled import settled
from gshard.search.pipeline import plans_of
from gshard.search.planned import Planned

AS_IT_IS = "as it is marked"
_OUTSIDE, _INSIDE = 2, 1  # the largest dimensions of arguments, and of all values, for which there are presets


@dataclasses.dataclass(frozen=True, eq=False)
class Preset:
    """Marks on arguments, as people write them.

    Attributes:
        name: of the preset.
        program: with the marks.
        own: the marks that the program has without them.
    """

    name: str
    program: Program
    own: tuple[Mark | None, ...]

    def work(self, mesh: Mesh) -> tuple[int, int]:
        """Orders presets by the time that planning them takes, the shortest first: it is exponential in the first.

        Returns:
            axes that move as wholes, once marks part some; and dimensions that marks decide or leave to be decided.
        """
        propagated = settled(self.program, mesh)
        known = {*propagated.shardings.values(), *propagated.moved.values()}
        decided = sum(len(s.dims) for s in propagated.shardings.values() if s.atoms)
        return len(joined(mesh, axes_of(mesh, known), known)), decided + sum(map(len, propagated.undecided.values()))

    def planned(self, mesh: Mesh, machine: Machine | None, boundary: Boundary) -> tuple[Planned, ...]:
        """The plans, the best first; of the program without its marks.

        Raises:
            GShardError: a mark does not fit one of the user's.
        """
        found = plans_of(self.program, mesh, machine, boundary=boundary)
        return tuple(dataclasses.replace(made, plan=_marked_as(made.plan, self.own)) for made in found)


def marked_presets(program: Program, mesh: Mesh, boundary: Boundary = AS_MARKED) -> Iterator[Preset]:
    """The presets of a program but for the program as it is marked, the usual ones first.

    Args:
        program: with the user's marks, which are kept: a preset says something of other arguments only.
        mesh: the devices.
        boundary: what is asked of arguments and results; what is donated is a training state.
    """
    own, donated = program.argument_marks, boundary.donated
    state = set(donated) or {i for i, _ in program.state(range(len(program.block.inputs)))}
    data = [i for i, v in enumerate(program.block.inputs) if v.shape and i not in state]
    by_batch = {i: _along(program.block.inputs[i], 0, mesh.atoms, mesh) for i in data}
    whole = {i: _along(program.block.inputs[i], None, (), mesh) for i in state}
    cut = {i: _along(v, _largest(v, mesh), mesh.atoms, mesh) for i in state for v in (program.block.inputs[i],)}
    known: list[dict[int, Mark]] = []
    for name, wanted in (
        ("data parallel", {**whole, **by_batch}),
        ("data parallel, state split (ZeRO, FSDP)", {**cut, **by_batch}),
        ("state split", cut),
        *_by_dimension(program, mesh, data),
    ):
        marks = {i: mark for i, mark in wanted.items() if mark is not None}
        marked = None if marks in known else _marked(program, marks)
        known.append(marks)
        if marked is not None:
            yield Preset(name, marked, own)


def presets(
    program: Program, mesh: Mesh, machine: Machine | None = None, boundary: Boundary = AS_MARKED
) -> Iterator[tuple[str, tuple[Planned, ...]]]:
    """All plans, each with its name, the best of that name first; bytes count if there is no machine."""
    yield AS_IT_IS, plans_of(program, mesh, machine, boundary=boundary)
    for preset in marked_presets(program, mesh, boundary):
        with contextlib.suppress(GShardError):  # a mark that does not fit one of the user's
            yield preset.name, preset.planned(mesh, machine, boundary)


def _marked_as(plan: Plan, marks: tuple[Mark | None, ...]) -> Plan:
    program = dataclasses.replace(plan.program, argument_marks=marks)
    return dataclasses.replace(plan, program=program, gap=None, counted="")


def _by_dimension(program: Program, mesh: Mesh, data: Sequence[int]) -> Iterator[tuple[str, dict[int, Mark | None]]]:
    """One of the largest dimensions over all devices; and over the last axis, with the batch over the others."""
    axes = {name: atoms for name, atoms in mesh.atoms_of.items() if atoms}
    names = DimensionNames(program)
    found = names.dimensions
    inputs = program.block.inputs
    everywhere, outside = (_bytes(found, values) for values in (found.labels, inputs))
    first = sorted(found.classes, key=lambda c: -outside.get(c.label, 0))[:_OUTSIDE]
    first += sorted(found.classes, key=lambda c: -everywhere.get(c.label, 0))[:_INSIDE]
    for c in dict.fromkeys(first):
        if not c.arguments or c.product:
            continue
        at = {i: found.labels[v].index(c.label) for i, v in enumerate(inputs) if c.label in found.labels[v]}
        called = names.of(c)
        yield f"{called} over all devices", {i: _mark_of(inputs[i], d, mesh.atoms, mesh) for i, d in at.items()}
        if len(axes) > 1:
            *others, last = axes
            rest = tuple(a for name in others for a in axes[name])
            batch = {i: _mark_of(inputs[i], 0, rest, mesh) for i in data if i not in at}
            own = {i: _mark_of(inputs[i], d, axes[last], mesh) for i, d in at.items()}
            yield f"{called} over {last}, batch over the rest", {**batch, **own}


def _bytes(found: Dimensions, values: Iterable[Value]) -> dict[str, int]:
    """The bytes of the values that have a dimension of each class."""
    held: dict[str, int] = {}
    for v in values:
        for label in set(found.labels[v]):
            held[label] = held.get(label, 0) + v.bytes
    return held


def _mark_of(v: Value, dim: int, atoms: Atoms, mesh: Mesh) -> Mark | None:
    """The mark that cuts a dimension over these atoms, and says nothing of the others; None where parts are unequal."""
    if v.shape[dim] % mesh.count(atoms):
        return None
    return mark_of_cut([atoms if d == dim else None for d in range(len(v.shape))], mesh)


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
