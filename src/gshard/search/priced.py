"""Prices plans as they would run, and checks whether they fit into the machine's memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Program
from gshard.core.program_boundary import Boundary
from gshard.device.cost import Cost
from gshard.device.machine import Machine
from gshard.planning.collective_matmuls import CollectiveMatmul
from gshard.planning.rings import windowed
from gshard.remat.rematerialise import MemoryLimitError
from gshard.search.pipeline import as_run, plans_of
from gshard.search.planned import Planned

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
    # whether plans that do not fit are tried with collective matmuls and recomputed values, which takes longer than
    # pricing
    makes_fit: bool = True

    def marked(self, name: str, program: Program, mesh: Mesh) -> PricedPlan:
        """Prices the plan that follows from a program's marks."""
        return self.add(name, *plans_of(program, mesh, self.machine, boundary=self.boundary(program)))

    def add(self, name: str, *plans: Planned) -> PricedPlan:
        """Prices several plans and returns the best; the first one unless it needs too much memory.

        If it does, the others, collective matmuls and recomputation are tried too.
        """
        options = [self._priced(name, planned) for planned in plans[:1]]
        if options[0].kept > self.limit and self.makes_fit:
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
