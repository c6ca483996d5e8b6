"""Searches for the best plan of a program on one mesh, with a bound in a simplified model, over the mesh shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import jax

from gshard.comm.reshard import FEW, axes_of, has_many, joined
from gshard.core.errors import listed
from gshard.core.mesh import Atoms, Mesh
from gshard.core.number_text import format_ms, significant
from gshard.core.plan import local_bytes
from gshard.core.planning_tables import with_tables
from gshard.core.program import Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.core.time_budget import EFFORT, TimeBudget
from gshard.device.fusion_model import Kernels, kernels_of
from gshard.device.machine import Machine
from gshard.lowering.pipeline import Planned
from gshard.lowering.seconds import on_machine, seconds_on
from gshard.planning.batched import batched
from gshard.planning.choices import graph_of
from gshard.planning.demands import demands
from gshard.planning.graph import Graph
from gshard.planning.saved_plan import plan_of
from gshard.planning.settled import settled
from gshard.search.presets import AS_IT_IS, DATA_PARALLEL, SPLIT_STATE, Preset, marked_presets, pipelines
from gshard.search.pricing import PricedPlan, Pricing
from gshard.solver.problem import Problem
from gshard.solver.solve import Solution, solve

# Adds the memory of buffers, from first write to last read, to the planning problem.

_Load = tuple[int, int, int, Sequence[int]]


def with_loads(graph: Graph) -> Graph:
    """The problem with the bytes that each state holds, and their interval of time."""
    problem = graph.problem
    edges = [(u, v, table) for (u, v), table in zip(problem.ends.tolist(), problem.tables)]
    loaded = Problem.of(problem.costs, edges, _loads(graph))
    return dataclasses.replace(graph, problem=loaded)


def _loads(graph: Graph) -> list[_Load]:
    clock = _Clock()
    clock.run(kernels_of(graph.program.block, windows=False))
    end = clock.now + 1

    def load(v: Value, start: int, stop: int) -> _Load:
        group = graph.groups.of[v]
        return group, start, stop, [0 if v.on_host else local_bytes(v, s, graph.mesh) for s in graph.states[group]]

    results = {v for v in graph.program.block.outputs if isinstance(v, Value)}
    loads = [load(v, 0, end + 1) for v in graph.program.block.inputs]
    for v, start in clock.written_at.items():
        if v not in graph.donated_results:
            loads.append(load(v, start, end + 1 if v in results else clock.last_read.get(v, start) + 1))
    return loads + [(group, *clock.spans[e], sizes) for group, e, sizes in graph.held if e in clock.spans]


@dataclasses.dataclass
class _Clock:
    """Numbers the moments at which each buffer is written first and read last.

    The moments of a body lie between those of its region.
    """

    now: int = 0
    written_at: dict[Value, int] = dataclasses.field(default_factory=dict)
    last_read: dict[Value, int] = dataclasses.field(default_factory=dict)
    spans: dict[Equation, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def run(self, kernels: Kernels) -> None:
        for kernel in kernels.kernels:
            self.now += 1
            if kernel.bodies:
                start = self.now
                for body in kernel.bodies:
                    self.run(body)
                self.now += 1
                self.spans[kernel.equation] = start, self.now
            for v in kernel.writes:
                self.written_at[v] = self.now
            for v in kernel.reads:
                self.last_read[v] = self.now
        self.last_read.update(dict.fromkeys(kernels.results, self.now + 1))


# Holds the result of a search on one mesh.


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Best:
    """The result of a search on one mesh."""

    mesh: Mesh  # the mesh
    chosen: PricedPlan  # the fastest plan that fits; if none fits, the one with the least memory
    searched: PricedPlan | None  # the best of the searched plans; None if the search did not get as far
    others: tuple[PricedPlan, ...]  # the presets
    graph: Graph | None  # the problem, which is the simplified model; None if the search did not get as far
    solution: Solution | None  # the solution that became ``searched``
    bound: float  # seconds that every plan within the limit takes at least, in the simplified model
    predicted: float | None  # seconds of ``chosen`` in the simplified model; None if it is no solution of that
    limit: float  # bytes that a device may hold
    seconds: float  # the time that the search took
    left_out: tuple[str, ...] = ()  # steps that were cut or not begun because the time was over
    failed: tuple[str, ...] = ()  # candidates that ended with an error, each with its first line
    stopped: int | None = None  # the signal that ended the search; None if none did
    # whether there are plans over whole axes that were not compared: ``bound`` says nothing of them
    is_limited: bool = False

    @property
    def fits(self) -> bool:
        """Whether the plan keeps within the limit of memory."""
        return self.chosen.cost.peak <= self.limit

    @property
    def gap(self) -> float | None:
        """The largest share of ``predicted`` that a plan that was compared could save; None if nothing is proven.

        Both numbers belong to the simplified model. Nothing is proven if the plan does not fit, if it is a preset, or
        if the solver found no bound.
        """
        if not self.fits or self.predicted is None:
            return None
        if not self.predicted:
            return 0.0
        return max(0.0, 1 - self.bound / self.predicted) if self.bound > 0 else None


# Enumerates the mesh shapes for a number of devices: those of one and two axes.

NAMES = ("data", "model")


def meshes(size: int) -> Iterator[Mesh]:
    """The meshes of a number of devices with one axis and with two."""
    available = tuple(jax.devices())
    devices = available[:size] if len(available) >= size else None
    for major in (size, *(n for n in range(2, size) if size % n == 0)):
        sizes = (major,) if major == size else (major, size // major)
        yield dataclasses.replace(Mesh.abstract(**dict(zip(NAMES, sizes, strict=False))), devices=devices)


def axes_text(mesh: Mesh) -> str:
    """The axes with their sizes.

    >>> axes_text(Mesh.abstract(data=4, model=2))
    'data=4, model=2'
    """
    return ", ".join(f"{name}={size}" for name, size in mesh.axes)


def in_two(mesh: Mesh, axes: tuple[Atoms, ...], shardings: Sequence[Sharding]) -> tuple[Atoms, ...]:
    """As ``joined``, but the axes that no sharding uses become two of about the same size, if there are few axes.

    >>> mesh = Mesh.abstract(a=2, b=2, c=2, d=2)
    >>> in_two(mesh, axes_of(mesh), [])
    (('a', 'b'), ('c', 'd'))
    """
    joined_axes = joined(mesh, axes, shardings)
    *others, last = joined_axes
    used = {a for sharding in shardings for a in sharding.atoms}
    if not has_many(mesh, axes) or len(joined_axes) >= FEW or not used.isdisjoint(last):
        return joined_axes
    ends = list(itertools.accumulate(len(axis) for axis in axes if axis[0] in last))[:-1]
    end = min(ends, key=lambda end: max(mesh.count(last[:end]), mesh.count(last[end:])))
    return (*others, last[:end], last[end:])


ENOUGH = 0.01  # of a plan's time in the model: where no plan saves more, the solver ends


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
        budget: TimeBudget,
        known: list[PricedPlan] | None = None,
    ):
        self.mesh, self.machine, self.budget = mesh, machine, budget
        self.limit = float(machine.memory if memory_limit is None else memory_limit)

        def better(plan: PricedPlan) -> None:
            budget.progress.better(f"{plan}, on mesh ({axes_text(mesh)})")

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
        self.is_limited = False  # whether plans over whole axes exist that were not compared
        self._mesh_text = axes_text(mesh)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Orders searches on several meshes, the most promising one first."""
        if not self._solved:
            return True, True, 0.0
        last = self._solved[-1]
        fits = last.fits and last.peak <= self.limit
        return False, not fits, float(f"{last.value:.9g}") if fits else last.peak

    def price_marked(self) -> None:
        """Prices the program under its own marks, however long that takes, so that there is a plan to return."""

        def priced() -> None:
            self.presets.append(self.pricing.marked(AS_IT_IS, self._as_given, self.timed))

        name = f"the program as it is marked, on mesh ({self._mesh_text})"
        self.budget.attempt(name, priced, always=True, raises=not self.pricing.known)  # on other meshes there are plans

    def price_presets(self, machine: Machine | None, known: Collection[str] = ()) -> None:
        """Prices the presets, planned for a machine or by bytes; those whose names are ``known`` are left out.

        By bytes, data parallelism and a split state are priced however short the time is.
        """
        boundary = self.pricing.boundary(self.program)
        for preset in marked_presets(self.program, self.timed, boundary):
            if preset.name not in known:
                always = machine is None and preset.name in (DATA_PARALLEL, SPLIT_STATE) and self.is_unsplit
                self._price_preset(preset, machine, always=always)

    @property
    def is_unsplit(self) -> bool:
        """Whether no mark splits the program, which is priced."""
        return not any(sharding.atoms for sharding in self.presets[0].plan.shardings.values())

    def _price_preset(self, preset: Preset, machine: Machine | None, *, always: bool = False) -> PricedPlan | None:
        """Prices a preset that is planned for a machine, or by bytes; of two plans of one preset the better is kept."""
        by_bytes = f"the preset '{preset.name}', planned by bytes"
        if by_bytes in self.budget.failed:
            return None

        def priced() -> PricedPlan:
            plans = preset.planned(self.timed, machine, self.pricing.boundary(self.program))
            return self._kept(self.pricing.add(preset.name, *plans))

        return self.budget.attempt(
            by_bytes if machine is None else f"the preset '{preset.name}'", priced, always=always
        )

    def _kept(self, *plans: PricedPlan) -> PricedPlan:
        """Keeps the best plan of a preset, of these and of one that is known, and returns it."""
        alike = [known for known in self.presets if known.name == plans[0].name]
        best = min([*alike, *plans], key=lambda plan: plan.rank(self.limit))
        self.presets = [*(known for known in self.presets if known not in alike), best]
        return best

    def price_pipelines(self) -> None:
        """Prices pipelines over the layers of the program by bytes, then searches for the best plan with one."""
        self.budget.attempt(f"pipelines on mesh ({self._mesh_text})", self._search_pipelines)

    def _search_pipelines(self) -> None:
        boundary, known = self.pricing.boundary(self._traced), [*self._priced, *self.presets]
        priced: dict[Preset, PricedPlan] = {}

        def best(beside: Preset | None = None) -> Preset | None:
            for seconds, preset in pipelines(self._traced, self.timed, boundary, known, beside):
                fitting = (plan.cost.seconds for plan in (*known, *priced.values()) if plan.cost.peak <= self.limit)
                if seconds < min(fitting, default=math.inf) and (plan := self._price_preset(preset, None)) is not None:
                    priced[preset] = plan
            return min(priced, key=lambda preset: priced[preset].rank(self.limit), default=None)

        first = best()
        best_pipeline = None if first is None else best(first)
        if best_pipeline is None or self.budget.is_over:
            return
        inner = MeshSearch(
            best_pipeline.program, self.mesh, self.machine, donated=self.pricing.donated, memory_limit=self.limit,
            budget=self.budget,
        )  # fmt: skip
        inner.pricing, inner.name, inner.always_prices = self.pricing, best_pipeline.name, False
        inner.solve(EFFORT)
        inner.price_solutions()
        plans = [dataclasses.replace(found, plan=best_pipeline.unmarked(found.plan)) for found in inner._priced]
        if plans:
            self._kept(*plans)

    def solve(self, effort: float = 1.0) -> None:
        """Builds the problem and solves it: without a limit of memory, and with it if the solution exceeds it.

        ``effort`` is as in ``solver.solve``.
        """
        axes = axes_of(self.timed, self._demands)
        searched = in_two(self.timed, axes, self._demands)

        def solved() -> None:
            budget, graph = self.budget, self._posed(searched)
            budget.progress.step(f"solving for mesh ({self._mesh_text}): {len(graph.problem.costs):,} choices")
            solutions = [self._solution(graph.problem, budget.part(), effort)]
            self.graph, self._solved = graph, solutions
            self.is_limited = self.is_limited or searched != axes or graph.is_limited
            if solutions[0].peak > self.limit and not solutions[0].interrupted:
                limited = dataclasses.replace(graph.problem, limit=float(int(self.limit)))
                solutions.append(self._solution(limited, budget.part(), effort))
            if solutions[-1].interrupted:
                raise KeyboardInterrupt

        self.budget.attempt(f"the problem of mesh ({self._mesh_text})", solved)

    def _posed(self, axes: tuple[Atoms, ...]) -> Graph:
        boundary = self.pricing.boundary(self.program)
        objective = seconds_on(self.machine)(self.timed, axes)
        return with_loads(graph_of(self.program, objective, boundary=boundary))

    def _solution(self, problem: Problem, budget: TimeBudget, effort: float) -> Solution:
        found = solve(problem, effort=effort, most_seconds=budget.left)
        if budget.uses_all and found.gap > ENOUGH and not found.cut:
            start = [found.states] if found.fits else []
            longer = solve(problem, budget.left, start, tolerance=ENOUGH, effort=math.inf)
            found = dataclasses.replace(longer, bound=max(longer.bound, found.bound)) if longer.fits else longer
        if found.cut and not found.interrupted and not budget.uses_all:
            self.budget.left_out.append(f"further steps of solving for mesh ({self._mesh_text})")
        return found

    @property
    def bound(self) -> float:
        """Seconds that every plan that was compared takes at least within the limit of memory, in the model."""
        limits = ((solution, solution.problem.limit) for solution in self._solved)
        return max((found.bound for found, limit in limits if limit is None or limit >= self.limit), default=0.0)

    def price_solution(self) -> PricedPlan | None:
        """Prices the first solution that is not priced yet; None if there is none, or if the time cut it."""
        if self.graph is None or len(self._priced) == len(self._solved):
            return None
        graph, solution = self.graph, self._solved[len(self._priced)]

        def priced() -> PricedPlan:
            chosen, boundary = solution.states, self.pricing.boundary(graph.program)
            choices = graph.shardings(chosen), graph.splits(chosen), *graph.moved(chosen)
            found = self.pricing.add(self.name, Planned(plan_of(graph.program, graph.mesh, *choices, boundary)))
            self._priced[found] = solution
            return found

        name = f"the plan that was searched for mesh ({self._mesh_text})"
        return self.budget.attempt(name, priced, always=self.always_prices)

    def price_solutions(self) -> None:
        """Prices the plans of solutions: without a limit, with it, then with a lower one (solved now)."""
        while (priced := self.price_solution()) is not None:
            solution = self._priced[priced]
            used_limit = solution.problem.limit
            if self.budget.is_over or priced.kept <= self.limit or (used_limit is not None and used_limit < self.limit):
                return
            if len(self._priced) < len(self._solved):
                continue
            # The graph omits some short-lived memory, so its limit is lower in proportion.
            lower = self.limit if used_limit is None else self.limit * solution.peak / priced.kept
            limited = dataclasses.replace(solution.problem, limit=float(int(lower)))
            name = f"solving with less memory for mesh ({self._mesh_text})"
            budget = self.budget.part()
            found = self.budget.attempt(name, functools.partial(self._solution, limited, budget, EFFORT))
            if found is None:
                return
            self._solved.append(found)
            if found.interrupted:
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
        predicted = None
        if chosen in self._priced and not chosen.recomputed and not chosen.plan.rings:
            predicted = float(self._priced[chosen].value)
        return Best(
            self.mesh, chosen, searched, tuple(self.presets), self.graph,
            None if searched is None else self._priced[searched], self.bound, predicted, limit, self.budget.spent,
            tuple(self.budget.left_out), self.budget.failed_lines, stopped, self.is_limited,
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
) -> Best:
    """Searches for the fastest plan of a program."""
    budget = TimeBudget.of(budget_seconds, progress)
    search = MeshSearch(program, mesh, machine, donated=donated, memory_limit=memory_limit, budget=budget)
    search.price_marked()
    search.price_presets(None)
    search.solve()
    search.price_solutions()
    search.price_presets(machine)
    search.price_pipelines()
    return search.best()


# Writes sentences about the distance of a plan from the best one, the model of that proof, and the end of a search.

_NONE = 1e-5  # a gap that counts as none, to the printed digits


def how_near(best: Best, *, is_one_of_several: bool = False) -> str:
    """One sentence on the returned plan, with its price in the simplified model and its full price."""
    full = f"priced in full: {format_ms(best.chosen.cost.seconds)}"
    gap = best.gap
    if gap is not None and best.predicted is not None:
        if best.is_limited:
            optimum = "the best of the choices compared"
            near = optimum if gap < _NONE else f"at most {_slower(gap)} slower than {optimum}"
        else:
            near = "optimal" if gap < _NONE else f"at most {_slower(gap)} slower than the optimum"
        near += " on this mesh" if is_one_of_several else ""
        return f"{near} for the simplified model ({format_ms(best.predicted)} there); {full}"
    if best.graph is None:
        return f"nothing is proven: the search did not get as far; {full}"
    if best.chosen.recomputed or best.chosen.plan.rings:
        why = "the simplified model has no recomputed values and no collective matmuls"
    elif best.predicted is None:
        why = "it is not the plan that was searched"
    else:
        why = "the solver found no bound in its time"
    return f"nothing is proven of this plan: {why}; {full}"


def ended(seconds: float, left_out: Sequence[str], stopped: int | None, failed: Sequence[str] = ()) -> list[str]:
    """Lines on a search that a signal ended, whose time was over before it had tried everything, or parts failed."""
    lines = []
    if stopped is not None:
        by = "Ctrl-C" if stopped == signal.SIGINT else signal.Signals(stopped).name
        lines.append(f"{by} ended the search after {seconds:.1f} s: this is the best plan so far")
    if left_out:
        lines.append(f"the time was over after {seconds:.1f} s; not tried, or cut: {'; '.join(listed(left_out))}")
    if failed:
        lines.append(f"not tried, because of an error: {'; '.join(listed(failed))}")
    return lines


def _slower(gap: float) -> str:
    return f"{significant(100 * gap / (1 - gap), 2)} %"
