"""Runs the stages from a traced program to the per-device program, in order, and prices plans as they would run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gshard.core.mesh import Atoms, Mesh
from gshard.core.phases import collected_seldom, log_stage
from gshard.core.plan import AS_MARKED, Boundary, Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.core.spmd import SpmdProgram
from gshard.device.cost import WORTH, Cost, cost
from gshard.device.machine import Machine, machine_to_order
from gshard.emit.partition import partition
from gshard.planning.batched import batched
from gshard.planning.collective_matmuls import CollectiveMatmul, windowed
from gshard.planning.objective import Objective, bytes_on
from gshard.planning.propagate import propagate
from gshard.planning.propagated import Propagated
from gshard.planning.settled import settled
from gshard.remat.rematerialise import MemoryLimitError, rematerialise
from gshard.search.seconds import on_machine, seconds_on

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


def cheapest(
    propagated: Propagated, machine: Machine | None, *, strict: bool = False, boundary: Boundary = AS_MARKED
) -> tuple[Planned, ...]:
    """The plans of a settled program, the best first."""
    program, mesh = propagated.program, propagated.mesh
    if machine is not None:
        propagated = dataclasses.replace(propagated, mesh=on_machine(mesh, machine))

    def planned(known: Propagated, objective: Callable[[Mesh, tuple[Atoms, ...]], Objective]) -> Planned:
        plan = propagate(program, known.mesh, strict=strict, boundary=boundary, objective=objective, propagated=known)
        return Planned(plan)

    fewest_bytes = planned(propagated, bytes_on)
    if machine is None or not fewest_bytes.plan.counted:  # nothing was open
        return (fewest_bytes,)
    first_argument = len(program.captured)
    donated = [i - first_argument for i in boundary.donated]

    def priced(candidate: Planned) -> Planned:
        spmd = partition(candidate.plan)
        return dataclasses.replace(candidate, spmd=spmd, cost=cost(spmd, machine, donated))

    fewest_bytes = priced(fewest_bytes)
    call = fewest_bytes.seconds
    alone = planned(propagated, seconds_on(machine, call=call))
    if alone.plan.runs_as(fewest_bytes.plan):
        alone = dataclasses.replace(alone, spmd=fewest_bytes.spmd, cost=fewest_bytes.cost)
    else:
        alone = priced(alone)
    joined_mesh = on_machine(propagated.mesh, machine, joined=True)
    joined = planned(dataclasses.replace(propagated, mesh=joined_mesh), seconds_on(machine, joined=True, call=call))
    faster = sorted([alone, priced(joined)], key=lambda candidate: candidate.rank)
    return (*faster, fewest_bytes) if faster[0].is_better(fewest_bytes) else (fewest_bytes, *faster)


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
    windowed: CollectiveMatmul | None = (
        None  # selects contractions that may run as collective matmuls; None selects none
    )
    faster: bool = False  # use collective matmuls only if they make a call faster, by the cost model
    memory_limit: int | None = None  # bytes that a device may hold; the machine's memory if None
    recomputes: bool = False  # recompute values to keep within the memory limit

    @property
    def on(self) -> Machine:
        """The machine whose times decide which values are recomputed."""
        return self.machine or machine_to_order(self.mesh)

    @property
    def room(self) -> int:
        """Bytes that a device may hold."""
        return self.on.memory if self.memory_limit is None else self.memory_limit


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
    plans = cheapest(draft.propagated, settings.machine, strict=settings.strict, boundary=settings.boundary)
    return dataclasses.replace(draft, plans=plans)


def _batch(draft: Draft, settings: Settings) -> Draft:
    """Batches equal functions if that makes a call better, by the cost model."""
    assert draft.propagated is not None
    program = batched(draft.propagated.program, settings.mesh)
    if program is draft.propagated.program or not draft.best.plan.counted:  # there are none, or nothing is split
        return draft
    with_batches = _choose(dataclasses.replace(draft, propagated=settled(program, settings.mesh)), settings)
    if not _priced(with_batches.best, settings).is_better(_priced(draft.best, settings)):
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
            return _priced(run((RECOMPUTE,), Draft(plans=(planned,)), settings).best, settings).seconds
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
    without, with_rings = _priced(draft.best, settings), _priced(with_rings, settings)
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


def _plan(draft: Draft) -> Plan:
    return draft.best.plan


def _spmd(draft: Draft) -> SpmdProgram:
    return draft.spmd


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
EMITTING = PARTITION, RECOMPUTE


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


def plans_of(
    program: Program, mesh: Mesh, machine: Machine | None, boundary: Boundary = AS_MARKED
) -> tuple[Planned, ...]:
    """Completes the user's marks to plans, the best first; arguments and errors as of ``planning.propagate``."""
    settings = Settings(mesh if machine is None else on_machine(mesh, machine), machine, boundary=boundary)
    return run((PROPAGATE_AND_REWRITE, CHOOSE, BATCH), Draft(program), settings).plans


def as_run(
    planned: Planned,
    machine: Machine,
    donated: Iterable[int],
    limit: int | None = None,
    *,
    recomputes: bool = False,
    rings: bool = True,
) -> Planned:
    """The program that runs for a plan on a machine, with its cost."""
    mesh = planned.plan.mesh
    policy = CollectiveMatmul.of(None, mesh, machine) if rings and not planned.plan.rings else None
    settings = Settings(
        mesh, machine, donated=tuple(donated), windowed=policy, faster=True, memory_limit=limit, recomputes=recomputes
    )
    draft = run((COLLECTIVE_MATMULS, PARTITION), Draft(plans=(planned,)), settings)
    draft = run((RECOMPUTE,), draft.with_best(_priced(draft.best, settings)), settings)
    return _priced(draft.best, settings)


def _priced(planned: Planned, settings: Settings) -> Planned:
    """The plan with its per-device program and the cost of that."""
    if planned.spmd is not None and planned.cost is not None:
        return planned
    spmd = planned.spmd or partition(planned.plan)
    return dataclasses.replace(planned, spmd=spmd, cost=cost(spmd, settings.on, settings.donated))


# Prices plans as they would run, and checks whether they fit into the machine's memory.

# If no plan fits, contractions become collective matmuls if their gathered operands take more than this share of the
# limit. A gathered copy is held while its product runs, two at a time. Smaller ones take a few percent of the memory,
# and a ring for them would launch many kernels to free almost nothing.
_LARGE = 1 / 64


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PricedPlan:
    """A plan and its cost."""

    name: str  # ``searched``, or the name of a preset
    plan: Plan  # the plan
    cost: Cost  # the cost of its per-device program
    kept: int  # bytes at the peak without recomputation
    recomputed: bool = False  # whether values are recomputed so that the plan fits

    def __str__(self) -> str:
        return f"{self.name}: {self.cost}{', some of it computed twice to fit' if self.recomputed else ''}"

    __repr__ = __str__

    def rank(self, limit: float) -> tuple[bool, float]:
        """Orders plans, the better first: those that fit by time, the others by memory, up to rounding."""
        fits = self.cost.peak <= limit
        return not fits, float(f"{self.cost.seconds:.9g}") if fits else float(self.cost.peak)


@dataclasses.dataclass(eq=False)
class Pricing:
    """Prices plans as they would run."""

    machine: Machine  # the machine
    donated: list[int]  # arguments (counted without captured arrays) whose memory results may take
    limit: float  # bytes that a device may hold
    on_better: Callable[[PricedPlan], None] | None = None  # called with each plan that is better than all before
    known: list[PricedPlan] = dataclasses.field(default_factory=list)  # the plans that were priced

    def marked(self, name: str, program: Program, mesh: Mesh) -> PricedPlan:
        """Prices the plan that follows from a program's marks."""
        return self.add(name, *plans_of(program, mesh, self.machine, boundary=self.boundary(program)))

    def add(self, name: str, *plans: Planned) -> PricedPlan:
        """Prices several plans and returns the best; the first one unless it needs too much memory.

        If it does, the others, collective matmuls and recomputation are tried too.
        """
        options = [self._priced(name, planned) for planned in plans[:1]]
        if options[0].kept > self.limit:
            options += [self._priced(name, planned) for planned in plans[1:]]
            matmuls = [windowed(planned.plan, CollectiveMatmul(above=self.limit * _LARGE)) for planned in plans]
            options += [self._priced(name, Planned(plan)) for plan in matmuls if plan.rings]
            for option in options.copy():
                if option.kept > self.limit >= option.cost.memory.fixed:
                    options.append(self._recomputed(option))
        best = min(options, key=lambda option: option.rank(self.limit))
        if self.on_better is not None and all(
            best.rank(self.limit) < known_plan.rank(self.limit) for known_plan in self.known
        ):
            self.on_better(best)
        self.known.append(best)
        return best

    def _priced(self, name: str, planned: Planned) -> PricedPlan:
        emitted = as_run(planned, self.machine, self.donated, int(self.limit))
        assert emitted.cost is not None
        return PricedPlan(name, emitted.plan, emitted.cost, emitted.cost.peak)

    def boundary(self, program: Program) -> Boundary:
        """The boundary as in ``jit``: a result that replaces an argument leaves in the argument's sharding."""
        return Boundary(tuple(len(program.captured) + i for i in self.donated))

    def _recomputed(self, option: PricedPlan) -> PricedPlan:
        with contextlib.suppress(MemoryLimitError):
            planned = as_run(
                Planned(option.plan), self.machine, self.donated, int(self.limit), recomputes=True, rings=False
            )
            assert planned.cost is not None
            return dataclasses.replace(option, cost=planned.cost, recomputed=True)
        return option
