"""Searches for the best plan of a program on one mesh, with a bound in a simplified model.

The search solves the problem of ``planning.graph``, partitions the plan of the solution and prices the per-device
program; it prices the presets likewise. The prices include what the graph leaves out, such as fused kernels and the
memory of copies. If the plan needs more memory than the device has, products become collective matmuls
(``planning.rings``) or values are recomputed (``remat``), and the search solves the problem again with a limit. It
returns the best plan that fits.

A time budget limits all of this. The steps with the most benefit for their time come first: the marked program, so that
there is a plan to return; the presets that people expect, planned by bytes, which is quick; then the problem; then all
presets by time, in the order of their planning time; and pipelines over stacked layers. Data parallelism and a split
state are planned by bytes however short the time is, if no mark splits the program. Once a plan is within ``ENOUGH``
of the bound, of all presets only those that people expect are planned by time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.device.machine import Machine
from gshard.planning.batched import batched
from gshard.planning.choices import graph_of
from gshard.planning.demands import demands
from gshard.planning.graph import Graph
from gshard.planning.reshard_costs import axes_of, in_two
from gshard.planning.saved_plan import plan_of
from gshard.planning.settled import settled
from gshard.search.best import Best
from gshard.search.in_model import in_model
from gshard.search.loads import with_loads
from gshard.search.meshes import axes_text, on_finer
from gshard.search.pipeline import plans_of
from gshard.search.pipeline_presets import best_pipeline
from gshard.search.planned import Planned
from gshard.search.presets import AS_IT_IS, Preset, expected_presets, marked_presets
from gshard.search.priced import PricedPlan, Pricing
from gshard.search.seconds import on_machine, seconds_on
from gshard.search.time_budget import EFFORT, EQUATIONS, TimeBudget
from gshard.solver.problem import Problem
from gshard.solver.solve import Solution, solve

_ROUNDS = 7  # solutions, each after the second with another limit of memory
ENOUGH = 0.01  # of a plan's time in the model: where no plan saves more, the solver ends, and few presets are priced
_USUAL = 4  # the first presets, which are priced for every program
_ALWAYS = 2  # expected presets that are priced however short the time is: data parallelism and a split state
_SOLVING = 0.6  # the largest share of the time that is left for one solution: its plan and the presets are priced later
_ROUNDED = 1e-9  # relative difference of times that counts as rounding
_NEAR = 1.02  # ratio of limits of memory: between nearer ones no further limit is tried


class MeshSearch:
    """The search on one mesh, in steps. Results are kept, so that an early end returns the best so far."""

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
        near: Plan | None = None,
        known: list[PricedPlan] | None = None,
    ):
        self.mesh, self.machine, self.budget = mesh, machine, budget
        self.near = None if near is None else on_finer(near, mesh)
        self.near_mesh = None if near is None else near.mesh
        self.limit = float(machine.memory if memory_limit is None else memory_limit)

        def better(plan: PricedPlan) -> None:
            budget.progress.better(f"{plan}, on mesh ({axes_text(mesh)})")
            if on_better is not None:
                on_better(plan)

        self.pricing = Pricing(machine, list(donated), self.limit, better, [] if known is None else known)
        self.timed = on_machine(mesh, machine)
        self._demands = [demand.sharding for _, demand, _ in demands(program, mesh)]
        self._traced, self._as_given = program, settled(program, self.timed).program
        self.program = settled(batched(self._as_given, self.timed), self.timed).program
        self.graph: Graph | None = None
        self.presets: list[PricedPlan] = []
        self._solved: list[Solution] = []  # solutions of ``graph``, in order
        self._priced: dict[PricedPlan, Solution] = {}
        self.always_prices = True  # the plans of solutions, even if the time is over
        self.name = "searched"  # of these plans
        self._others_bound = math.inf if near is None else 0.0  # the bound of plans that the problem does not have
        self.is_limited = near is not None  # whether plans over whole axes exist that were not compared
        self._mesh_text = axes_text(mesh)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Orders searches on several meshes, the most promising one first."""
        return self._rank_of(self._solved)

    def _rank_of(self, solved: Sequence[Solution]) -> tuple[bool, bool, float]:
        if not solved:
            return True, True, 0.0
        last = solved[-1]
        fits = last.fits and last.peak <= self.limit
        return False, not fits, float(f"{last.value:.9g}") if fits else last.peak

    def price_marked(self) -> None:
        """Prices the program under its own marks, however long that takes, so that there is a plan to return."""
        boundary = self.pricing.boundary(self._as_given)
        step = self.budget.candidate if self.pricing.known else self.budget.step  # on other meshes there are plans
        with step(f"the program as it is marked, on mesh ({self._mesh_text})", always=True):
            plans = plans_of(self._as_given, self.timed, self.machine, boundary=boundary)
            self.presets.append(self.pricing.add(AS_IT_IS, *plans))

    def price_expected(self) -> None:
        """Prices the presets that people expect, by bytes: data parallelism, a split state, tensor parallelism."""
        expected = expected_presets(self.program, self.timed, self.pricing.boundary(self.program))
        for i, preset in enumerate(expected):
            always = self.is_unsplit and i < _ALWAYS
            if always or not self.budget.is_over:
                self._price_preset(preset, None, always=always)

    @property
    def is_unsplit(self) -> bool:
        """Whether no mark splits the program, which is priced."""
        return not any(sharding.atoms for sharding in self.presets[0].plan.shardings.values())

    def _price_preset(self, preset: Preset, machine: Machine | None, *, always: bool = False) -> PricedPlan | None:
        """Prices a preset that is planned for a machine, or by bytes; of two plans of one preset the better is kept."""
        name = f"the preset '{preset.name}'"
        by_bytes = f"{name}, planned by bytes"
        name = by_bytes if machine is None else name
        if self.budget.is_over and not always:
            self.budget.left_out.append(name)
            return None
        if by_bytes in self.budget.failed:
            return None
        with self.budget.candidate(name, always=always):
            plans = preset.planned(self.timed, machine, self.pricing.boundary(self.program))
            return self._kept(self.pricing.add(preset.name, *plans))
        return None

    def _kept(self, *plans: PricedPlan) -> PricedPlan:
        """Keeps the best plan of a preset, of these and of one that is known, and returns it."""
        alike = [known for known in self.presets if known.name == plans[0].name]
        best = min([*alike, *plans], key=lambda plan: plan.rank(self.limit))
        self.presets = [*(known for known in self.presets if known not in alike), best]
        return best

    def price_pipelines(self) -> None:
        """Prices pipelines over the layers of the program by bytes, then searches for the best plan with one."""
        with self.budget.candidate(f"pipelines on mesh ({self._mesh_text})"):
            self._search_pipelines()

    def _search_pipelines(self) -> None:
        boundary, known = self.pricing.boundary(self._traced), [*self._priced, *self.presets]
        by_bytes = functools.partial(self._price_preset, machine=None)
        best = best_pipeline(self._traced, self.timed, boundary, known, self.limit, by_bytes)
        if best is None or self.budget.is_over:
            return
        inner = MeshSearch(
            best.program, self.mesh, self.machine, donated=self.pricing.donated, memory_limit=self.limit,
            budget=self.budget,
        )  # fmt: skip
        inner.pricing, inner.name, inner.always_prices = self.pricing, best.name, False
        inner.solve(EFFORT)
        inner.price_solutions()
        plans = [dataclasses.replace(priced, plan=best.unmarked(priced.plan)) for priced in inner.solutions]
        if plans:
            self._kept(*plans)

    def solve(self, effort: float = 1.0, share: float = 1.0) -> None:
        """Builds the problem and solves it: without a limit of memory, and with it if the solution exceeds it.

        ``effort`` is as in ``solver.solve``; ``share`` is the largest share of the time that is left for a solution.
        """
        share = min(share, _SOLVING)
        axes = axes_of(self.timed, self._demands)
        axis_groups = in_two(self.timed, axes, self._demands)
        problems: list[tuple[Graph, list[Solution]]] = []
        for i, group in enumerate(axis_groups):
            budget = self.budget.part(1 / (len(axis_groups) - i))
            with budget.candidate(f"the problem of mesh ({self._mesh_text})"):
                graph, solved = self._posed(group), list[Solution]()
                problems.append((graph, solved))
                budget.progress.step(f"solving for mesh ({self._mesh_text}): {len(graph.problem.costs):,} choices")
                solved.append(self._solution(graph.problem, budget.part(share), effort))
                self.graph, self._solved = graph, solved
                if solved[0].peak > self.limit and not solved[0].interrupted:
                    limited = dataclasses.replace(graph.problem, limit=float(int(self.limit)))
                    solved.append(self._solution(limited, budget.part(share), effort))
                if solved[-1].interrupted:
                    raise KeyboardInterrupt
        problems = [(graph, solved) for graph, solved in problems if solved]
        if not problems:
            self.graph = None
            return
        self.is_limited = axis_groups != [axes] or any(graph.is_limited for graph, _ in problems)
        self.graph, self._solved = min(problems, key=lambda pair: self._rank_of(pair[1]))
        other_bounds = [self._bound(solved) for graph, solved in problems if graph is not self.graph]
        if len(problems) < len(axis_groups):
            self._others_bound = 0.0
        self._others_bound = min([self._others_bound, *other_bounds])

    def _posed(self, axes: tuple[Atoms, ...]) -> Graph:
        boundary = self.pricing.boundary(self.program)
        objective = seconds_on(self.machine)(self.timed, axes)
        return with_loads(graph_of(self.program, objective, boundary=boundary, near=self.near))

    def _solution(self, problem: Problem, budget: TimeBudget, effort: float) -> Solution:
        found = solve(problem, effort=effort, most_seconds=budget.left)
        if budget.uses_all and found.gap > ENOUGH and not found.cut:
            start = [found.states] if found.fits else []
            longer = solve(problem, budget.left, start, tolerance=ENOUGH)
            found = dataclasses.replace(longer, bound=max(longer.bound, found.bound)) if longer.fits else longer
        if found.cut and not found.interrupted and not budget.uses_all:
            self.budget.left_out.append(f"further steps of solving for mesh ({self._mesh_text})")
        return found

    def _bound(self, solved: Iterable[Solution]) -> float:
        applicable = (
            solution for solution in solved if solution.problem.limit is None or solution.problem.limit >= self.limit
        )
        return max((solution.bound for solution in applicable), default=0.0)

    @property
    def bound(self) -> float:
        """Seconds that every plan that was compared takes at least within the limit of memory, in the model."""
        return min(self._bound(self._solved), self._others_bound)

    @property
    def least_seconds(self) -> float:
        """Seconds that every plan on this mesh takes at least in the model, in any memory; 0 if unknown."""
        free = [solution.bound for solution in self._solved if solution.problem.limit is None]
        return 0.0 if self.is_limited else max(free, default=0.0)

    @property
    def solved_plan(self) -> Plan:
        """The plan of the last solution. Requires ``is_solved``."""
        assert self.graph is not None
        return _plan(self.graph, self._solved[-1], self.pricing)

    @property
    def solutions(self) -> list[PricedPlan]:
        """The plans of the solutions that are priced."""
        return list(self._priced)

    @property
    def is_solved(self) -> bool:
        """Whether the problem has a solution."""
        return bool(self._solved)

    def price_presets(self, *, only_expected: bool, known: Collection[str] = ()) -> None:
        """Prices presets by time: those that people expect, or as many as the size of the program allows.

        Those whose names are ``known`` are priced on another mesh.
        """
        boundary = self.pricing.boundary(self.program)
        presets = (expected_presets if only_expected else marked_presets)(self.program, self.timed, boundary)
        preset_count = max(_USUAL, EQUATIONS // (1 + sum(1 for _ in self.program.block.walk()))) - 1
        candidates = [preset for preset in itertools.islice(presets, preset_count) if preset.name not in known]
        work = {preset: preset.work(self.timed) for preset in candidates if not self.budget.is_over}
        for preset in sorted(candidates, key=lambda preset: work.get(preset, (0, 0))):
            self._price_preset(preset, self.machine)

    def price_solution(self) -> PricedPlan | None:
        """Prices the first solution that is not priced yet; None if there is none, or if the time cut it."""
        found = None
        if self.graph is None or len(self._priced) == len(self._solved):
            return None
        solution = self._solved[len(self._priced)]
        name = f"the plan that was searched for mesh ({self._mesh_text})"
        with self.budget.candidate(name, always=self.always_prices):
            found = self.pricing.add(self.name, Planned(_plan(self.graph, solution, self.pricing)))
            self._priced[found] = solution
        return found

    def price_solutions(self) -> None:
        """Prices the plans of solutions: without a limit, with it, then with lower ones (solved now) until one fits."""
        limit, too_high, too_low = self.limit, np.inf, 0.0
        for _ in range(_ROUNDS):
            if (priced := self.price_solution()) is None:
                return
            solution = self._priced[priced]
            if self.budget.is_over or priced.kept <= limit:
                return
            used_limit = solution.problem.limit
            if not solution.fits:
                too_low = limit if used_limit is None else used_limit
            elif used_limit is not None:
                too_high = used_limit
            if len(self._priced) < len(self._solved):
                continue
            # The graph omits some short-lived memory, so its limit is lower in proportion.
            next_limit = limit if used_limit is None else min(limit * solution.peak / priced.kept, too_high * 0.97)
            if next_limit <= too_low:
                next_limit = math.sqrt(too_low * too_high)
            if next_limit <= too_low * _NEAR or next_limit >= too_high:
                return
            with self.budget.candidate(f"solving with less memory for mesh ({self._mesh_text})"):
                limited = dataclasses.replace(solution.problem, limit=float(int(next_limit)))
                self._solved.append(self._solution(limited, self.budget.part(_SOLVING), EFFORT))
                if self._solved[-1].interrupted:
                    raise KeyboardInterrupt

    @property
    def has_found(self) -> bool:
        """Whether there is a plan to return."""
        return bool(self._priced or self.presets)

    @property
    def chosen(self) -> PricedPlan:
        """The best plan so far. Requires ``has_found``."""
        # A tie goes to the searched plan, because its alternatives are known.
        return min([*self._priced, *self.presets], key=lambda option: option.rank(self.limit))

    def best(self, stopped: int | None = None) -> Best:
        """The best result so far. Requires ``has_found``."""
        limit = self.limit
        chosen = self.chosen
        searched = chosen if chosen in self._priced else None
        if self._priced and searched is None:
            searched = min(self._priced, key=lambda option: option.rank(limit))
        bound, predicted = self.bound, None
        if chosen in self._priced:
            predicted = None if chosen.recomputed or chosen.plan.rings else float(self._priced[chosen].value)
        elif self.graph is not None and not chosen.recomputed and stopped is None:
            predicted = in_model(self.graph, chosen.plan)
        if predicted is not None and predicted < bound * (1 - _ROUNDED):
            predicted = None  # the bound is for plans that take less memory in the model
        return Best(
            self.mesh, chosen, searched, tuple(self.presets), self.graph,
            None if searched is None else self._priced[searched], bound, predicted, limit, self.budget.spent,
            tuple(self.budget.left_out), self.budget.failed_lines, stopped, self.near_mesh, self.is_limited,
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
    progress: bool | Callable[[str], object] | None = False,
    near: Plan | None = None,
) -> Best:
    """Searches for the fastest plan of a program."""
    budget = TimeBudget.of(budget_seconds, progress)
    search = MeshSearch(
        program, mesh, machine, donated=donated, memory_limit=memory_limit, budget=budget, near=near,
    )  # fmt: skip
    search.price_marked()
    search.price_expected()
    search.solve()
    search.price_solutions()
    gap = search.best().gap
    search.price_presets(only_expected=gap is not None and gap <= ENOUGH)
    search.price_pipelines()
    return search.best()


def _plan(graph: Graph, solution: Solution, pricing: Pricing) -> Plan:
    program, chosen = graph.program, solution.states
    shardings, splits, boundary = graph.shardings(chosen), graph.splits(chosen), pricing.boundary(graph.program)
    return plan_of(program, graph.mesh, shardings, splits, *graph.moved(chosen), boundary)
