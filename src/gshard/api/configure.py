"""configure: finds the configuration of a training step that takes the least time on a cluster.

It traces and estimates every combination of keywords, and searches for plans of the most promising ones, as
``gshard.search`` does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gshard.api.jit import Jitted, jit
from gshard.api.search import SearchRun, meshes_to_try, searched_of
from gshard.core.errors import LISTED, ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames, without_our_frames_in_methods
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.number_text import format_seconds, significant
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program, format_bytes
from gshard.core.time_budget import OutOfTime, TimeBudget, in_a_line, until_stopped
from gshard.device.cost import Cost, cost_of_kernels
from gshard.device.fusion_model import kernels_of
from gshard.device.machine import Machine, machine_of
from gshard.explanation.report.page import Page
from gshard.explanation.search_result import SearchResult
from gshard.explanation.verdict import headline
from gshard.planning.saved_plan import SavedPlan
from gshard.remat.rematerialise import MemoryLimitError, bytes_of
from gshard.search.find import ended, how_near
from gshard.search.pricing import PricedPlan
from gshard.tracing.trace import name_of

_NONE = 1e-5  # a gap that counts as none, to the printed digits


def text_of(keywords: Mapping[str, Any]) -> str:
    """Keywords as text.

    >>> text_of({"micro_batches": 4, "recompute": "full"})
    "micro_batches=4, recompute='full'"
    """
    return ", ".join(f"{key}={value!r}" for key, value in keywords.items())


# What is returned.


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Configuration:
    """A configuration of a training step: keywords of the builder, a mesh and a plan.

    Attributes:
        keywords: the keywords of the builder.
        step: the function that it returned, which ``jit`` partitions.
        arguments: its arguments.
        found: the search that found the plan.
        machine: as ``gshard.jit`` takes it.
    """

    keywords: dict[str, Any]
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    found: SearchResult
    machine: str | Machine | None

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return self.found.mesh

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.found.plan

    @property
    def memory_limit(self) -> int | None:
        """Bytes that a device may hold, if gshard recomputes values to keep to it; None if it recomputes nothing."""
        return int(self.found.best.limit) if self.found.best.chosen.recomputed else None

    @property
    def cost(self) -> Cost:
        """The modelled cost of a step on each device."""
        return self.found.cost

    @property
    def seconds(self) -> float:
        """Modelled seconds of a step."""
        return self.cost.seconds

    def jit(self, mesh: MeshLike = None) -> Jitted[..., Any]:
        """The partitioned step, as ``gshard.jit`` returns it.

        Args:
            mesh: devices with the axes of the plan's mesh: a JAX mesh, or ``{"data": 8}``. By default the first devices
                that JAX has, if there are enough; otherwise it can be lowered, but not run.

        Raises:
            ArgumentError: a framework jits the step.
            MeshError: the mesh has other axes.
        """
        self.found.refuse_framework()
        made = self.step if isinstance(self.step, Jitted) else jit(self.step)
        on, recorded = Mesh.of(self.mesh if mesh is None else mesh), SavedPlan.of(self.plan)
        return made._with(mesh=on, machine=self.machine, memory_limit=self.memory_limit, recorded=recorded)

    def save(self, path: Any) -> None:
        """Writes the plan, for ``gshard.jit(plan=gshard.SavedPlan.load(path))`` of the step with these keywords."""
        self.found.save(path)

    def __str__(self) -> str:
        memory = f"peak {format_bytes(self.cost.peak)}, {format_bytes(self.cost.sent)} sent by each device"
        return f"{format_seconds(self.seconds)} a step: {text_of(self.keywords)}; mesh {self.mesh}; {memory}"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Configurations(Page):
    """The configurations that were found for a step, the best first.

    Attributes:
        rows: the configurations that have a plan: first those that fit, by time; then the others, by memory.
        not_searched: the configurations without a plan, each with the reason.
        machine: the machine.
        limit: bytes that a device may hold.
        left_out: steps that were cut, or not begun, because the time was over.
        failed: steps that ended with an error, each with its first line.
        seconds: the time that it took.
        stopped: the signal that ended it; None if none did.
    """

    rows: tuple[Configuration, ...]
    not_searched: Mapping[str, str]
    machine: Machine
    limit: float
    left_out: tuple[str, ...]
    failed: tuple[str, ...]
    seconds: float
    stopped: int | None = None

    @property
    def best(self) -> Configuration:
        """The best configuration."""
        return self.rows[0]

    def _table(self) -> list[str]:
        """The best configurations, one a line."""
        keywords = list(dict.fromkeys(key for row in self.rows for key in row.keywords))
        cells = [["a step", "peak", "sent", "mesh", *keywords, "gshard recomputes", "gap"]]
        for row in self.rows[:LISTED]:
            fits, gap = row.cost.peak <= self.limit, row.found.gap
            cells.append([
                format_seconds(row.seconds),
                f"{format_bytes(row.cost.peak)}{'' if fits else ', does not fit'}",
                format_bytes(row.cost.sent),
                str(row.mesh),
                *(str(row.keywords.get(key, "")) for key in keywords),
                "-" if row.memory_limit is None else "yes",
                "-" if gap is None else "0 %" if gap < _NONE else f"{significant(100 * gap, 2)} %",
            ])  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]

    def _page_data(self) -> dict[str, Any]:
        data = self.best.found._page_data()
        return data | {"searched": f"{self}\n\n{data['searched']}"}

    def __str__(self) -> str:
        best, total = self.best, len(self.rows) + len(self.not_searched)
        lines = [
            f"{total} configuration{'s' * (total != 1)} on {self.machine.name}, "
            f"{format_bytes(int(self.limit))} of memory; {len(self.rows)} with plans; {self.seconds:.1f} s",
            *self._table(),
            headline(best.cost),
            f"the best: {how_near(best.found.best)}",
        ]
        if best.memory_limit is not None:
            lines.append("gshard recomputes some of its values to fit: best.jit() has the memory limit for that")
        of_reason: dict[str, list[str]] = {}
        for text, why in self.not_searched.items():
            of_reason.setdefault(why, []).append(text)
        lines += [f"{len(some)} {why}: {some[0]}{', ...' * (len(some) > 1)}" for why, some in of_reason.items()]
        return "\n".join(lines + ended(self.seconds, self.left_out, self.stopped, self.failed))

    __repr__ = __str__


# Builder: a function of keywords that returns ``(step, *arguments)``.

_HINT = (
    "A builder returns (step, *arguments) for keywords: choices={'micro_batches': [1, 2, 4]}. For a step without "
    "keywords use gshard.search."
)


def _combinations(builder: Callable[..., Any], choices: Any) -> list[dict[str, Any]]:
    """All combinations of the values that the user gives, those of the last keyword changing first."""
    if not callable(builder):
        raise ArgumentError(f"gshard.configure takes a builder, not a {type(builder).__name__}.", hint=_HINT)
    if not isinstance(choices, Mapping) or not choices:
        raise ArgumentError("choices are no dictionary from keywords to values.", user_line(), repr(choices), _HINT)
    every = [
        () if isinstance(given, str) or not isinstance(given, Iterable) else (*given,) for given in choices.values()
    ]
    for (key, given), values in zip(choices.items(), every, strict=True):
        if not values:
            raise ArgumentError(f"choices of {key!r} are no list of values.", user_line(), f"{key!r}: {given!r}", _HINT)
    return [dict(zip(map(str, choices), values, strict=True)) for values in itertools.product(*every)]


def _built(builder: Callable[..., Any], keywords: dict[str, Any]) -> tuple[Any, ...] | None:
    """Calls a builder; None if it returns None, because there is no step for these keywords."""
    name = name_of(builder)
    try:
        made = builder(**keywords)
    except Exception as error:
        error.add_note(f"gshard called {name}({text_of(keywords)})")
        raise
    if made is None or (isinstance(made, tuple) and made and callable(made[0])):
        return made
    kind = "a tuple that begins with no function" if isinstance(made, tuple) else f"{type(made).__name__}, not a tuple"
    hint = "A builder returns (step, *arguments), or None if there is no step for these keywords."
    raise ArgumentError(f"{name} returned {kind}.", user_line(), text_of(keywords), hint)


# Configure run: estimates all configurations and searches some.


@with_tables
def estimated(program: Program, mesh: Mesh, machine: Machine, donated: Iterable[int]) -> tuple[float, float]:
    """What one device would take if all work and all arrays were shared evenly, and nothing were sent.

    Seconds of a call, and bytes of arguments and results that every plan holds at least.
    """
    devices, first = machine.size, len(program.captured)
    whole = cost_of_kernels(kernels_of(program.block), mesh, machine, [first + i for i in donated])
    # Parts that are written for one device run once on each.
    kept = whole.memory.fixed if all(e.rule is None or e.rule.is_free for e in program.block.walk()) else 0
    return whole.seconds / devices, kept / devices


@dataclasses.dataclass(eq=False)
class _Candidate:
    """A configuration that is estimated, and its search if that has begun."""

    keywords: dict[str, Any]
    made: tuple[Any, ...]  # the step and its arguments
    run: SearchRun
    limit: float  # bytes that a device may hold
    seconds: float  # seconds, least_bytes: as ``estimated``
    least_bytes: float
    why: str = "not begun, because the time was over"

    @property
    def chosen(self) -> PricedPlan | None:
        """The best plan so far."""
        plans = [one.chosen for one in self.run.begun if one.has_found]
        return min(plans, key=lambda plan: plan.rank(self.limit), default=None)

    @property
    def least_seconds(self) -> float:
        """What others must take less than: the time of the plan, and its estimate if it fits without recomputing."""
        assert self.chosen is not None, "it has a plan"
        return min(self.chosen.cost.seconds, math.inf if self.chosen.recomputed else self.seconds)


@dataclasses.dataclass(eq=False)
class ConfigureRun:
    """The search over all configurations: a builder with the values of its keywords, on meshes of one machine.

    What it has found is kept, whenever time or a signal ends it.
    """

    builder: Callable[..., Any]
    keywords: Sequence[dict[str, Any]]  # of all configurations
    meshes: list[Mesh]
    given_machine: str | Machine | None
    machine: Machine
    limit: float
    budget: TimeBudget
    candidates: list[_Candidate] = dataclasses.field(default_factory=list)
    others: dict[str, str] = dataclasses.field(default_factory=dict)  # those without an estimate, with the reason
    error: Exception | None = None  # the first one of a configuration

    def search(self) -> None:
        """Estimates all configurations, and searches those that may be the fastest, the least estimate first."""
        share = dataclasses.replace(self.budget.part(3), left_out=[])
        for keywords in self.keywords:
            text = text_of(keywords)
            step = lambda keywords=keywords: self._add(keywords)  # noqa: E731
            if not share.attempt(f"estimating {text}", step, always=not self.candidates):
                self.others[text] = "not estimated, because the time was over"
        if self.error is not None and not self.candidates:
            raise self.error
        if not self.candidates:
            raise ArgumentError(
                "the builder has no step: it returns None for all keywords.",
                user_line(),
                f"{len(self.others)} combinations of {', '.join(self.keywords[0])}",
                "Return (step, *arguments) for some of them.",
            )
        for candidate in sorted(self.candidates, key=lambda one: one.seconds):
            fastest = self._fastest
            if candidate.least_bytes > self.limit:
                least = format_bytes(int(candidate.least_bytes))
                candidate.why = f"for which a device holds at least {least} of arguments and results"
            elif fastest is not None and self.budget.is_over:
                self.budget.left_out.append(text_of(candidate.keywords))
            elif fastest is not None and candidate.seconds >= fastest.least_seconds:
                candidate.why = "estimated to be no faster than the best"
            else:
                self._search(candidate)

    @property
    def _fastest(self) -> _Candidate | None:
        """The candidate with the fastest plan that fits."""
        pairs = ((one, one.chosen) for one in self.candidates)
        fitting = [(one, plan.cost.seconds) for one, plan in pairs if plan is not None and plan.cost.peak <= self.limit]
        return min(fitting, key=lambda pair: pair[1], default=(None,))[0]

    def _failed(self, error: Exception) -> str:
        """Keeps the first error, and returns why a configuration has no plan."""
        self.error = self.error or error
        return f"not tried, because of an error: {in_a_line(error)}"

    def _add(self, keywords: dict[str, Any]) -> bool:
        """Adds the configuration with these keywords."""
        try:
            made = _built(self.builder, keywords)
            if made is None:
                self.others[text_of(keywords)] = "for which the builder returns None"
                return True
            searched = searched_of(made[0], made[1:], {})
            lowered = searched.lower(self.meshes[0])
            figures = estimated(lowered.program, self.meshes[0], self.machine, lowered.donated)
            run = SearchRun(searched, self.meshes, self.machine, int(self.limit), self.budget)
            self.candidates.append(_Candidate(keywords, made, run, self.limit, *figures))
        except OutOfTime:
            raise
        except Exception as error:  # of any kind: other keywords have steps
            self.others[text_of(keywords)] = self._failed(error)
        return True

    def _search(self, candidate: _Candidate) -> None:
        """Searches for one configuration in half of the time that is left; what it leaves out gets its name."""
        text, budget = text_of(candidate.keywords), self.budget.part()
        budget.progress.step(f"searching: {text}")
        progress = dataclasses.replace(budget.progress, part=text)
        candidate.run.budget = own = dataclasses.replace(budget, progress=progress, left_out=[], failed={})
        try:
            candidate.run.search(with_presets=False)
        except Exception as error:  # of any kind: other configurations have plans
            candidate.why = self._failed(error)
            if candidate.chosen is not None:
                self.budget.failed[text] = in_a_line(error)
        finally:
            self.budget.left_out += [f"{text}: {name}" for name in own.left_out]
            self.budget.failed |= {f"{text}: {name}": error for name, error in own.failed.items()}
        if self._fastest is candidate and candidate.chosen is not None:
            self.budget.progress.better(f"{text}: {candidate.chosen.cost}")

    def result(self, stopped: int | None) -> Configurations | None:
        """What was found; None if a signal ended the search before it had a plan."""
        found = [(one, one.run.result(stopped)) for one in self.candidates]
        rows = [
            Configuration(one.keywords, one.made[0], one.made[1:], result, self.given_machine)
            for one, result in found
            if result is not None
        ]
        if stopped is not None and not rows:
            return None
        rows.sort(key=lambda row: row.found.best.chosen.rank(self.limit))
        if not rows and self.error is not None:
            raise self.error
        if not rows or rows[0].cost.peak > self.limit:
            raise self._fits_nowhere(rows)
        others = self.others | {text_of(one.keywords): one.why for one, result in found if result is None}
        return Configurations(
            tuple(rows), others, self.machine, self.limit, tuple(self.budget.left_out),
            self.budget.failed_lines, self.budget.spent, stopped,
        )  # fmt: skip

    def _fits_nowhere(self, rows: Sequence[Configuration]) -> MemoryLimitError:
        nearest = min(self.candidates, key=lambda one: one.least_bytes)
        needed, text = int(nearest.least_bytes), f"{text_of(nearest.keywords)}: a device holds at least"
        if rows:
            needed, text = rows[0].cost.peak, f"{text_of(rows[0].keywords)}, mesh {rows[0].mesh}: a device needs"
        cut = " Not everything was tried in the time: raise budget_seconds." if self.budget.left_out else ""
        error = MemoryLimitError(
            f"no configuration fits in {format_bytes(int(self.limit))}.",
            user_line(),
            f"nearest: {text} {format_bytes(needed)}, {format_bytes(needed - int(self.limit))} more than it has",
            f"Use more devices or a smaller batch, or let the builder recompute more, use more micro-batches, or split "
            f"more of its state.{cut}",
        )
        error.needed = needed
        return error


@without_our_frames
def configure(
    step_builder: Callable[..., Any],
    *,
    choices: Mapping[str, Iterable[Any]],
    mesh: Any = None,
    machine: str | Machine | None = None,
    memory_limit: int | str | None = None,
    budget_seconds: float | None = None,
    progress: bool | Callable[[str], object] | None = None,
) -> Configurations:
    """Finds the configuration of a training step with the lowest modelled time on a machine, among those that fit.

    It chooses the keywords of a builder, the mesh, the sharding of every value, and what gshard recomputes to fit.

    Args:
        step_builder: a function of keywords that returns ``(step, *arguments)`` as ``gshard.search`` takes them: a
            function, or one from ``gshard.jit``, ``jax.jit``, ``flax.nnx.jit`` or ``equinox.filter_jit``, and arrays or
            ``jax.ShapeDtypeStruct``. It returns None for keywords that it has no step for. Donate the training state:
            ``jax.jit(step, donate_argnums=0)``.
        choices: for keywords of the builder, the values to choose from.
        mesh: as for ``gshard.search``. By default the number of devices is that of ``machine``.
        machine: what the devices are, such as ``"h100:8x8"``; by default what the mesh's devices are.
        memory_limit, progress: as for ``gshard.search``.
        budget_seconds: how long everything together may take. It takes longer by no more than one planning of one step,
            and of data parallelism and FSDP if no mark splits the step. With None it ends once all configurations are
            searched or estimated to be no faster, after 300 seconds at the latest.

    Returns:
        the configurations, the best first; print them. ``found.best.jit()`` is the partitioned step,
        ``found.best.save(path)`` writes its plan for ``gshard.SavedPlan.load``. Ctrl-C and SIGTERM end the search, as
        they end ``gshard.search``.

    Raises:
        ArgumentError: the builder returns no step, or a keyword has no values.
        MemoryLimitError: no configuration fits. The message names the nearest.
        MachineError, MeshError, ShardingError, TraceError: as for ``gshard.search``.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> def build(micro_batches):
    ...     def step(w, x):
    ...         rounds = x.reshape(-1, micro_batches, 1024).swapaxes(0, 1)
    ...         add = lambda total, part: (total + jnp.mean(part @ w), None)
    ...         return jax.lax.scan(add, 0.0, rounds)[0]
    ...     return step, jax.ShapeDtypeStruct((1024, 4096), "float32"), jax.ShapeDtypeStruct((64, 1024), "float32")
    >>> found = configure(build, mesh=8, machine="h100:1x8", choices={"micro_batches": [1, 4]})
    >>> found.best.keywords
    {'micro_batches': 1}
    """
    budget = TimeBudget.of(budget_seconds, progress)
    budget.progress.name = "gshard.configure"
    combinations = _combinations(step_builder, choices)
    if mesh is None and machine is not None:
        mesh = (machine if isinstance(machine, Machine) else Machine.of(machine)).size
    if mesh is None:
        raise ArgumentError("gshard.configure needs the number of devices.", user_line(), hint="Give mesh=64.")
    meshes = list(meshes_to_try(mesh))
    on = Machine.read(machine_of(meshes[0]) if machine is None else machine, meshes[0].size)
    limit = float(on.memory if memory_limit is None else bytes_of(memory_limit))
    run = ConfigureRun(step_builder, combinations, meshes, machine, on, limit, budget)
    return until_stopped(run.search, run.result)
