"""Makes the plans that people write by hand, from marks on arguments.

Data parallelism; a split state (ZeRO, FSDP); and one class of dimensions over all devices or beside the batch
(Megatron, GShard, sequence and spatial parallelism). A result of search is never worse than a preset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gshard.core.mark import REPLICATED, Mark, Schedule, atoms_of_partitions, mark_of_cut
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import AS_MARKED, Boundary, Plan
from gshard.core.program import Program, Value
from gshard.device.cost import Cost
from gshard.device.machine import Machine
from gshard.lowering.pipeline import Planned
from gshard.naming.argument_names import path_of_name
from gshard.naming.dimension_classes import most_common_dimension
from gshard.planning.layer_stacks import LayerStacks, all_schedules, layer_stacks, schedules_of, with_schedules
from gshard.search.pricing import PricedPlan, plans_of

AS_IT_IS = "as it is marked"
DATA_PARALLEL, SPLIT_STATE = "data parallel", "data parallel, state split (ZeRO, FSDP)"


@dataclasses.dataclass(frozen=True, eq=False)
class Preset:
    """Marks on arguments, as people write them."""

    name: str  # the name of the preset
    program: Program  # the program with the marks of the preset
    own: tuple[Mark | None, ...]  # the marks of the program without the preset
    over: int | str | tuple[str, ...] = ""  # what the stages of a pipeline are split over

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
    """The presets that people try first: data parallelism, a split state (FSDP), tensor parallelism beside the batch.

    On a mesh of one axis tensor parallelism is over all devices. The program under its own marks is none of them.
    """
    own_marks, state = program.argument_marks, _state(program, boundary)
    inputs, data = program.block.inputs, data_arguments(program, boundary)
    by_batch = {i: _along(inputs[i], 0, mesh.atoms, mesh) for i in data}
    replicated = {i: _along(inputs[i], None, (), mesh) for i in state}
    split_state = {i: _along(inputs[i], _largest(inputs[i], mesh), mesh.atoms, mesh) for i in state}
    seen: list[dict[int, Mark]] = []
    for name, possible_marks in (
        (DATA_PARALLEL, {**replicated, **by_batch}),
        (SPLIT_STATE, {**split_state, **by_batch}),
        *_by_dimension(program, mesh, data),
    ):
        marks = {i: mark for i, mark in possible_marks.items() if mark is not None}
        marked = program if marks in seen else with_argument_marks(program, marks)
        seen.append(marks)
        if marked is not program:
            yield Preset(name, marked, own_marks)


def data_arguments(program: Program, boundary: Boundary) -> list[int]:
    """The inputs that are neither donated nor the state of a training step. Their first dimension may be a batch."""
    state = _state(program, boundary)
    return [i for i, v in enumerate(program.block.inputs) if v.shape and i not in state]


def _state(program: Program, boundary: Boundary) -> set[int]:
    return set(boundary.donated) or {i for i, _ in program.state(range(len(program.block.inputs)))}


def _by_dimension(program: Program, mesh: Mesh, data: Sequence[int]) -> Iterator[tuple[str, dict[int, Mark | None]]]:
    """Splits the largest dimension of arguments over all devices; or over the last axis, with the batch over others."""
    axes = {name: atoms for name, atoms in mesh.atoms_of.items() if atoms}
    first = len(program.captured)
    dim_of_input = {first + i: d for i, d in most_common_dimension(program).items()}
    if not dim_of_input or not axes:
        return
    inputs = program.block.inputs
    largest = max(dim_of_input, key=lambda i: inputs[i].bytes)
    d = dim_of_input[largest]
    class_name = f"dimension {d} of {path_of_name(program.names[largest])} ({inputs[largest].shape[d]})"
    *others, last = axes
    split_marks = {i: split_over(inputs[i], d, axes[last], mesh) for i, d in dim_of_input.items()}
    if not others:
        yield f"{class_name} over all devices", split_marks
        return
    other_atoms = tuple(a for name in others for a in axes[name])
    batch = {i: split_over(inputs[i], 0, other_atoms, mesh) for i in data if i not in dim_of_input}
    yield f"{class_name} over {last}, batch over the rest", {**batch, **split_marks}


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
        return REPLICATED
    return mark_of_cut([atoms if d == dim else () for d in range(len(v.shape))], mesh)


def with_argument_marks(program: Program, marks: Mapping[int, Mark]) -> Program:
    """The program with marks on inputs that have none; the same object if that changes nothing."""
    first = len(program.captured)
    new = tuple(mark or marks.get(first + i) for i, mark in enumerate(program.argument_marks))
    return program if new == program.argument_marks else dataclasses.replace(program, argument_marks=new)


# Pipelines over the layers of a program: stages, micro-batches and schedule. A pipeline marks the stacks and splits the
# batch over the other devices. An estimate chooses the micro-batches, and leaves out what cannot be faster.

_PER_STAGE = 1, 2, 4, 8  # micro-batches for each stage


def pipelines(
    program: Program, mesh: Mesh, boundary: Boundary, known: Iterable[PricedPlan], beside: Preset | None = None
) -> Iterator[tuple[float, Preset]]:
    """Pipelines over the layers of a program, the most promising one first, with the seconds that each takes at least.

    With ``beside``, the same pipeline in two rounds, whose bubble is about half as large, and which sends more. There
    is none if the program has no loop over layers, or pipelines already, or if no plan is known.
    """
    costs, stacks = [plan.cost for plan in known], layer_stacks(program)
    if not costs or stacks is None or any(all_schedules(program)):
        return
    shared, rounds = min(costs, key=_work), 1 if beside is None else 2
    estimates: list[tuple[float, Schedule]] = []
    for over, atoms in _splits(mesh, stacks.layers):
        stages = mesh.count(atoms)
        possible = [Schedule(over, m, rounds) for m in _micro_batches(mesh, atoms, stacks.rows)]
        if beside is not None:
            is_possible = over == beside.over and stacks.layers % (rounds * stages) == 0
            possible = [schedule for schedule in possible if is_possible and schedule.micro_batches >= stages]
        each = [(_estimate(shared, schedule, stages), schedule) for schedule in possible]
        estimates += sorted(each, key=lambda pair: pair[0])[:1]
    for seconds, schedule in sorted(estimates, key=lambda pair: pair[0]):
        if (preset := _preset(program, mesh, boundary, stacks, schedule)) is not None:
            yield seconds, preset


def _work(cost: Cost) -> float:
    """Seconds of arithmetic and of memory traffic."""
    return sum(seconds for what, seconds in cost.by_bound.items() if what in ("compute", "memory"))


def _estimate(shared: Cost, schedule: Schedule, stages: int) -> float:
    """Seconds of a pipeline, at least about: nothing is sent, and everything is inside of the loops."""
    turns, rounds = schedule.turns(stages), schedule.rounds
    launches = shared.by_bound.get("launch", 0.0) * turns / (stages * rounds)
    return _work(shared) * turns / (schedule.micro_batches * rounds) + launches


def _splits(mesh: Mesh, layers: int) -> list[tuple[int | str, Atoms]]:
    """What stages may be split over: axes, then numbers of parts, the fewest first."""
    named: dict[Atoms, int | str] = {atoms: name for name, atoms in mesh.atoms_of.items()}
    for parts in range(2, mesh.size + 1):
        if mesh.size % parts == 0:
            named.setdefault(atoms_of_partitions(parts, mesh), parts)
    return [(over, atoms) for atoms, over in named.items() if atoms and layers % mesh.count(atoms) == 0]


def _micro_batches(mesh: Mesh, stages: Atoms, rows: int) -> list[int]:
    """The numbers of micro-batches to try, in order: near multiples of the stages; the other devices split each."""
    others = mesh.size // mesh.count(stages)
    limits = [min(n * mesh.count(stages), rows) for n in _PER_STAGE]
    numbers = range(1, max(limits) + 1)
    possible = [m for m in numbers if rows % m == 0 and (rows % others or rows // m % others == 0)]
    return sorted({max((m for m in possible if m <= limit), default=1) for limit in limits} - {1})


def _preset(program: Program, mesh: Mesh, boundary: Boundary, stacks: LayerStacks, schedule: Schedule) -> Preset | None:
    """The program with its layers as stages, and the batch over the other devices; None if a stack has a mark."""
    first = len(program.captured)
    if stacks.arguments[0] < first:
        return None
    marked = with_schedules(program, {i - first: schedule for i in stacks.arguments})
    if marked is None:
        return None
    stages = atoms_of_partitions(schedule.over, mesh)
    others = tuple(a for a in mesh.atoms if a not in stages)
    data = [i for i in data_arguments(program, boundary) if others and i not in stacks.arguments]
    of_data = {i: split_over(program.block.inputs[i], 0, others, mesh) for i in data}
    marked = with_argument_marks(marked, {i: mark for i, mark in of_data.items() if mark is not None})
    over = schedule.over if isinstance(schedule.over, str) else f"{schedule.over} parts"
    rounds = f", {schedule.rounds} rounds" if schedule.rounds > 1 else ""
    beside = ", batch over the rest" if others else ""
    name = f"pipeline over {over}, {schedule.micro_batches} micro-batches{rounds}{beside}"
    return Preset(name, marked, program.argument_marks, schedule.over)
