"""Priced: prices plans as they would run, and checks whether they fit into the machine's memory."""

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

# Where nothing fits, operands come in parts whose gathered copies are larger than this part of the limit. A copy is
# there while its product runs, two at a time: smaller ones hold a few percent of what there is, and taking them in
# steps would start many kernels to free next to nothing.
_LARGE = 1 / 64


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PricedPlan:
    """A plan and what it costs.

    Attributes:
        name: ``searched``, or that of a preset.
        plan: the plan.
        cost: of the per-device program that it becomes.
        kept: bytes at the peak, if nothing is recomputed.
        recomputed: whether something is recomputed, so that it fits.
    """

    name: str
    plan: Plan
    cost: Cost
    kept: int
    recomputed: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.cost}{', some of it computed twice to fit' if self.recomputed else ''}"

    __repr__ = __str__

    def rank(self, limit: float) -> tuple[bool, float]:
        """Orders plans, the better first: by time those that fit, by memory the others; rounding is no difference."""
        fits = self.cost.peak <= limit
        return not fits, float(f"{self.cost.seconds:.9g}") if fits else float(self.cost.peak)


@dataclasses.dataclass(eq=False)
class Pricing:
    """Plans as they would run, with what they cost."""

    machine: Machine
    donated: list[int]
    limit: float
    on_better: Callable[[PricedPlan], None] | None = None
    known: list[PricedPlan] = dataclasses.field(default_factory=list)

    def marked(self, name: str, program: Program, mesh: Mesh) -> PricedPlan:
        """Prices what follows from a program's marks."""
        return self.add(name, *plans_of(program, mesh, self.machine, boundary=self.boundary(program)))

    def add(self, name: str, *made: Planned) -> PricedPlan:
        """Prices a plan, the best of some.

        Where it does not fit, it has collective matmuls, or recomputes, if that helps.
        """
        ways = [self._priced(name, one) for one in made[:1]]
        if ways[0].kept > self.limit:
            ways += [self._priced(name, one) for one in made[1:]]
            matmuls = [windowed(one.plan, CollectiveMatmul(above=self.limit * _LARGE)) for one in made]
            ways += [self._priced(name, Planned(plan)) for plan in matmuls if plan.rings]
            for way in ways.copy():
                always = way.cost.memory.arguments + way.cost.memory.results - way.cost.memory.shared
                if way.kept > self.limit >= always:
                    ways.append(self._recomputed(way))
        found = min(ways, key=lambda way: way.rank(self.limit))
        if self.on_better is not None and all(found.rank(self.limit) < x.rank(self.limit) for x in self.known):
            self.on_better(found)
        self.known.append(found)
        return found

    def _priced(self, name: str, made: Planned) -> PricedPlan:
        found = as_run(made, self.machine, self.donated, int(self.limit))
        assert found.cost is not None
        return PricedPlan(name, found.plan, found.cost, found.cost.peak)

    def boundary(self, program: Program) -> Boundary:
        """As ``jit`` does: what takes the place of an argument that came sharded leaves as that came."""
        return Boundary(tuple(len(program.captured) + i for i in self.donated))

    def _recomputed(self, way: PricedPlan) -> PricedPlan:
        with contextlib.suppress(MemoryLimitError):
            again = as_run(Planned(way.plan), self.machine, self.donated, int(self.limit), recomputes=True, rings=False)
            assert again.cost is not None
            return dataclasses.replace(way, cost=again.cost, recomputed=True)
        return way
