"""Makes the plans that people write by hand, from marks on arguments.

Data parallelism; a split state (ZeRO, FSDP); and one class of dimensions over all devices or beside the batch
(Megatron, GShard, sequence and spatial parallelism). A result of search is never worse than a preset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gshard.core.mark import Mark, mark_of_cut
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import AS_MARKED, Boundary, Plan
from gshard.core.program import Program, Value
from gshard.device.machine import Machine
from gshard.naming.argument_names import path_of_name
from gshard.naming.dimension_classes import Dimensions, dimensions_of, of_equal_layers
from gshard.planning.layer_stacks import schedules_of
from gshard.planning.reshard_costs import axes_of, joined
from gshard.planning.settled import settled
from gshard.search.pipeline import Planned, plans_of

AS_IT_IS = "as it is marked"
DATA_PARALLEL, SPLIT_STATE = "data parallel", "data parallel, state split (ZeRO, FSDP)"
_OUTSIDE, _INSIDE = 2, 1  # the number of largest dimensions of arguments, and of all values, that have presets


@dataclasses.dataclass(frozen=True, eq=False)
class Preset:
    """Marks on arguments, as people write them."""

    name: str  # the name of the preset
    program: Program  # the program with the marks of the preset
    own: tuple[Mark | None, ...]  # the marks of the program without the preset

    def work(self, mesh: Mesh) -> tuple[int, int]:
        """Orders presets by their planning time, the shortest first. The time is exponential in the first number."""
        propagated = settled(self.program, mesh)
        known = {*propagated.shardings.values(), *propagated.moved.values()}
        decided = sum(len(s.dims) for s in propagated.shardings.values() if s.atoms)
        return len(joined(mesh, axes_of(mesh, known), known)), decided + sum(map(len, propagated.undecided.values()))

    def planned(self, mesh: Mesh, machine: Machine | None, boundary: Boundary) -> tuple[Planned, ...]:
        """The plans of the program without the preset's marks, the best first."""
        plans = plans_of(self.program, mesh, machine, boundary=boundary)
        return tuple(dataclasses.replace(planned, plan=self.unmarked(planned.plan)) for planned in plans)

    def unmarked(self, plan: Plan) -> Plan:
        """A plan without the preset's marks, except for stages of pipelines that the plan adds."""
        stages = schedules_of(plan.program)
        marks = tuple(plan.program.argument_marks[i] if i in stages else mark for i, mark in enumerate(self.own))
        program = dataclasses.replace(plan.program, argument_marks=marks)
        return dataclasses.replace(plan, program=program, gap=None, counted="")


def marked_presets(program: Program, mesh: Mesh, boundary: Boundary = AS_MARKED) -> Iterator[Preset]:
    """The presets of a program, the usual ones first, without the program under its own marks."""
    own_marks, state = program.argument_marks, _state(program, boundary)
    data = data_arguments(program, boundary)
    by_batch = {i: _along(program.block.inputs[i], 0, mesh.atoms, mesh) for i in data}
    replicated = {i: _along(program.block.inputs[i], None, (), mesh) for i in state}
    split_state = {i: _along(v, _largest(v, mesh), mesh.atoms, mesh) for i in state for v in (program.block.inputs[i],)}
    earlier_marks: list[dict[int, Mark]] = []
    for name, possible_marks in (
        (DATA_PARALLEL, {**replicated, **by_batch}),
        (SPLIT_STATE, {**split_state, **by_batch}),
        ("state split", split_state),
        *_by_dimension(program, mesh, data),
    ):
        marks = {i: mark for i, mark in possible_marks.items() if mark is not None}
        marked = program if marks in earlier_marks else with_argument_marks(program, marks)
        earlier_marks.append(marks)
        if marked is not program:
            yield Preset(name, marked, own_marks)


def expected_presets(program: Program, mesh: Mesh, boundary: Boundary = AS_MARKED) -> Iterator[Preset]:
    """The presets that people try first: data parallelism, a split state (FSDP), tensor parallelism beside the batch.

    Arguments as of ``marked_presets``. On a mesh of one axis tensor parallelism is over all devices.
    """
    is_tensor = "over all devices" if len(mesh.axes) == 1 else "batch over the rest"
    for preset in marked_presets(program, mesh, boundary):
        if preset.name in (DATA_PARALLEL, SPLIT_STATE):
            yield preset
        elif preset.name.endswith(is_tensor):
            yield preset
            return


def data_arguments(program: Program, boundary: Boundary) -> list[int]:
    """The inputs that are neither donated nor the state of a training step. Their first dimension may be a batch."""
    state = _state(program, boundary)
    return [i for i, v in enumerate(program.block.inputs) if v.shape and i not in state]


def _state(program: Program, boundary: Boundary) -> set[int]:
    return set(boundary.donated) or {i for i, _ in program.state(range(len(program.block.inputs)))}


def _by_dimension(program: Program, mesh: Mesh, data: Sequence[int]) -> Iterator[tuple[str, dict[int, Mark | None]]]:
    """Splits one of the largest dimensions over all devices; or over the last axis, with the batch over the others."""
    axes = {name: atoms for name, atoms in mesh.atoms_of.items() if atoms}
    dimensions = of_equal_layers(dimensions_of(program))
    inputs = program.block.inputs
    bytes_of_values, bytes_of_inputs = (_bytes(dimensions, values) for values in (dimensions.labels, inputs))
    largest_classes = sorted(dimensions.classes, key=lambda c: -bytes_of_inputs.get(c.label, 0))[:_OUTSIDE]
    largest_classes += sorted(dimensions.classes, key=lambda c: -bytes_of_values.get(c.label, 0))[:_INSIDE]
    for c in dict.fromkeys(largest_classes):
        if not c.arguments or c.product:
            continue
        dim_of_input = {
            i: dimensions.labels[v].index(c.label) for i, v in enumerate(inputs) if c.label in dimensions.labels[v]
        }
        largest = max(dim_of_input, key=lambda i: inputs[i].bytes)
        place = f"dimension {dim_of_input[largest]} of {path_of_name(program.names[largest])}"
        class_name = f"{c.names[0] if c.names else place} ({c.size})"
        yield (
            f"{class_name} over all devices",
            {i: split_over(inputs[i], d, mesh.atoms, mesh) for i, d in dim_of_input.items()},
        )
        if len(axes) > 1:
            *others, last = axes
            other_atoms = tuple(a for name in others for a in axes[name])
            batch = {i: split_over(inputs[i], 0, other_atoms, mesh) for i in data if i not in dim_of_input}
            split_marks = {i: split_over(inputs[i], d, axes[last], mesh) for i, d in dim_of_input.items()}
            yield f"{class_name} over {last}, batch over the rest", {**batch, **split_marks}


def _bytes(dimensions: Dimensions, values: Iterable[Value]) -> dict[str, int]:
    """For each class of dimensions, the bytes of the values with such a dimension."""
    bytes_of: dict[str, int] = {}
    for v in values:
        for label in set(dimensions.labels[v]):
            bytes_of[label] = bytes_of.get(label, 0) + v.bytes
    return bytes_of


def split_over(v: Value, dim: int, atoms: Atoms, mesh: Mesh) -> Mark | None:
    """The mark that splits a dimension over these atoms and leaves the others open; None if parts are unequal."""
    if v.shape[dim] % mesh.count(atoms):
        return None
    return mark_of_cut([atoms if d == dim else None for d in range(len(v.shape))], mesh)


def _largest(v: Value, mesh: Mesh) -> int | None:
    """The largest dimension that divides evenly over all devices; None if there is none."""
    even = [d for d, n in enumerate(v.shape) if n and n % mesh.size == 0]
    return max(even, key=lambda d: (v.shape[d], -d), default=None)


def _along(v: Value, dim: int | None, atoms: Atoms, mesh: Mesh) -> Mark | None:
    """The mark that splits a dimension over these atoms; one that replicates if there is no such dimension."""
    if not v.shape:
        return None
    if dim is None or v.shape[dim] % mesh.count(atoms):
        return Mark("replicate")
    return mark_of_cut([atoms if d == dim else () for d in range(len(v.shape))], mesh)


def with_argument_marks(program: Program, marks: Mapping[int, Mark]) -> Program:
    """The program with marks on inputs that have none; the same object if that changes nothing."""
    first = len(program.captured)
    new = tuple(mark or marks.get(first + i) for i, mark in enumerate(program.argument_marks))
    return program if new == program.argument_marks else dataclasses.replace(program, argument_marks=new)
