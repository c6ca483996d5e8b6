"""Find: searches for the best plan of a program, with a bound in the model that is solved.

The search solves the problem of ``planning.graph``, partitions the plan of the solution and prices the per-device
program, as it does with the presets. That shows what the graph leaves out, such as fused kernels and the memory of
moved copies. If the plan needs more memory than the device has, products become collective matmuls
(``planning.rings``) or values are recomputed (``remat``), and the problem is solved again with a limit. The best plan
that fits is returned.

A time budget limits all of this. The steps with the most benefit for their time come first: the marked program, so that
there is a plan to return; then the problem; then the presets, those that take the least planning first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from gshard.core.errors import GShardError
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.device.machine import Machine
from gshard.planning.choices import graph_of
from gshard.planning.demands import demands
from gshard.planning.graph import Graph
from gshard.planning.reshard_costs import axes_of, in_two
from gshard.planning.saved_plan import plan_of
from gshard.planning.settled import settled
from gshard.search.in_model import in_model
from gshard.search.loads import with_loads
from gshard.search.pipeline import plans_of
from gshard.search.planned import Planned
from gshard.search.presets import AS_IT_IS, marked_presets
from gshard.search.priced import PricedPlan, Pricing
from gshard.search.seconds import on_machine, seconds_on
from gshard.search.time_budget import EFFORT, EQUATIONS, TimeBudget
from gshard.solver.problem import Problem
from gshard.solver.solve import Solution, solve

_ROUNDS = 7  # of solving, each after the second with other memory
_USUAL = 4  # presets that are always priced, the usual ones
_SOLVING = 0.6  # of the time that is left, what one solving may take: its plan has to be priced, and the presets
_ROUNDED = 1e-9  # of a time: a difference that is none
_NEAR = 1.02  # limits of memory between which no further one is tried


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Best:
    """What a search on one mesh found.

    Attributes:
        mesh: what it is for.
        chosen: the plan that takes least time of those that fit; of those that need least memory, if none fits.
        searched: the best of the plans that were searched; None where the search did not get as far.
        others: the presets.
        graph: the problem, which is the simplified model; None where the search did not get as far.
        solution: that of ``searched``.
        bound: seconds that no plan that keeps to the limit goes below, in the simplified model.
        predicted: seconds of ``chosen`` in the simplified model; None where that has no such plan.
        limit: bytes that a device may hold.
        seconds: that the search took.
        left_out: steps that were cut or not begun for want of time.
        stopped: the signal that ended the search; None if none did.
    """

    mesh: Mesh
    chosen: PricedPlan
    searched: PricedPlan | None
    others: tuple[PricedPlan, ...]
    graph: Graph | None
    solution: Solution | None
    bound: float
    predicted: float | None
    limit: float
    seconds: float
    left_out: tuple[str, ...] = ()
    stopped: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the plan keeps to the limit."""
        return self.chosen.cost.peak <= self.limit

    @property
    def gap(self) -> float | None:
        """How much of ``predicted`` could at most be saved, as a part of it; None where nothing is proven of the plan.

        Both numbers are of the simplified model. Nothing is proven where the plan does not fit, where the model has no
        such plan, or where no bound was found.
        """
        if not self.fits or self.predicted is None:
            return None
        if not self.predicted:
            return 0.0
        return max(0.0, 1 - self.bound / self.predicted) if self.bound > 0 else None


class MeshSearch:
    """The search on one mesh, in steps: what is found is kept, whenever time or a signal ends it.

    Args:
        program: with the user's marks, which are kept.
        mesh: the devices.
        machine: as many.
        donated: arguments (counted without captured arrays) whose memory results may take.
        memory_limit: bytes that a device may hold; the machine's memory if None.
        on_better: called with each plan that is the best so far.
        budget: the time that is left, of this and of other meshes.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        machine: Machine,
        *,
        donated: Iterable[int] = (),
        memory_limit: float | None = None,
        on_better: Callable[[PricedPlan], None] | None = None,
        budget: TimeBudget,
    ):
        self.mesh, self.machine, self.budget = mesh, machine, budget
        self.limit = float(machine.memory if memory_limit is None else memory_limit)

        def better(plan: PricedPlan) -> None:
            budget.progress.better(str(plan))
            if on_better is not None:
                on_better(plan)

        self.pricing = Pricing(machine, list(donated), self.limit, better)
        self.timed = on_machine(mesh, machine)
        self._demands = [demand.sharding for _, demand, _ in demands(program, mesh)]
        self.program = settled(program, self.timed).program
        self.graph: Graph | None = None
        self.presets: list[PricedPlan] = []
        self.shown: tuple[PricedPlan, ...] = ()  # the presets of another mesh
        self._solved: list[Solution] = []  # on ``graph``, in order
        self._priced: dict[PricedPlan, Solution] = {}
        self._others_bound = math.inf  # what is proven of the same mesh with its axes in other groups
        self._of = ", ".join(f"{name}={size}" for name, size in mesh.axes)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Orders searches on several meshes, the one that promises most first."""
        return self._rank_of(self._solved)

    def _rank_of(self, solved: Sequence[Solution]) -> tuple[bool, bool, float]:
        if not solved:
            return True, True, 0.0
        last = solved[-1]
        fits = last.fits and last.peak <= self.limit
        return False, not fits, float(f"{last.value:.9g}") if fits else last.peak

    def price_marked(self) -> None:
        """Prices the program as it is marked, however long that takes: there is a plan to return afterwards."""
        boundary = self.pricing.boundary(self.program)
        with self.budget.step(f"the program as it is marked, on mesh ({self._of})", always=True):
            made = plans_of(self.program, self.timed, self.machine, boundary=boundary)
            self.presets.append(self.pricing.add(AS_IT_IS, *made))

    def solve(self, effort: float = 1.0, share: float = 1.0) -> None:
        """Makes the problem and solves it: without a limit of memory, and with it if the solution does not keep to it.

        Args:
            effort: as of ``solver.solve``.
            share: of the time that is left once there is a problem, what solving it may take at most.
        """
        share = min(share, _SOLVING)
        ways = in_two(self.timed, axes_of(self.timed, self._demands), self._demands)
        found: list[tuple[Graph, list[Solution]]] = []
        for i, way in enumerate(ways):
            budget = self.budget.part(1 / (len(ways) - i))
            with budget.step(f"the problem of mesh ({self._of})"):
                graph, solved = self._posed(way), list[Solution]()
                found.append((graph, solved))
                budget.progress.step(f"solving for mesh ({self._of}): {len(graph.problem.costs):,} choices")
                solved.append(self._solution(graph.problem, budget.part(share), effort))
                self.graph, self._solved = graph, solved
                if solved[0].peak > self.limit and not solved[0].interrupted:
                    limited = dataclasses.replace(graph.problem, limit=float(int(self.limit)))
                    solved.append(self._solution(limited, budget.part(share), effort))
                if solved[-1].interrupted:
                    raise KeyboardInterrupt
        found = [(graph, solved) for graph, solved in found if solved]
        if not found:
            self.graph = None
            return
        self.graph, self._solved = min(found, key=lambda pair: self._rank_of(pair[1]))
        others = [self._bound(solved) for graph, solved in found if graph is not self.graph]
        self._others_bound = min([math.inf, *others]) if len(found) == len(ways) else 0.0

    def _posed(self, way: tuple[Atoms, ...]) -> Graph:
        boundary = self.pricing.boundary(self.program)
        return with_loads(graph_of(self.program, seconds_on(self.machine)(self.timed, way), boundary=boundary))

    def _solution(self, problem: Problem, budget: TimeBudget, effort: float) -> Solution:
        if budget.uses_all:
            return solve(problem, budget.left, effort=effort)
        found = solve(problem, effort=effort, most_seconds=budget.left)
        if found.cut and not found.interrupted:
            self.budget.left_out.append(f"further steps of solving for mesh ({self._of})")
        return found

    def _bound(self, solved: Iterable[Solution]) -> float:
        """Seconds that no plan that keeps to the limit goes below, in the model."""
        kept = (own for own in solved if own.problem.limit is None or own.problem.limit >= self.limit)
        return max((own.bound for own in kept), default=0.0)

    def finish(self, shown: tuple[PricedPlan, ...] | None = None) -> None:
        """Prices what the solutions become, solves again where that takes too much memory, and prices presets.

        Args:
            shown: presets for another mesh of these devices, to be shown beside; None prices them for this one.
        """
        self._price_solutions()
        if shown is not None:
            self.shown = shown
            return
        if not self.presets:
            self.price_marked()
        boundary = self.pricing.boundary(self.program)
        most = max(_USUAL, EQUATIONS // (1 + sum(1 for _ in self.program.block.walk()))) - 1
        some = list(itertools.islice(marked_presets(self.program, self.timed, boundary), most))
        work = {preset: preset.work(self.timed) for preset in some if not self.budget.is_over}
        for preset in sorted(some, key=lambda one: work.get(one, (0, 0))):
            if self.budget.is_over:
                self.budget.left_out.append(f"the preset '{preset.name}'")
                continue
            with self.budget.step(f"the preset '{preset.name}'"), contextlib.suppress(GShardError):
                made = preset.planned(self.timed, self.machine, boundary)
                self.presets.append(self.pricing.add(preset.name, *made))

    def price_solution(self) -> PricedPlan | None:
        """Prices the first solution that is not priced yet; None if there is none."""
        if self.graph is None or len(self._priced) == len(self._solved):
            return None
        solution = self._solved[len(self._priced)]
        with self.budget.step(f"the plan that was searched for mesh ({self._of})", always=True):
            found = self.pricing.add("searched", Planned(_plan(self.graph, solution, self.pricing)))
            self._priced[found] = solution
        return found

    def _price_solutions(self) -> None:
        """Plans of the solutions: without a limit of memory, with it, and with less, until one fits as it is."""
        limit = self.limit
        too_much, too_little = np.inf, 0.0
        for _ in range(_ROUNDS):
            if (found := self.price_solution()) is None:
                return
            solution = self._priced[found]
            if self.budget.is_over or found.kept <= limit:
                return
            given = solution.problem.limit
            if not solution.fits:
                too_little = limit if given is None else given
            elif given is not None:
                too_much = given
            if len(self._priced) < len(self._solved):
                continue
            # The graph does not know all that is held for a moment: so much less is what it may use.
            now = limit if given is None else min(limit * solution.peak / found.kept, too_much * 0.97)
            if now <= too_little:
                now = math.sqrt(too_little * too_much)
            if now <= too_little * _NEAR or now >= too_much:
                return
            with self.budget.step(f"solving with less memory for mesh ({self._of})"):
                less = dataclasses.replace(solution.problem, limit=float(int(now)))
                self._solved.append(self._solution(less, self.budget.part(_SOLVING), EFFORT))
                if self._solved[-1].interrupted:
                    raise KeyboardInterrupt

    @property
    def has_found(self) -> bool:
        """Whether there is a plan to return."""
        return bool(self._priced or self.presets)

    def best(self, stopped: int | None = None) -> Best:
        """The best so far; there is one (``has_found``)."""
        limit = self.limit
        # Of equals what was searched, since of that it is known what else was possible.
        chosen = min([*self._priced, *self.presets], key=lambda option: option.rank(limit))
        searched = chosen if chosen in self._priced else None
        if self._priced and searched is None:
            searched = min(self._priced, key=lambda option: option.rank(limit))
        bound = min(self._bound(self._solved), self._others_bound)
        predicted = None
        if chosen in self._priced:
            predicted = None if chosen.recomputed or chosen.plan.rings else float(self._priced[chosen].value)
        elif self.graph is not None and not chosen.recomputed and stopped is None:
            predicted = in_model(self.graph, chosen.plan)
        if predicted is not None and predicted < bound * (1 - _ROUNDED):
            predicted = None  # the bound is of plans that take less memory in the model
        return Best(
            self.mesh, chosen, searched, (*self.presets, *self.shown), self.graph,
            None if searched is None else self._priced[searched], bound, predicted, limit, self.budget.spent,
            tuple(self.budget.left_out), stopped,
        )  # fmt: skip


@with_tables
def best_plan(
    program: Program,
    mesh: Mesh,
    machine: Machine,
    *,
    donated: Iterable[int] = (),
    memory_limit: float | None = None,
    budget_seconds: float | None = None,
    on_better: Callable[[PricedPlan], None] | None = None,
    progress: bool | Callable[[str], object] | None = False,
) -> Best:
    """Searches for the plan of a program that takes least time.

    Args:
        program, mesh, machine, donated, memory_limit, on_better: as of ``MeshSearch``.
        budget_seconds, progress: as of ``gshard.search``.

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
    """
    budget = TimeBudget.of(budget_seconds, progress)
    search = MeshSearch(
        program, mesh, machine, donated=donated, memory_limit=memory_limit, on_better=on_better, budget=budget
    )
    search.price_marked()
    search.solve()
    search.finish()
    return search.best()


def _plan(graph: Graph, solution: Solution, pricing: Pricing) -> Plan:
    program, chosen = graph.program, solution.states
    shardings, splits, boundary = graph.shardings(chosen), graph.splits(chosen), pricing.boundary(graph.program)
    return plan_of(program, graph.mesh, shardings, splits, *graph.moved(chosen), boundary)
