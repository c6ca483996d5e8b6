"""Tries pipelines over the layers of a program: stages, micro-batches and schedule, by modelled time.

A pipeline marks the stacks (``planning.layer_stacks``) and splits the batch over the other devices; planning chooses
the rest. An estimate chooses the micro-batches, and leaves out what cannot be faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from gshard.core.mark import Schedule, atoms_of_partitions
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Boundary
from gshard.core.program import Program
from gshard.device.cost import Cost
from gshard.planning.layer_stacks import LayerStacks, all_schedules, layer_stacks, with_schedules
from gshard.search.pipeline import PricedPlan
from gshard.search.presets import Preset, data_arguments, split_over, with_argument_marks

_SPLITS = 4  # ways to split the stages that are planned
_PER_STAGE = 1, 2, 4, 8  # micro-batches for each stage
_ROUNDS = 2  # of the best pipeline, tried beside one round


def best_pipeline(
    program: Program,
    mesh: Mesh,
    boundary: Boundary,
    known: Iterable[PricedPlan],
    limit: float,
    price: Callable[[Preset], PricedPlan | None],
) -> Preset | None:
    """The best pipeline over the layers of a program; None if it has no loop over layers, or pipelines already, or if
    no plan is known.
    """
    costs, stacks = [plan.cost for plan in known], layer_stacks(program)
    if not costs or stacks is None or any(all_schedules(program)):
        return None
    shared = min(costs, key=_work)
    goal = min((cost.seconds for cost in costs if cost.peak <= limit), default=math.inf)
    tried: dict[Preset, tuple[PricedPlan, Schedule]] = {}

    def best() -> Preset | None:
        return min(tried, key=lambda preset: tried[preset][0].rank(limit), default=None)

    def try_one(schedule: Schedule) -> None:
        preset = _preset(program, mesh, boundary, stacks, schedule)
        priced = None if preset is None else price(preset)
        if preset is not None and priced is not None:
            tried[preset] = priced, schedule

    estimates: list[tuple[float, Schedule]] = []
    for over, atoms in _splits(mesh, stacks.layers):
        possible = [Schedule(over, m) for m in _micro_batches(mesh, atoms, stacks.rows)]
        each = [(_estimate(shared, schedule, mesh.count(atoms)), schedule) for schedule in possible]
        estimates += sorted(each, key=lambda pair: pair[0])[:1]
    for seconds, schedule in sorted(estimates, key=lambda pair: pair[0])[:_SPLITS]:
        so_far = min([goal, *(plan.cost.seconds for plan, _ in tried.values() if plan.cost.peak <= limit)])
        if seconds < so_far:
            try_one(schedule)
    if (first := best()) is not None:
        priced, schedule = tried[first]
        stages = mesh.count(atoms_of_partitions(schedule.over, mesh))
        in_rounds = dataclasses.replace(schedule, rounds=_ROUNDS)
        is_possible = stacks.layers % (_ROUNDS * stages) == 0 and schedule.micro_batches >= stages
        if is_possible and _estimate(shared, in_rounds, stages) < priced.cost.seconds:
            try_one(in_rounds)
    return best()


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
    return Preset(name, marked, program.argument_marks)
