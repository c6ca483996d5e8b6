"""Pipeline: the stages from a traced program to the program that every device runs, in order.

    trace ──▶ propagate ⇄ rewrite where split ──▶ choose ──▶ collective matmuls ──▶ partition ──▶ recompute ──▶ prefetch

``PLANNING`` ends with a plan, ``EMITTING`` with the per-device program; ``compile`` takes that. ``jit``, ``explain``,
``search`` with its presets, the command line and plans that are read back all run these stages, so one program has one
plan and one modelled time. Tracing comes before the pipeline, because a traced program serves several meshes, and so
does the order of devices (``planning.propagate.in_best_order``), which is a property of the mesh. Where XLA needs more
memory than was modelled, compiling runs ``recompute`` again with less (``remat.fit``).

Every stage logs what it made as one DEBUG record of the logger ``gshard.stages``::

    logging.basicConfig()
    logging.getLogger("gshard.stages").setLevel(logging.DEBUG)
    gshard.explain(f, x, mesh=8)             # prints the program, the plan or the per-device program after each stage
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gshard.core.mesh import Mesh
from gshard.core.phases import log_stage
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.core.program_boundary import AS_MARKED, Boundary
from gshard.core.spmd import SpmdProgram
from gshard.device.cost import cost
from gshard.device.hardware import machine_to_order
from gshard.device.machine import Machine
from gshard.emit.partition import partition
from gshard.planning.collective_matmuls import CollectiveMatmul
from gshard.planning.propagated import Propagated
from gshard.planning.rings import Policy, windowed
from gshard.planning.settled import settled
from gshard.remat.prefetch import prefetched
from gshard.remat.rematerialise import rematerialise
from gshard.search.planned import Planned, cheapest
from gshard.search.seconds import on_machine


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What the stages are run for.

    Attributes:
        mesh: the devices.
        machine: planning is by seconds on it; by bytes if None.
        strict: refuse primitives that have no rule.
        boundary: constraints on arguments and results, besides marks.
        donated: arguments (counted without captured arrays) whose memory results may take.
        given: makes the plan of a settled program, where it is saved or searched; None chooses one.
        windowed: which contractions may be collective matmuls; None if none may.
        faster: use collective matmuls only if a call is faster with them, by the cost model.
        memory_limit: bytes that a device may hold; the machine's memory if None.
        recomputes: recompute values to keep to the memory limit.
    """

    mesh: Mesh
    machine: Machine | None = None
    strict: bool = False
    boundary: Boundary = AS_MARKED
    donated: tuple[int, ...] = ()
    given: Callable[[Program, Mesh, Boundary], Plan] | None = None
    windowed: Policy | None = None
    faster: bool = False
    memory_limit: int | None = None
    recomputes: bool = False

    @property
    def on(self) -> Machine:
        """The machine whose times decide what is recomputed."""
        return self.machine or machine_to_order(self.mesh)

    @property
    def room(self) -> int:
        """Bytes that a device may hold."""
        return self.on.memory if self.memory_limit is None else self.memory_limit


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A program between two stages.

    Attributes:
        program: the traced program; None for a plan that is made.
        propagated: the settled program with what follows from its marks.
        plans: plans of it, the best first: later stages work on this one.
    """

    program: Program | None = None
    propagated: Propagated | None = None
    plans: tuple[Planned, ...] = ()

    @property
    def best(self) -> Planned:
        """The best plan, its per-device program, if that is made, and what this costs, if that is known."""
        return self.plans[0]

    @property
    def spmd(self) -> SpmdProgram:
        """The per-device program of the best plan."""
        assert self.best.spmd is not None, "the stage 'partition' comes first"
        return self.best.spmd

    def with_best(self, best: Planned) -> Draft:
        """The same with another best plan."""
        return dataclasses.replace(self, plans=(best, *self.plans[1:]))

    def with_program(self, spmd: SpmdProgram) -> Draft:
        """The same with another per-device program for the best plan, not priced yet."""
        return self.with_best(dataclasses.replace(self.best, spmd=spmd, cost=None))

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.program.name if self.program is not None else self.best.plan.program.name


class Stage(NamedTuple):
    """One stage.

    Attributes:
        name: what the log calls it.
        run: makes the next draft.
        shown: what of the draft the log shows; None for a stage that logs its own steps.
        applies: whether it runs for some settings.
    """

    name: str
    run: Callable[[Draft, Settings], Draft]
    shown: Callable[[Draft], object] | None
    applies: Callable[[Settings], bool] = lambda settings: True


def _settle(draft: Draft, settings: Settings) -> Draft:
    assert draft.program is not None
    return dataclasses.replace(draft, propagated=settled(draft.program, settings.mesh))


def _choose(draft: Draft, settings: Settings) -> Draft:
    assert draft.propagated is not None
    made = cheapest(draft.propagated, settings.machine, strict=settings.strict, boundary=settings.boundary)
    return dataclasses.replace(draft, plans=made)


def _take_given(draft: Draft, settings: Settings) -> Draft:
    assert draft.propagated is not None
    assert settings.given is not None
    plan = settings.given(draft.propagated.program, settings.mesh, settings.boundary)
    return dataclasses.replace(draft, plans=(Planned(plan),))


def _use_collective_matmuls(draft: Draft, settings: Settings) -> Draft:
    """Where only what is faster counts, both programs are made and priced, as they fetch ahead."""
    plan = windowed(draft.best.plan, settings.windowed)
    if not plan.rings:
        return draft
    made = dataclasses.replace(draft.best, plan=plan, spmd=None, cost=None)
    if not settings.faster or settings.machine is None:
        return draft.with_best(made)

    def seconds(one: Draft) -> float:
        ahead = _prefetch(one, settings).spmd.prefetched
        return one.best.seconds if ahead is None else ahead.seconds

    without, other = (draft.with_best(_priced(one, settings)) for one in (draft.best, made))
    before, after = seconds(without), seconds(other)
    if after >= before:
        return without
    spared = before, after, settings.machine.name
    return draft.with_best(dataclasses.replace(other.best, plan=dataclasses.replace(plan, spared=spared)))


def _partition(draft: Draft, settings: Settings) -> Draft:
    made = draft.best
    return draft if made.spmd is not None else draft.with_program(partition(made.plan))


def _recompute(draft: Draft, settings: Settings) -> Draft:
    made = rematerialise(draft.spmd, settings.room, settings.on, sorted(settings.donated))
    return draft if made is draft.spmd else draft.with_program(made)


def _prefetch(draft: Draft, settings: Settings) -> Draft:
    made = prefetched(draft.spmd, settings.on, sorted(settings.donated), settings.room, draft.best.cost)
    return draft if made is draft.spmd else draft.with_program(made)


def _plan(draft: Draft) -> Plan:
    return draft.best.plan


def _spmd(draft: Draft) -> SpmdProgram:
    return draft.spmd


PROPAGATE_AND_REWRITE = Stage("propagate, rewrite where split", _settle, None)  # ``planning.settled`` has the loop
CHOOSE = Stage("choose", _choose, _plan, lambda settings: settings.given is None)
TAKE_GIVEN = Stage("take the given plan", _take_given, _plan, lambda settings: settings.given is not None)
COLLECTIVE_MATMULS = Stage(
    "collective matmuls", _use_collective_matmuls, _plan, lambda settings: settings.windowed is not None
)
PARTITION = Stage("partition", _partition, _spmd)
RECOMPUTE = Stage("recompute", _recompute, _spmd, lambda settings: settings.recomputes)
PREFETCH = Stage("prefetch", _prefetch, _spmd, lambda settings: settings.machine is not None)

PLANNING = (PROPAGATE_AND_REWRITE, CHOOSE, TAKE_GIVEN, COLLECTIVE_MATMULS)
FITTING = (RECOMPUTE, PREFETCH)
EMITTING = (PARTITION, *FITTING)


@with_tables
def run(stages: Sequence[Stage], draft: Draft, settings: Settings) -> Draft:
    """Runs those of some stages that apply, in order.

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
        PlanError: ``settings.strict``, and a primitive without rule; or the given plan is of another program.
        MemoryLimitError: ``settings.recomputes``, and the program does not fit.
    """
    for stage in stages:
        if stage.applies(settings):
            draft = stage.run(draft, settings)
            if stage.shown is not None:
                log_stage(stage.name, draft.name, draft, stage.shown)
    return draft


def plans_of(
    program: Program, mesh: Mesh, machine: Machine | None, *, strict: bool = False, boundary: Boundary = AS_MARKED
) -> tuple[Planned, ...]:
    """Completes the user's marks to plans, the best first; arguments and errors as of ``planning.propagate``.

    Args:
        program: the traced function.
        mesh: the devices.
        machine: gives the times; bytes count if None.
        strict: refuse primitives that have no rule.
        boundary: constraints on arguments and results, besides marks.
    """
    settings = Settings(mesh if machine is None else on_machine(mesh, machine), machine, strict, boundary)
    return run((PROPAGATE_AND_REWRITE, CHOOSE), Draft(program), settings).plans


def as_run(
    made: Planned,
    machine: Machine,
    donated: Iterable[int],
    limit: int | None = None,
    *,
    recomputes: bool = False,
    rings: bool = True,
) -> Planned:
    """The program that runs for a plan on a machine, and what it costs.

    Args:
        made: the plan.
        machine: gives the times.
        donated: arguments (counted without captured arrays) whose memory results may take.
        limit: bytes that a device may hold; the machine's memory if None.
        recomputes: recompute values to keep to the limit.
        rings: use collective matmuls where that is faster, as ``jit`` does by default.

    Raises:
        MemoryLimitError: ``recomputes``, and it does not fit.
    """
    mesh = made.plan.mesh
    policy = CollectiveMatmul.of(None, mesh, machine) if rings and not made.plan.rings else None
    settings = Settings(
        mesh, machine, donated=tuple(donated), windowed=policy, faster=True, memory_limit=limit, recomputes=recomputes
    )
    draft = run((COLLECTIVE_MATMULS, PARTITION), Draft(plans=(made,)), settings)
    draft = run(FITTING, draft.with_best(_priced(draft.best, settings)), settings)
    return _priced(draft.best, settings)


def _priced(made: Planned, settings: Settings) -> Planned:
    """The same, with its per-device program and what this costs."""
    if made.spmd is not None and made.cost is not None:
        return made
    spmd = made.spmd or partition(made.plan)
    return dataclasses.replace(made, spmd=spmd, cost=cost(spmd, settings.on, settings.donated))
