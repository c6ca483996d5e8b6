"""Configure run: estimates the configurations of a training step, prices some of them, and solves the best ones.

``api.configure`` describes the steps. The time of each is bounded, and what is found is kept whenever it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from gshard.api.built_step import BuiltStep, built_by
from gshard.api.configuration import Configuration
from gshard.api.configurations import Configurations, NotSearched
from gshard.api.estimated_step import EstimatedStep
from gshard.api.jit import Jitted
from gshard.api.search import EFFORT, FINISHED, OfArrays, SearchRun, searched_of
from gshard.api.wrapped import clear_call_errors
from gshard.core.deadline import OutOfTime
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.memory_kinds import PINNED_HOST
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import tables
from gshard.core.program import format_bytes
from gshard.device.machine import Machine
from gshard.remat.rematerialise import MemoryLimitError
from gshard.search.builder_choices import combinations, text_of
from gshard.search.find import MeshSearch, axes_text
from gshard.search.screening import estimated
from gshard.search.state_on_host import state_to_offload
from gshard.search.time_budget import Progress, Stop, TimeBudget, in_a_line

_SCREENING = 1 / 3  # of the time, what estimates may take
_EXPLORING = 1 / 3  # of the time that is left then, what plans by hand may take
_SOLVING = 1 / 2  # of the time that is left, what the problems of one configuration may take
_FULL_PRICE = 0.95  # of the time of a plan in the simplified model, what its full price may be


@dataclasses.dataclass(eq=False)
class _Quiet(Progress):
    """The progress of one configuration: its steps are those of the whole, which shows them if they take long."""

    whole: Progress | None = None

    def step(self, doing: str) -> None:
        assert self.whole is not None
        self.whole.doing = f"{self.name}: {doing}"
        self.whole.beat()

    def better(self, plan: str) -> None:
        self.beat()

    def beat(self) -> None:
        assert self.whole is not None
        self.whole.beat()


@dataclasses.dataclass(eq=False)
class ConfigureRun:
    """The search over all configurations: a builder with the values of its keywords, on meshes of one machine.

    What it has found is kept, whenever time or a signal ends it.
    """

    builder: Callable[..., Any]
    choices: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any]
    own: Mapping[str, Any]
    meshes: list[Mesh]
    any_shape: bool
    given_machine: str | Machine | None
    machine: Machine
    limit: float
    global_batch: int | None
    offload: bool
    uses_all: bool
    on_better: Callable[[Configuration], None] | None
    caller: Callable[..., Any]
    budget: TimeBudget
    candidates: list[EstimatedStep] = dataclasses.field(default_factory=list)
    others: list[NotSearched] = dataclasses.field(default_factory=list)
    notes: dict[str, None] = dataclasses.field(default_factory=dict)
    fastest: EstimatedStep | None = None
    noted: float = 0.0  # seconds of the fastest when it was noted
    error: Exception | None = None  # the first one of a configuration
    covered: set[EstimatedStep] = dataclasses.field(default_factory=set)  # no faster than others that fit

    def __post_init__(self) -> None:
        self.meshes = sorted(self.meshes, key=lambda mesh: _distance(mesh, self.machine))

    def found(self, stop: Stop) -> Configurations | None:
        """The result; None if a signal ended the search before it had a plan."""
        try:
            with tables():
                self._estimate()
                self._explore()
                self._solve()
                if self.any_shape:
                    self._cut_axes()
                if self.uses_all:
                    self._prove()
        except KeyboardInterrupt:
            stop.number = stop.number or signal.SIGINT
        return self._result(stop)

    def _estimate(self) -> None:
        """Builds, traces and estimates all configurations."""
        share, first = dataclasses.replace(self.budget.part(_SCREENING), left_out=[]), True
        for keywords in combinations(self.choices):
            text, done = text_of(keywords), False
            if first or not share.is_over:
                with share.step(f"estimating {text}", always=first):
                    try:
                        self.candidates += self._estimated(keywords)
                    except OutOfTime:
                        raise
                    except Exception as error:  # of any kind: other keywords have steps
                        self.others.append(NotSearched(text, self._failed(error), False))
                    done = True
            if not done:
                why = "not estimated, because the time was over"
                self.others.append(NotSearched(text, why, True, is_estimated=False))
            first = first and not self.candidates
        if self.error is not None and not self.candidates:
            raise self.error
        if not self.candidates and all(not other.fits for other in self.others):
            raise ArgumentError(
                "the builder has no step: it returns None for all keywords.",
                user_line(),
                f"{len(self.others)} combinations of {', '.join(self.choices)}",
                "Return (step, *arguments) for some of them.",
            )

    def _failed(self, error: Exception) -> str:
        """Keeps the first error, and returns why a configuration has no plan."""
        self.error = self.error or error
        return f"not tried, because of an error: {in_a_line(error)}"

    def _estimated(self, keywords: Mapping[str, Any]) -> Iterator[EstimatedStep]:
        """The configurations with these keywords: the state on the devices and, if possible, on the host."""
        built = built_by(self.builder, keywords, self.fixed, self.own)
        if built is None:
            text = text_of(keywords)
            self.others.append(NotSearched(text, "for which the builder returns None", False))
            return
        searched = self._searched(built)
        with clear_call_errors(self.caller, built.step, built.arguments, {}):
            lowered = searched.lower(self.meshes[0])
        program, donated = lowered.program, lowered.donated
        yield EstimatedStep(built, searched, estimated(program, self.meshes[0], self.machine, donated), self.limit)
        if self.offload and donated and self._can_offload(built, searched):
            pairs = state_to_offload(program, donated)
            if pairs:
                on_host = built.with_host(pairs)
                searched = self._searched(on_host)
                lowered = searched.lower(self.meshes[0])
                figures = estimated(lowered.program, self.meshes[0], self.machine, lowered.donated)
                yield EstimatedStep(on_host, searched, figures, self.limit)

    def _searched(self, built: BuiltStep) -> Any:
        own = {key: value for key, value in self.own.items() if key != "finite"}
        return searched_of(built.step, built.arguments, {}, own, self.own["finite"], self.caller)

    def _can_offload(self, built: BuiltStep, searched: Any) -> bool:
        """Whether the state may be on the host; a note tells why not."""
        kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
        why = (
            f"there is no figure of the link to the host of {self.machine.name}"
            if not self.machine.host_link
            else f"JAX's devices here have no memory {PINNED_HOST!r}"
            if PINNED_HOST not in kinds
            else "the builder returns a jitted step; return the plain function and give donate_argnums"
            if not isinstance(searched, OfArrays) or isinstance(built.step, Jitted) or hasattr(built.step, "lower")
            else ""
        )
        if why:
            self.notes[f"the state stays on the devices: {why}"] = None
        return not why

    def _explore(self) -> None:
        """Prices plans that people write by hand, on the first mesh, for the most promising configurations first."""
        limit, share = self.limit, self.budget.part(_EXPLORING)
        better = {one: sum(other.is_better(one, limit) for other in self.candidates) for one in self.candidates}
        for candidate in sorted(self.candidates, key=lambda one: (better[one], one.promise(limit))):
            if candidate.estimate.least_bytes > limit:
                least = format_bytes(int(candidate.estimate.least_bytes))
                candidate.why = f"for which a device holds at least {least} of arguments and results"
            elif not self._is_slower(candidate) and (self.fastest is None or not share.is_over):
                with self._searching(candidate, share) as (run, budget):
                    one = run.begin(self.meshes[0], budget)
                    one.pricing.makes_fit = False
                    one.price_marked()
                    one.price_expected()
                    one.pricing.makes_fit = True
                self._note(candidate)

    def _solve(self) -> None:
        """Solves the problems of the configurations with the best prices, and prices their solutions."""
        begun = [candidate for candidate in self.candidates if candidate.chosen is not None]
        for candidate in sorted(begun, key=lambda one: one.expected(self.limit)):
            if self._is_slower(candidate):
                continue
            if self.budget.is_over:
                self.budget.left_out.append(f"the problems of {candidate.built.text}")
                continue
            self._solve_on_all(candidate)
        for candidate in begun if self.fastest is None else ():  # the plans by hand, with recomputed values
            if self.fastest is None and not (candidate is not begun[0] and self.budget.is_over):
                with self._searching(candidate, self.budget) as (run, budget):
                    one = next(iter(run.begun))
                    one.budget = budget
                    one.price_expected()
                self._note(candidate)

    def _cut_axes(self) -> None:
        """Searches for the fastest configuration on meshes of three axes, near its best plans on meshes of two."""
        candidate = self.fastest
        if candidate is None or candidate.run is None or self.budget.is_over:
            return
        with self._searching(candidate, self.budget.part(_SOLVING)) as (run, budget):
            run.budget = budget
            run.cut_axes(budget)
            for one in [one for one in run.begun if one.near is not None and not self._is_beaten(one)]:
                one.price_solutions()
                one.price_pipelines()
                run.finished.append(one)
        self._note(candidate)

    def _prove(self) -> None:
        """Solves the problems of the configurations that were left out, too, as long as there is time."""
        left = [one for one in self.candidates if not one.solved and one.estimate.least_bytes <= self.limit]
        for candidate in sorted(left, key=lambda one: one.promise(self.limit)):
            if not self.budget.is_over:
                self._solve_on_all(candidate)

    def _solve_on_all(self, candidate: EstimatedStep) -> None:
        """Solves the problem of a configuration on every mesh, and prices the solutions of the most promising ones."""
        count = len(self.meshes)
        with self._searching(candidate, self.budget.part(_SOLVING)) as (run, budget):
            for i, mesh in enumerate(self.meshes):
                if budget.is_over:
                    budget.left_out.append(f"mesh ({axes_text(mesh)})")
                    continue
                problem = budget.part(1 / 2) if i + 1 < count else budget
                one = next((one for one in run.begun if one.mesh == mesh), None)
                if one is None:
                    with budget.candidate(f"mesh ({axes_text(mesh)})"):
                        one = run.begin(mesh, problem)
                if one is None:
                    continue
                one.budget = problem
                one.solve(1.0 if count <= FINISHED else EFFORT, 1 / (count - i))
                one.budget = budget
            promising = sorted(run.begun, key=lambda one: one.rank)
            for one in [one for one in promising if not self._is_beaten(one)][:FINISHED]:
                one.always_prices = self.fastest is None
                one.price_solutions()
                one.price_pipelines()
                run.finished.append(one)
        self._note(candidate)
        # On the meshes that are best for one configuration the others are solved first.
        assert candidate.run is not None
        ranked = sorted(candidate.run.begun, key=lambda one: one.rank)
        places = {one.mesh: i for i, one in enumerate(ranked)}
        self.meshes.sort(key=lambda mesh: places.get(mesh, count))

    @contextlib.contextmanager
    def _searching(self, candidate: EstimatedStep, budget: TimeBudget) -> Iterator[tuple[SearchRun, TimeBudget]]:
        """The search of one configuration, and its time; what it leaves out gets the configuration's name."""
        text = candidate.built.text
        self.budget.progress.step(f"searching: {text}")
        quiet = _Quiet(None, since=budget.progress.since, name=text, whole=self.budget.progress)
        own = dataclasses.replace(budget, progress=quiet, left_out=[], failed={})
        if candidate.run is None:
            candidate.run = SearchRun(candidate.searched, self.meshes, False, self.machine, int(self.limit), own)
        try:
            yield candidate.run, own
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):
                for one in sorted(candidate.run.begun, key=lambda one: one.rank)[:1]:
                    while one.price_solution() is not None:
                        pass
            raise
        except Exception as error:  # of any kind: other configurations have plans
            candidate.why = self._failed(error)
            if candidate.chosen is not None:
                self.budget.failed[text] = in_a_line(error)
        finally:
            self.budget.left_out += [f"{text}: {name}" for name in own.left_out]
            self.budget.failed |= {f"{text}: {name}": error for name, error in own.failed.items()}

    def _is_slower(self, candidate: EstimatedStep) -> bool:
        """Whether a configuration is estimated to be no faster than the fastest, or than a similar one that fits."""
        limit = self.limit
        if self.fastest is None or self.fastest is candidate or self.fastest.chosen is None:
            return False
        if candidate.estimate.seconds >= self.fastest.chosen.cost.seconds:
            candidate.why = "estimated to be no faster than the best"
            return True
        if any(
            other.is_better(candidate, limit) and (other.fits_as_it_is(limit) or other in self.covered)
            for other in self.candidates
        ):
            self.covered.add(candidate)
            candidate.why = "estimated to be no faster than a similar one that fits"
            return True
        return False

    def _is_beaten(self, one: MeshSearch) -> bool:
        """Whether no plan on a mesh is faster than the fastest that was found, by the bound of its problem."""
        fastest = None if self.fastest is None else self.fastest.chosen
        return fastest is not None and one.least_seconds * _FULL_PRICE > fastest.cost.seconds

    def _note(self, candidate: EstimatedStep) -> None:
        """Keeps a configuration that is the fastest so far and fits."""
        chosen, limit = candidate.chosen, self.limit
        if chosen is None or chosen.cost.peak > limit:
            return
        known = None if self.fastest is None else self.fastest.chosen
        if known is None or self.fastest is candidate or chosen.rank(limit) < known.rank(limit):
            seconds = chosen.cost.seconds
            if self.fastest is candidate and seconds >= self.noted:
                return
            self.fastest, self.noted = candidate, seconds
            self.budget.progress.better(f"{candidate.built.text}: {chosen.cost}")
            if self.on_better is not None and (made := self._configuration(candidate, Stop())) is not None:
                self.on_better(made)

    def _configuration(self, candidate: EstimatedStep, stop: Stop) -> Configuration | None:
        found = None if candidate.run is None else candidate.run.result(stop)
        if found is None:
            return None
        limit = int(self.limit) if found.best.chosen.recomputed else None
        return Configuration(
            candidate.built, found.mesh, found.plan, self.given_machine, limit, self.global_batch, found
        )

    def _result(self, stop: Stop) -> Configurations | None:
        """What was found; None if a signal ended the search before it had a plan."""
        limit, meshes = self.limit, len(self.meshes)
        made = [(candidate, self._configuration(candidate, stop)) for candidate in self.candidates]
        rows = [row for _, row in made if row is not None]
        if stop.number is not None and not rows:
            return None
        rows.sort(key=lambda row: row.chosen.rank(limit))
        if not rows and self.error is not None:
            raise self.error
        if not rows or rows[0].cost.peak > limit:
            raise self._fits_nowhere(rows)
        others = [*self.others, *(c.left_out(limit) for c, row in made if row is None)]
        possible = [c for c in self.candidates if c.estimate.least_bytes <= limit]
        unknown = any(other.fits and not other.is_estimated for other in self.others)
        solved = [c.least_seconds(meshes) for c in possible if len(c.solved) == meshes]
        bound = 0.0 if unknown else min(c.least_seconds(meshes) for c in possible)
        return Configurations(
            tuple(rows), tuple(others), self.machine, limit, bound, min(solved, default=0.0), len(solved),
            tuple(self.budget.left_out), self.budget.failed_lines, tuple(self.notes), self.budget.spent, stop.number,
        )  # fmt: skip

    def _fits_nowhere(self, rows: Sequence[Configuration]) -> MemoryLimitError:
        limit, text = self.limit, ""
        if rows:
            needed = rows[0].cost.peak
            mesh = " ".join(f"{name}={size}" for name, size in rows[0].mesh.axes)
            text = f"nearest: {rows[0].built.text}, mesh {mesh}: a device needs {format_bytes(needed)}"
        else:
            nearest = min(self.candidates, key=lambda one: one.estimate.least_bytes)
            needed = int(nearest.estimate.least_bytes)
            text = f"nearest: {nearest.built.text}: a device holds at least {format_bytes(needed)}"
        cut = " Not everything was tried in the time: raise budget_seconds." if self.budget.left_out else ""
        error = MemoryLimitError(
            f"no configuration fits in {format_bytes(int(limit))}.",
            user_line(),
            f"{text}, {format_bytes(needed - int(limit))} more than it has",
            f"Use more devices or a smaller batch, or let the builder recompute more, use more micro-batches, or split "
            f"more of its state.{cut}",
        )
        error.needed = needed
        return error


def _distance(mesh: Mesh, machine: Machine) -> tuple[bool, float]:
    """Orders meshes: one axis first, then those whose last axis is as long as the last dimension of the network."""
    sizes = [size for _, size in mesh.axes]
    return len(sizes) > 1, abs(math.log(sizes[-1] / machine.network[-1].size))
