"""Prices plans as they would run, and checks whether they fit into the machine's memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

from gshard.core.mesh import Mesh
from gshard.core.plan import AS_MARKED, Boundary, Plan
from gshard.core.program import Program
from gshard.device.cost import Cost
from gshard.device.machine import Machine
from gshard.lowering.pipeline import (
    BATCH,
    CHOOSE,
    COLLECTIVE_MATMULS,
    PARTITION,
    PROPAGATE_AND_REWRITE,
    RECOMPUTE,
    Draft,
    Planned,
    Settings,
    priced,
    run,
)
from gshard.lowering.seconds import on_machine
from gshard.planning.collective_matmuls import CollectiveMatmul, windowed
from gshard.remat.rematerialise import MemoryLimitError


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
    draft = run((RECOMPUTE,), draft.with_best(priced(draft.best, settings)), settings)
    return priced(draft.best, settings)


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
