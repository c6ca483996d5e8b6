"""configure: finds the configuration of a training step that takes the least time on a cluster.

It traces and estimates every combination of keywords, and searches for plans of the most promising ones, as
``gshard.search`` does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gshard.api.configuration import BuiltStep, Configuration, Configurations, built_by, text_of
from gshard.api.search import Searched, SearchRun, meshes_to_try, searched_of
from gshard.core.deadline import OutOfTime
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program, format_bytes
from gshard.core.time_budget import TimeBudget, in_a_line, until_stopped
from gshard.device.cost import cost_of_kernels
from gshard.device.fusion_model import kernels_of
from gshard.device.machine import Machine, machine_of
from gshard.remat.rematerialise import MemoryLimitError, bytes_of
from gshard.search.pricing import PricedPlan

# Builder: a function of keywords that returns ``(step, *arguments)``.


def checked_choices(builder: Callable[..., Any], choices: Any) -> dict[str, tuple[Any, ...]]:
    """The values of each keyword of a builder that the user gives."""
    if not callable(builder):
        raise ArgumentError(f"gshard.configure takes a builder, not a {type(builder).__name__}.", hint=_HINT)
    if not isinstance(choices, Mapping) or not choices:
        raise ArgumentError("choices are no dictionary from keywords to values.", user_line(), repr(choices), _HINT)
    found = {}
    for key, given in choices.items():
        found[str(key)] = values = () if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
        if not values:
            raise ArgumentError(f"choices of {key!r} are no list of values.", user_line(), f"{key!r}: {given!r}", _HINT)
    return found


_HINT = (
    "A builder returns (step, *arguments) for keywords: choices={'micro_batches': [1, 2, 4]}. For a step without "
    "keywords use gshard.search."
)


def combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """All combinations of values, those of the last keyword changing first."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


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
class EstimatedStep:
    """A configuration that is estimated, and its search if that has begun."""

    built: BuiltStep
    searched: Searched
    limit: float
    seconds: float  # seconds, least_bytes: as ``estimated``
    least_bytes: float
    run: SearchRun | None = None
    why: str = "not begun, because the time was over"

    @property
    def chosen(self) -> PricedPlan | None:
        """The best plan so far."""
        plans = [] if self.run is None else [one.chosen for one in self.run.begun if one.has_found]
        return min(plans, key=lambda plan: plan.rank(self.limit), default=None)

    @property
    def fits_as_it_is(self) -> bool:
        """Whether its best plan so far fits without recomputed values."""
        return self.chosen is not None and self.chosen.cost.peak <= self.limit and not self.chosen.recomputed


@dataclasses.dataclass(eq=False)
class ConfigureRun:
    """The search over all configurations: a builder with the values of its keywords, on meshes of one machine.

    What it has found is kept, whenever time or a signal ends it.
    """

    builder: Callable[..., Any]
    choices: Mapping[str, Sequence[Any]]
    meshes: list[Mesh]
    given_machine: str | Machine | None
    machine: Machine
    limit: float
    budget: TimeBudget
    candidates: list[EstimatedStep] = dataclasses.field(default_factory=list)
    others: dict[str, str] = dataclasses.field(default_factory=dict)  # those without an estimate, with the reason
    fastest: EstimatedStep | None = None
    error: Exception | None = None  # the first one of a configuration

    def search(self) -> None:
        """Estimates all configurations, and searches those that may be the fastest, the least estimate first."""
        self._estimate()
        for candidate in sorted(self.candidates, key=lambda one: one.seconds):
            if candidate.least_bytes > self.limit:
                least = format_bytes(int(candidate.least_bytes))
                candidate.why = f"for which a device holds at least {least} of arguments and results"
            elif self.fastest is not None and self.budget.is_over:
                self.budget.left_out.append(text_of(candidate.built.keywords))
            elif not self._is_slower(candidate):
                self._search(candidate)

    def _estimate(self) -> None:
        """Builds, traces and estimates all configurations."""
        share = dataclasses.replace(self.budget.part(3), left_out=[])
        for keywords in combinations(self.choices):
            step, text = functools.partial(self._add, keywords), text_of(keywords)
            if not share.attempt(f"estimating {text}", step, always=not self.candidates):
                self.others[text] = "not estimated, because the time was over"
        if self.error is not None and not self.candidates:
            raise self.error
        if not self.candidates:
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

    def _add(self, keywords: dict[str, Any]) -> bool:
        """Adds the configuration with these keywords."""
        try:
            built = built_by(self.builder, keywords)
            if built is None:
                self.others[text_of(keywords)] = "for which the builder returns None"
                return True
            self.candidates.append(self._traced(built))
        except OutOfTime:
            raise
        except Exception as error:  # of any kind: other keywords have steps
            self.others[text_of(keywords)] = self._failed(error)
        return True

    def _traced(self, built: BuiltStep) -> EstimatedStep:
        searched = searched_of(built.step, built.arguments, {})
        lowered = searched.lower(self.meshes[0])
        figures = estimated(lowered.program, self.meshes[0], self.machine, lowered.donated)
        return EstimatedStep(built, searched, self.limit, *figures)

    def _search(self, candidate: EstimatedStep) -> None:
        """Searches for one configuration in half of the time that is left; what it leaves out gets its name."""
        text, budget, limit = text_of(candidate.built.keywords), self.budget.part(), self.limit
        budget.progress.step(f"searching: {text}")
        own = dataclasses.replace(
            budget, progress=dataclasses.replace(budget.progress, part=text), left_out=[], failed={}
        )
        candidate.run = SearchRun(candidate.searched, self.meshes, self.machine, int(limit), own)
        try:
            candidate.run.search(with_presets=False)
        except Exception as error:  # of any kind: other configurations have plans
            candidate.why = self._failed(error)
            if candidate.chosen is not None:
                self.budget.failed[text] = in_a_line(error)
        finally:
            self.budget.left_out += [f"{text}: {name}" for name in own.left_out]
            self.budget.failed |= {f"{text}: {name}": error for name, error in own.failed.items()}
        chosen, known = candidate.chosen, None if self.fastest is None else self.fastest.chosen
        fits = chosen is not None and chosen.cost.peak <= limit
        if chosen is not None and fits and (known is None or chosen.rank(limit) < known.rank(limit)):
            self.fastest = candidate
            self.budget.progress.better(f"{text}: {chosen.cost}")

    def _is_slower(self, candidate: EstimatedStep) -> bool:
        """Whether a configuration is estimated to take as long as the best plan, or as the estimate of the best.

        The estimate of the best counts if its plan fits without recomputed values.
        """
        if self.fastest is None or self.fastest.chosen is None:
            return False
        estimate = self.fastest.seconds if self.fastest.fits_as_it_is else math.inf
        if candidate.seconds < min(estimate, self.fastest.chosen.cost.seconds):
            return False
        candidate.why = "estimated to be no faster than the best"
        return True

    def result(self, stopped: int | None) -> Configurations | None:
        """What was found; None if a signal ended the search before it had a plan."""
        limit = self.limit
        found = [(one, None if one.run is None else one.run.result(stopped)) for one in self.candidates]
        made = ((one.built, result) for one, result in found if result is not None)
        rows = [Configuration(**vars(built), found=result, machine=self.given_machine) for built, result in made]
        if stopped is not None and not rows:
            return None
        rows.sort(key=lambda row: row.found.best.chosen.rank(limit))
        if not rows and self.error is not None:
            raise self.error
        if not rows or rows[0].cost.peak > limit:
            raise self._fits_nowhere(rows)
        others = self.others | {text_of(c.built.keywords): c.why for c, result in found if result is None}
        return Configurations(
            tuple(rows), others, self.machine, limit, tuple(self.budget.left_out),
            self.budget.failed_lines, self.budget.spent, stopped,
        )  # fmt: skip

    def _fits_nowhere(self, rows: Sequence[Configuration]) -> MemoryLimitError:
        limit, text = self.limit, ""
        if rows:
            needed = rows[0].cost.peak
            text = f"nearest: {text_of(rows[0].keywords)}, mesh {rows[0].mesh}: a device needs {format_bytes(needed)}"
        else:
            nearest = min(self.candidates, key=lambda one: one.least_bytes)
            needed = int(nearest.least_bytes)
            text = f"nearest: {text_of(nearest.built.keywords)}: a device holds at least {format_bytes(needed)}"
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
    checked = checked_choices(step_builder, choices)
    if mesh is None and machine is not None:
        mesh = (machine if isinstance(machine, Machine) else Machine.of(machine)).size
    if mesh is None:
        raise ArgumentError("gshard.configure needs the number of devices.", user_line(), hint="Give mesh=64.")
    meshes = list(meshes_to_try(mesh))
    on = Machine.read(machine_of(meshes[0]) if machine is None else machine, meshes[0].size)
    limit = float(on.memory if memory_limit is None else bytes_of(memory_limit))
    run = ConfigureRun(step_builder, checked, meshes, machine, on, limit, budget)
    return until_stopped(run.search, run.result)
