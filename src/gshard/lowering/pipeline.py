"""Runs the stages from a traced program to the per-device program, in order."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gshard.core.mesh import Atoms, Mesh
from gshard.core.phases import collected_seldom, log_stage
from gshard.core.plan import AS_MARKED, Boundary, Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.core.spmd import SpmdProgram
from gshard.device.cost import WORTH, Cost, cost
from gshard.device.machine import Machine, machine_of
from gshard.emit.partition import partition
from gshard.lowering.seconds import on_machine, seconds_on
from gshard.planning.batched import batched
from gshard.planning.collective_matmuls import CollectiveMatmul, windowed
from gshard.planning.objective import Objective, bytes_on
from gshard.planning.propagate import propagate
from gshard.planning.propagated import Propagated
from gshard.planning.settled import settled
from gshard.remat.rematerialise import MemoryLimitError, rematerialise

# Chooses the plan of a settled program: the stage "choose".


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with its per-device program and cost if choosing it required them."""

    plan: Plan  # the plan
    spmd: SpmdProgram | None = None  # the per-device program; None if it is not emitted yet
    cost: Cost | None = None  # the cost of that program; None if it is not priced yet
    planning_seconds: float = 0.0  # processor time of this thread that planning took; 0 if not measured

    @property
    def seconds(self) -> float:
        """The seconds of a call; ``inf`` if the plan is not priced."""
        return math.inf if self.cost is None else self.cost.seconds

    @property
    def rank(self) -> tuple[bool, float]:
        """Orders priced plans, the better first: plans that fit the machine's memory by time, the others by memory."""
        assert self.cost is not None
        fits = self.cost.fits
        return not fits, self.cost.seconds if fits else self.cost.peak

    def is_better(self, other: Planned) -> bool:
        """Whether this plan fits memory and the other does not, or saves time, or saves memory in no more time.

        Both plans are priced. To save is to save more than ``WORTH`` leaves.
        """
        (fits, value), (other_fits, other_value) = self.rank, other.rank
        if fits != other_fits:  # True for a plan that does not fit
            return fits < other_fits
        assert self.cost is not None
        assert other.cost is not None
        return value < WORTH * other_value or (value <= other_value and self.cost.peak < WORTH * other.cost.peak)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The inputs of the stages besides the program."""

    mesh: Mesh  # the devices
    machine: Machine | None = None  # planning minimises seconds on it; bytes if None
    strict: bool = False  # refuse primitives without a rule
    boundary: Boundary = AS_MARKED  # constraints on arguments and results, besides marks
    donated: tuple[int, ...] = ()  # arguments (counted without captured arrays) whose memory results may take
    # makes the plan of a traced program, if it is saved or searched; None chooses one
    given: Callable[[Program, Mesh, Boundary], Plan] | None = None
    # selects contractions that may run as collective matmuls; None selects none
    windowed: CollectiveMatmul | None = None
    faster: bool = False  # use collective matmuls only if they make a call faster, by the cost model
    memory_limit: int | None = None  # bytes that a device may hold; the machine's memory if None
    recomputes: bool = False  # recompute values to keep within the memory limit

    @property
    def on(self) -> Machine:
        """The machine whose times decide which values are recomputed."""
        return self.machine or machine_of(self.mesh)

    @property
    def room(self) -> int:
        """Bytes that a device may hold."""
        return self.on.memory if self.memory_limit is None else self.memory_limit


def cheapest(propagated: Propagated, settings: Settings) -> tuple[Planned, ...]:
    """The plans of a settled program, the best first."""
    program, mesh, machine, boundary = propagated.program, propagated.mesh, settings.machine, settings.boundary
    if machine is not None:
        propagated = dataclasses.replace(propagated, mesh=on_machine(mesh, machine))

    def planned(known: Propagated, objective: Callable[[Mesh, tuple[Atoms, ...]], Objective]) -> Planned:
        plan = propagate(
            program, known.mesh, strict=settings.strict, boundary=boundary, objective=objective, propagated=known
        )
        return Planned(plan)

    fewest_bytes = planned(propagated, bytes_on)
    if machine is None or not fewest_bytes.plan.counted:  # nothing was open
        return (fewest_bytes,)
    settings = dataclasses.replace(settings, donated=tuple(i - len(program.captured) for i in boundary.donated))
    fewest_bytes = priced(fewest_bytes, settings)
    call = fewest_bytes.seconds
    alone = planned(propagated, seconds_on(machine, call=call))
    if alone.plan.runs_as(fewest_bytes.plan):
        alone = dataclasses.replace(alone, spmd=fewest_bytes.spmd, cost=fewest_bytes.cost)
    joined_mesh = on_machine(propagated.mesh, machine, joined=True)
    joined = planned(dataclasses.replace(propagated, mesh=joined_mesh), seconds_on(machine, joined=True, call=call))
    faster = sorted([priced(alone, settings), priced(joined, settings)], key=lambda candidate: candidate.rank)
    return (*faster, fewest_bytes) if faster[0].is_better(fewest_bytes) else (fewest_bytes, *faster)


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A program between two stages."""

    program: Program | None = None  # the traced program; None if the draft begins with a plan
    propagated: Propagated | None = None  # the settled program with its propagated shardings; None if the plan is given
    plans: tuple[Planned, ...] = ()  # the plans, the best first. Later stages work on the best.

    @property
    def best(self) -> Planned:
        """The best plan, with its per-device program and cost as far as they exist."""
        return self.plans[0]

    @property
    def spmd(self) -> SpmdProgram:
        """The per-device program of the best plan."""
        assert self.best.spmd is not None, "the stage 'partition' comes first"
        return self.best.spmd

    def with_best(self, best: Planned) -> Draft:
        """The draft with another best plan."""
        return dataclasses.replace(self, plans=(best, *self.plans[1:]))

    def with_program(self, spmd: SpmdProgram) -> Draft:
        """The draft with another per-device program for the best plan, not priced yet."""
        return self.with_best(dataclasses.replace(self.best, spmd=spmd, cost=None))

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.program.name if self.program is not None else self.best.plan.program.name


class Stage(NamedTuple):
    """One stage."""

    name: str  # the name in the log
    run: Callable[[Draft, Settings], Draft]  # makes the next draft
    # the part of the draft that the log shows; None for a stage that logs its own steps
    shown: Callable[[Draft], object] | None
    applies: Callable[[Settings], bool] = lambda settings: True  # whether the stage runs under these settings


def _settle(draft: Draft, settings: Settings) -> Draft:
    assert draft.program is not None
    return dataclasses.replace(draft, propagated=settled(draft.program, settings.mesh))


def _choose(draft: Draft, settings: Settings) -> Draft:
    assert draft.propagated is not None
    return dataclasses.replace(draft, plans=cheapest(draft.propagated, settings))


def _batch(draft: Draft, settings: Settings) -> Draft:
    """Batches equal functions if that makes a call better, by the cost model."""
    assert draft.propagated is not None
    program = batched(draft.propagated.program, settings.mesh)
    if program is draft.propagated.program or not draft.best.plan.counted:  # there are none, or nothing is split
        return draft
    with_batches = _choose(dataclasses.replace(draft, propagated=settled(program, settings.mesh)), settings)
    if not priced(with_batches.best, settings).is_better(priced(draft.best, settings)):
        return draft
    log_stage(BATCH.name, draft.name, with_batches, _plan)
    return with_batches


def _choose_within_limit(draft: Draft, settings: Settings) -> Draft:
    """Puts the plan first that is fastest within the memory limit, with the values that each must recompute."""
    assert settings.machine is not None
    if draft.best.cost is None or draft.best.cost.peak <= settings.room:
        return draft

    def seconds_within(planned: Planned) -> float:
        try:
            return priced(run((RECOMPUTE,), Draft(plans=(planned,)), settings).best, settings).seconds
        except MemoryLimitError:
            return math.inf

    return dataclasses.replace(draft, plans=tuple(sorted(draft.plans, key=seconds_within)))


def _take_given(draft: Draft, settings: Settings) -> Draft:
    assert draft.program is not None
    assert settings.given is not None
    plan = settings.given(draft.program, settings.mesh, settings.boundary)
    return dataclasses.replace(draft, plans=(Planned(plan),))


def _use_collective_matmuls(draft: Draft, settings: Settings) -> Draft:
    """Uses collective matmuls. With ``faster``, it emits and prices both programs and compares them."""
    plan = windowed(draft.best.plan, settings.windowed)
    if not plan.rings:
        return draft
    with_rings = dataclasses.replace(draft.best, plan=plan, spmd=None, cost=None)
    if not settings.faster or settings.machine is None:
        return draft.with_best(with_rings)
    without, with_rings = priced(draft.best, settings), priced(with_rings, settings)
    if with_rings.seconds >= without.seconds:
        return draft.with_best(without)
    saving = without.seconds, with_rings.seconds, settings.machine.name
    return draft.with_best(dataclasses.replace(with_rings, plan=dataclasses.replace(plan, spared=saving)))


def _partition(draft: Draft, settings: Settings) -> Draft:
    best = draft.best
    return draft if best.spmd is not None else draft.with_program(partition(best.plan))


def _recompute(draft: Draft, settings: Settings) -> Draft:
    spmd = rematerialise(draft.spmd, settings.room, settings.on, sorted(settings.donated))
    return draft if spmd is draft.spmd else draft.with_program(spmd)


_plan, _spmd = operator.attrgetter("best.plan"), operator.attrgetter("spmd")

PROPAGATE_AND_REWRITE = Stage(  # ``planning.settled`` has the loop
    "propagate, rewrite where split", _settle, None, lambda settings: settings.given is None
)
CHOOSE = Stage("choose", _choose, _plan, lambda settings: settings.given is None)
BATCH = Stage("batch equal functions", _batch, None, lambda settings: settings.given is None)
CHOOSE_WITHIN_LIMIT = Stage(
    "choose within the memory limit", _choose_within_limit, _plan,
    lambda settings: settings.given is None and settings.recomputes and settings.machine is not None,
)  # fmt: skip
TAKE_GIVEN = Stage("take the given plan", _take_given, _plan, lambda settings: settings.given is not None)
COLLECTIVE_MATMULS = Stage(
    "collective matmuls", _use_collective_matmuls, _plan, lambda settings: settings.windowed is not None
)
PARTITION = Stage("partition", _partition, _spmd)
RECOMPUTE = Stage("recompute", _recompute, _spmd, lambda settings: settings.recomputes)

PLANNING = (PROPAGATE_AND_REWRITE, CHOOSE, BATCH, CHOOSE_WITHIN_LIMIT, TAKE_GIVEN, COLLECTIVE_MATMULS)


@collected_seldom()
@with_tables
def run(stages: Sequence[Stage], draft: Draft, settings: Settings) -> Draft:
    """Runs the stages that apply, in order."""
    for stage in stages:
        if stage.applies(settings):
            draft = stage.run(draft, settings)
            if stage.shown is not None:
                log_stage(stage.name, draft.name, draft, stage.shown)
    return draft


def priced(planned: Planned, settings: Settings) -> Planned:
    """The plan with its per-device program and the cost of that."""
    if planned.spmd is not None and planned.cost is not None:
        return planned
    spmd = planned.spmd or partition(planned.plan)
    return dataclasses.replace(planned, spmd=spmd, cost=cost(spmd, settings.on, settings.donated))
