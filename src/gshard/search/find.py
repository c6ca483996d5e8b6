"""Find: the whole way from a program to the best plan that was found, and how near the best there can be it is.

The problem of ``passes.graph`` is solved; the plan of the solution is partitioned and priced as it would run, and so
are the presets. What the graph does not know (how kernels are fused, what a moved copy takes of the memory) is learned
from that: where the plan needs more memory than there is, products become collective matmuls (``passes.windowed``) or
values are recomputed (``remat``), and the problem is solved again with a limit. The best of all that fit is returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from gshard.analysis.cost import Cost
from gshard.analysis.machine import Machine
from gshard.analysis.overlap import Windowed
from gshard.core.border import Border
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.passes.choices import graph_of
from gshard.passes.demands import demands
from gshard.passes.facts import facts_of
from gshard.passes.graph import Graph
from gshard.passes.moves import axes_of, in_two
from gshard.passes.recorded import plan_of
from gshard.passes.windowed import windowed
from gshard.remat.rematerialise import MemoryLimitError
from gshard.search.as_run import as_run
from gshard.search.loads import with_loads
from gshard.search.presets import presets
from gshard.search.propagated import Propagated, propagated
from gshard.search.seconds import on_machine, seconds_on
from gshard.solver.solve import Solution, solve

_ROUNDS = 7  # of solving, each after the second with other memory
_EFFORT = 0.2  # for these others
_USUAL = 4  # presets that are always priced, the usual ones
_PRESETS = 20_000  # equations of the presets together: of a large program only some more are priced
# Where nothing fits, operands come in parts whose gathered copies are larger than this part of the limit. A copy is
# there while its product runs, two at a time: smaller ones hold a few percent of what there is, and taking them in
# steps would start many kernels to free next to nothing.
_LARGE = 1 / 64
_NEAR = 1.02  # limits of memory between which no further one is tried


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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Begun:
    """A search that has solved its problem, and does not know yet what becomes of the solutions.

    Attributes:
        mesh: the user's.
        graph: the problem, on that mesh with the machine's times.
        solutions: without a limit of memory, and with the limit if the first does not keep to it.
        limit: bytes that a device may hold.
        since: when it began.
    """

    mesh: Mesh
    graph: Graph
    solutions: tuple[Solution, ...]
    limit: float
    since: float

    @property
    def rank(self) -> tuple[bool, float]:
        """Orders searches on several meshes, the one that promises most first."""
        last = self.solutions[-1]
        fits = last.fits and last.peak <= self.limit
        return not fits, float(f"{last.value:.9g}") if fits else last.peak


@with_tables
def begin(
    program: Program,
    mesh: Mesh,
    machine: Machine,
    *,
    donated: Iterable[int] = (),
    memory_limit: float | None = None,
    budget_seconds: float | None = None,
    effort: float = 1.0,
) -> Begun:
    """Makes the problem of a program on a mesh and solves it; arguments as those of ``best_plan`` and ``solve``."""
    since = time.monotonic()
    timed = on_machine(mesh, machine)
    limit = float(machine.memory if memory_limit is None else memory_limit)
    border = Border(tuple(len(program.captured) + i for i in donated))
    facts = facts_of(program, timed)  # loops may be operators in its program
    said = [demand.sharding for _, demand, _ in demands(program, mesh)]
    found: list[Begun] = []
    ways = in_two(timed, axes_of(timed, said), said)
    for way in ways:
        begun = time.monotonic()
        budget = None if budget_seconds is None else budget_seconds / len(ways)
        graph = with_loads(graph_of(facts.program, seconds_on(machine)(timed, way), border=border))
        solutions = [solve(graph.problem, budget, effort=effort)]
        if solutions[0].peak > limit:
            left = None if budget is None else max(1.0, budget - (time.monotonic() - begun))
            solutions.append(solve(dataclasses.replace(graph.problem, limit=float(int(limit))), left, effort=effort))
        found.append(Begun(mesh, graph, tuple(solutions), limit, since))
    return min(found, key=lambda one: one.rank)


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
    donated = list(donated)
    begun = begin(program, mesh, machine, donated=donated, memory_limit=memory_limit, budget_seconds=budget_seconds)
    return finish(begun, machine, donated=donated, budget_seconds=budget_seconds, on_better=on_better)


@with_tables
def finish(
    begun: Begun,
    machine: Machine,
    *,
    donated: Iterable[int] = (),
    known: Iterable[PricedPlan] | None = None,
    budget_seconds: float | None = None,
    on_better: Callable[[PricedPlan], None] | None = None,
) -> Best:
    """Goes on with a search: prices what its solutions become, and solves again where that takes too much memory.

    Args:
        begun: the problem.
        machine, donated, budget_seconds, on_better: as for ``best_plan``.
        known: presets for another mesh of these devices, to be shown beside; None prices them for this one.
    """
    graph, mesh, limit, donated = begun.graph, begun.graph.mesh, begun.limit, list(donated)
    pricing = Pricing(machine, donated, limit, on_better, list(known or ()))
    if known is None:
        every = presets(graph.program, mesh, machine, pricing.border(graph.program))
        most = max(_USUAL, _PRESETS // (1 + sum(1 for _ in graph.program.block.walk())))
        for name, preset in itertools.islice(every, most):
            pricing.add(name, *preset)
    others = tuple(pricing.known)
    solutions: dict[PricedPlan, Solution] = {}
    bound = 0.0
    try:
        for found, solution in _searched(begun, pricing, budget_seconds):
            solutions[found] = solution
            if solution.problem.limit is None or solution.problem.limit >= limit:
                bound = max(bound, solution.bound)
    except KeyboardInterrupt:
        if not solutions:
            raise
    # Of equals what was searched, since of that it is known what else was possible.
    order = [*solutions, *(others if known is None else ())]
    chosen = min(order, key=lambda option: option.rank(limit))
    searched = chosen if chosen in solutions else min(solutions, key=lambda option: option.rank(limit))
    spent = time.monotonic() - begun.since
    return Best(begun.mesh, chosen, searched, others, graph, solutions[searched], bound, limit, spent)


def _searched(begun: Begun, pricing: Pricing, budget_seconds: float | None) -> Iterator[tuple[PricedPlan, Solution]]:
    """Solutions and their plans: without a limit of memory, with it, and with less, until one fits as it is."""
    graph, limit = begun.graph, begun.limit
    solved = list(begun.solutions)
    too_much, too_little = np.inf, 0.0
    for _ in range(_ROUNDS):
        solution = solved.pop(0)
        found = pricing.add("searched", Propagated(_plan(graph, solution, pricing)))
        yield found, solution
        spent = time.monotonic() - begun.since
        if (budget_seconds is not None and spent >= budget_seconds) or found.kept <= limit:
            return
        given = solution.problem.limit
        if not solution.fits:
            too_little = limit if given is None else given
        elif given is not None:
            too_much = given
        if solved:
            continue
        # The graph does not know all that is held for a moment: so much less is what it may use.
        now = limit if given is None else min(limit * solution.peak / found.kept, too_much * 0.97)
        if now <= too_little:
            now = math.sqrt(too_little * too_much)
        if now <= too_little * _NEAR or now >= too_much:
            return
        left = None if budget_seconds is None else max(1.0, budget_seconds - spent)
        solved.append(solve(dataclasses.replace(graph.problem, limit=float(int(now))), left, effort=_EFFORT))


def _plan(graph: Graph, solution: Solution, pricing: Pricing) -> Plan:
    program, chosen = graph.program, solution.states
    shardings, splits, border = graph.shardings(chosen), graph.splits(chosen), pricing.border(graph.program)
    return plan_of(program, graph.mesh, shardings, splits, *graph.moved(chosen), border)


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
        return self.add(name, *propagated(program, mesh, self.machine, border=self.border(program)))

    def add(self, name: str, *made: Propagated) -> PricedPlan:
        """Prices a plan, the best of some.

        Where it does not fit, it has collective matmuls, or recomputes, if that helps.
        """
        ways = [self._priced(name, one) for one in made[:1]]
        if ways[0].kept > self.limit:
            ways += [self._priced(name, one) for one in made[1:]]
            matmuls = [windowed(one.plan, Windowed(above=self.limit * _LARGE)) for one in made]
            ways += [self._priced(name, Propagated(plan)) for plan in matmuls if plan.rings]
            for way in ways.copy():
                always = way.cost.memory.arguments + way.cost.memory.results - way.cost.memory.shared
                if way.kept > self.limit >= always:
                    ways.append(self._recomputed(way))
        found = min(ways, key=lambda way: way.rank(self.limit))
        if self.on_better is not None and all(found.rank(self.limit) < x.rank(self.limit) for x in self.known):
            self.on_better(found)
        self.known.append(found)
        return found

    def _priced(self, name: str, made: Propagated) -> PricedPlan:
        found = as_run(made, self.machine, self.donated, int(self.limit))
        assert found.cost is not None
        return PricedPlan(name, found.plan, found.cost, found.cost.peak)

    def border(self, program: Program) -> Border:
        """As ``jit`` does: what takes the place of an argument that came sharded leaves as that came."""
        return Border(tuple(len(program.captured) + i for i in self.donated))

    def _recomputed(self, way: PricedPlan) -> PricedPlan:
        with contextlib.suppress(MemoryLimitError):
            again = as_run(
                Propagated(way.plan), self.machine, self.donated, int(self.limit), recomputes=True, rings=False
            )
            assert again.cost is not None
            return dataclasses.replace(way, cost=again.cost, recomputed=True)
        return way
