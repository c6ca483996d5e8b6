"""Find: the whole way from a program to the best plan that was found, and how near the best there can be it is.

The problem of ``search.graph`` is solved; the plan of the solution is partitioned and priced as it would run, and so
are the presets. What the graph does not know (how kernels are fused, what a moved copy takes of the memory) is learned
from that: where the plan needs more memory than there is, it is recomputed (``remat``), and the problem is solved again
with a limit. The best of all that fit is returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator

from gshard.analysis.cost import Cost, cost
from gshard.analysis.machine import Machine
from gshard.analysis.network import prices
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Program
from gshard.passes.assign import assign
from gshard.passes.partition import partition
from gshard.passes.recorded import plan_of
from gshard.remat.rematerialise import MemoryLimitError, rematerialise
from gshard.search.graph import Graph, graph_of
from gshard.search.presets import presets
from gshard.search.solve import Solution, solve

_ROUNDS = 4  # of solving, each after the first with less memory


@dataclasses.dataclass(frozen=True, eq=False)
class PricedPlan:
    """A plan and what it costs.

    Attributes:
        name: ``searched``, or that of a preset.
        plan: the plan.
        cost: of the per-device program that it becomes.
        kept: bytes at the peak, if nothing is computed again.
        recomputed: whether something is computed again, so that it fits.
    """

    name: str
    plan: Plan
    cost: Cost
    kept: int
    recomputed: bool = False

    def rank(self, limit: float) -> tuple[bool, float]:
        """Orders plans, the better first: by time those that fit, by memory the others; rounding is no difference."""
        fits = self.cost.peak <= limit
        return not fits, float(f"{self.cost.seconds:.9g}") if fits else float(self.cost.peak)


@dataclasses.dataclass(frozen=True, eq=False)
class Best:
    """What was found.

    Attributes:
        mesh: what it is for.
        chosen: the plan that takes least time of those that fit; of those that need least memory, if none fits.
        searched: the best of the plans that were searched.
        others: the presets.
        graph: what there was to choose from.
        solution: that of ``searched``.
        bound: seconds that no plan that keeps to the limit goes below, in the model.
        limit: bytes that a device may hold.
        seconds: that the search took.
    """

    mesh: Mesh
    chosen: PricedPlan
    searched: PricedPlan
    others: tuple[PricedPlan, ...]
    graph: Graph
    solution: Solution
    bound: float
    limit: float
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the plan keeps to the limit."""
        return self.chosen.cost.peak <= self.limit

    @property
    def predicted(self) -> float:
        """Seconds of what was searched, in the model."""
        return float(self.solution.value)

    @property
    def gap(self) -> float:
        """How much of that could at most be saved, as a part of it; 1 where nothing was found that fits."""
        return max(0.0, 1 - self.bound / self.predicted) if self.fits and self.predicted else float(not self.fits)


def best_plan(
    program: Program,
    mesh: Mesh,
    machine: Machine,
    *,
    donated: Iterable[int] = (),
    memory_limit: float | None = None,
    budget_seconds: float | None = None,
    on_better: Callable[[PricedPlan], None] | None = None,
) -> Best:
    """Searches for the plan of a program that takes least time.

    Args:
        program: with the user's marks, which are kept.
        mesh: the devices.
        machine: as many.
        donated: arguments (counted without captured arrays) whose memory results may take.
        memory_limit: bytes that a device may hold; the machine's memory if None.
        budget_seconds: how long to search; None goes on for a number of steps that follows from the size of the
            problem, and finds the same on any machine.
        on_better: called with each plan that is the best so far.

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
    """
    given, begin = mesh, time.monotonic()
    mesh = dataclasses.replace(mesh, prices=prices(mesh, machine))
    donated = list(donated)
    limit = float(machine.memory if memory_limit is None else memory_limit)
    pricing = _Pricing(machine, donated, limit, on_better)
    inputs = [len(program.captured) + i for i in donated]
    for name, plan in presets(program, mesh, inputs):
        pricing.add(name, plan)
    others = tuple(pricing.known)
    graph = graph_of(program, mesh, machine, donated=inputs)
    solutions: dict[PricedPlan, Solution] = {}
    bound = 0.0
    try:
        for found, solution in _searched(graph, mesh, pricing, begin, budget_seconds):
            solutions[found] = solution
            if solution.problem.limit is None or solution.problem.limit >= limit:
                bound = max(bound, solution.bound)
    except KeyboardInterrupt:
        if not solutions:
            raise
    # Of equals what was searched, since of that it is known what else was possible.
    order = sorted(pricing.known, key=lambda option: option not in solutions)
    chosen = min(order, key=lambda option: option.rank(limit))
    searched = chosen if chosen in solutions else min(solutions, key=lambda option: option.rank(limit))
    return Best(given, chosen, searched, others, graph, solutions[searched], bound, limit, time.monotonic() - begin)


def _searched(
    graph: Graph, mesh: Mesh, pricing: _Pricing, begin: float, budget_seconds: float | None
) -> Iterator[tuple[PricedPlan, Solution]]:
    """Solutions and their plans: without a limit of memory, with it, and with less, until one fits as it is."""
    problem, program, limit = graph.problem, graph.program, pricing.limit
    for _ in range(_ROUNDS):
        spent = time.monotonic() - begin
        solution = solve(problem, None if budget_seconds is None else max(1.0, budget_seconds - spent))
        shardings = graph.shardings(solution.states)
        # Splits once more, since an equation inside of a bundle has one too, and moves are shared in ways that only the
        # order of the program tells.
        found = pricing.add("searched", plan_of(program, mesh, shardings, assign(program.block, shardings, mesh)))
        yield found, solution
        late = budget_seconds is not None and time.monotonic() - begin >= budget_seconds
        if late or not solution.fits or found.kept <= limit:
            return
        # The graph does not know what moved copies and the like take: so much less is what it may use.
        less = limit * solution.peak / found.kept
        now = limit if problem.limit is None else min(less, problem.limit * 0.97)
        problem = dataclasses.replace(graph.problem, limit=float(int(now)))


@dataclasses.dataclass(eq=False)
class _Pricing:
    """Plans as they would run, with what they cost."""

    machine: Machine
    donated: list[int]
    limit: float
    on_better: Callable[[PricedPlan], None] | None
    known: list[PricedPlan] = dataclasses.field(default_factory=list)

    def add(self, name: str, plan: Plan) -> PricedPlan:
        """Prices a plan; what does not fit is recomputed as far as that helps."""
        spmd = partition(plan)
        costs = cost(spmd, self.machine, self.donated)
        kept, recomputed = costs.peak, False
        if kept > self.limit:
            with contextlib.suppress(MemoryLimitError):
                again = rematerialise(spmd, int(self.limit), self.machine, self.donated)
                costs, recomputed = cost(again, self.machine, self.donated), again is not spmd
        found = PricedPlan(name, plan, costs, kept, recomputed)
        if self.on_better is not None and all(found.rank(self.limit) < x.rank(self.limit) for x in self.known):
            self.on_better(found)
        self.known.append(found)
        return found
