"""configure: finds the configuration of a training step that takes the least time on a cluster.

It traces and estimates every combination of keywords, prices plans by hand for the most promising ones, and solves the
problems of the best on every mesh, as in ``gshard.search``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gshard.api.configuration import BuiltStep, Configuration, Configurations, built_by, text_of
from gshard.api.search import (
    FINISHED,
    Searched,
    SearchRun,
    is_number_of_devices,
    meshes_to_try,
    searched_of,
)
from gshard.core.deadline import OutOfTime
from gshard.core.errors import ArgumentError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mesh import Mesh
from gshard.core.paths import place_of_definition
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program, format_bytes
from gshard.core.time_budget import TimeBudget, in_a_line, until_stopped
from gshard.device.cost import cost_of_kernels
from gshard.device.fusion_model import kernels_of
from gshard.device.machine import Machine, machine_of
from gshard.remat.rematerialise import MemoryLimitError, bytes_of
from gshard.search.find import MeshSearch
from gshard.search.pricing import PricedPlan
from gshard.tracing.by_jax import name_of

# Builder: a function of keywords that returns ``(step, *arguments)``. A keyword has the values that the user states,
# else those of its annotation, else the usual ones of its name.

MICRO_BATCHES, RECOMPUTE, GLOBAL_BATCH = "micro_batches", "recompute", "global_batch"

# Names in ``jax.checkpoint_policies``, from the one that recomputes least to the one that recomputes most.
POLICIES = ("everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")

_HINT = (
    "A builder returns (step, *arguments) for keywords such as micro_batches and recompute. Give values of others as "
    "choices={'keyword': [values]}. For a step without keywords use gshard.search."
)


def choices_of(
    builder: Callable[..., Any], global_batch: int | None, choices: Mapping[str, Sequence[Any]] | None
) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    """The values that each keyword of a builder may have, and the keywords that have one value."""
    if not callable(builder):
        raise ArgumentError(f"gshard.configure takes a builder, not a {type(builder).__name__}.", hint=_HINT)
    name, where = name_of(builder), _place(builder)
    batch = _checked_batch(global_batch)
    stated = {str(key): _checked_values(key, values) for key, values in dict(choices or {}).items()}
    parameters, annotations = _parameters(builder), _annotations(builder)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    keywords = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for key in stated:
        if key not in keywords and not takes_any:
            raise ArgumentError(
                f"{name} has no keyword {key!r}.", where, hint=known_names(key, list(keywords), "Its keywords are")
            )
    found: dict[str, tuple[Any, ...]] = {}
    fixed: dict[str, Any] = {}
    for key, parameter in keywords.items():
        if key in stated:
            found[key] = stated[key]
        elif key == GLOBAL_BATCH and batch is not None:
            fixed[key] = batch
        elif annotated := _annotated(annotations.get(key)):
            found[key] = annotated
        elif key == MICRO_BATCHES and batch is not None:
            found[key] = tuple(n for n in range(1, batch + 1) if batch % n == 0)
        elif key == RECOMPUTE:
            found[key] = POLICIES
        elif parameter.default is parameter.empty or key == MICRO_BATCHES:
            raise _no_values(key, name, where)
    found |= {key: values for key, values in stated.items() if key not in found}
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise _no_values(positional[0], name, where)
    if not found:
        had = ", ".join(keywords) or "none"
        raise ArgumentError(f"{name} has no keyword to choose.", where, f"keywords: {had}", _HINT)
    if batch is not None and (wrong := [n for n in found.get(MICRO_BATCHES, ()) if not _divides(n, batch)]):
        raise ArgumentError(
            f"a global batch of {batch} is not divided evenly by {wrong[0]!r} micro-batches.",
            where,
            f"micro_batches: {', '.join(map(repr, found[MICRO_BATCHES]))}",
            "Give divisors of global_batch, or leave out choices of micro_batches to try all of them.",
        )
    return found, fixed


def combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """All combinations of values, those of the last keyword changing first."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _no_values(key: str, name: str, where: str | None) -> ArgumentError:
    if key == MICRO_BATCHES:
        what, hint = "gshard does not have the batch to divide", "Give global_batch=, or choices={'micro_batches': []}."
        return ArgumentError(f"{name} takes micro_batches, and {what}.", where, hint=hint.replace("[]", "[1, 2, 4]"))
    if key == GLOBAL_BATCH:
        return ArgumentError(f"{name} takes global_batch, which is not given.", where, hint="Give global_batch=.")
    return ArgumentError(
        f"{name} needs {key!r}, for which there are no values.",
        where,
        hint=f"Give choices={{{key!r}: [values]}}, or a default in the builder.",
    )


def _place(builder: Callable[..., Any]) -> str | None:
    place = place_of_definition(builder)
    return None if place is None else f"{os.path.basename(place[0])}:{place[1]} ({name_of(builder)})"


def _checked_batch(batch: Any) -> int | None:
    is_number = not isinstance(batch, bool) and hasattr(batch, "__index__") and int(batch) > 0
    if batch is None or is_number:
        return None if batch is None else int(batch)
    raise ArgumentError(
        f"global_batch={batch!r} is no number of examples.", user_line(), hint="Give the examples of one step: 512."
    )


def _checked_values(key: Any, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__") or not (made := tuple(values)):
        raise ArgumentError(
            f"choices of {key!r} are no list of values.",
            user_line(),
            f"{key!r}: {values!r}",
            "Give one or more values.",
        )
    return made


def _divides(n: Any, batch: int) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0 and batch % n == 0


def _parameters(builder: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return {}


def _annotations(builder: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(builder)
    except Exception:  # of any kind: annotations may be text that names nothing
        return {}


def _annotated(annotation: Any) -> tuple[Any, ...]:
    """The values of ``Literal[...]`` and of ``bool``; none of another annotation."""
    if annotation is bool:
        return False, True
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


# Configure run: estimates all configurations and searches some.


@with_tables
def estimated(program: Program, mesh: Mesh, machine: Machine, donated: Iterable[int]) -> tuple[float, float, float]:
    """What one device would take if all work and all arrays were shared evenly, and nothing were sent.

    Seconds of a call, bytes at the peak, and bytes of arguments and results that every plan holds at least.
    """
    devices, first = machine.size, len(program.captured)
    whole = cost_of_kernels(kernels_of(program.block), mesh, machine, [first + i for i in donated])
    kept = whole.memory.arguments + whole.memory.results - whole.memory.shared
    if not all(e.rule is None or e.rule.is_free for e in program.block.walk()):
        kept = 0  # parts that are written for one device run once on each
    return whole.seconds / devices, whole.peak / devices, kept / devices


_RECOMPUTES = 4 / 3  # of the time of a step whose estimate does not fit: a second forward pass, at most


@dataclasses.dataclass(eq=False)
class EstimatedStep:
    """A configuration that is estimated, and its search if that has begun."""

    built: BuiltStep
    searched: Searched
    limit: float
    seconds: float  # seconds, peak, least_bytes: as ``estimated``
    peak: float
    least_bytes: float
    run: SearchRun | None = None
    why: str = "not begun, because the time was over"

    @property
    def promise(self) -> float:
        """Orders configurations, the most promising one first."""
        return self.seconds * (_RECOMPUTES if self.peak > self.limit else 1.0)

    @property
    def chosen(self) -> PricedPlan | None:
        """The best plan so far."""
        plans = [] if self.run is None else [one.chosen for one in self.run.begun if one.has_found]
        return min(plans, key=lambda plan: plan.rank(self.limit), default=None)

    @property
    def fits_as_it_is(self) -> bool:
        """Whether its best plan so far fits without recomputed values."""
        return self.chosen is not None and self.chosen.cost.peak <= self.limit and not self.chosen.recomputed


_FULL_PRICE = 0.95  # of the time of a plan in the simplified model, what its full price may be


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
    budget: TimeBudget
    candidates: list[EstimatedStep] = dataclasses.field(default_factory=list)
    others: dict[str, str] = dataclasses.field(default_factory=dict)  # those without an estimate, with the reason
    fastest: EstimatedStep | None = None
    error: Exception | None = None  # the first one of a configuration

    def search(self) -> None:
        """Estimates all configurations, and searches those that may be the fastest."""
        self._estimate()
        self._search()
        if self.any_shape:
            self._cut_axes()

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

    def _add(self, keywords: Mapping[str, Any]) -> bool:
        """Adds the configuration with these keywords."""
        try:
            built = built_by(self.builder, keywords, self.fixed, self.own)
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
        own = {key: value for key, value in self.own.items() if key != "finite"}
        searched = searched_of(built.step, built.arguments, {}, own, self.own["finite"], configure)
        lowered = searched.lower(self.meshes[0])
        figures = estimated(lowered.program, self.meshes[0], self.machine, lowered.donated)
        return EstimatedStep(built, searched, self.limit, *figures)

    def _search(self) -> None:
        """Searches the configurations, the most promising first, without those that are estimated to be no faster."""
        for candidate in sorted(self.candidates, key=lambda one: one.promise):
            if candidate.least_bytes > self.limit:
                least = format_bytes(int(candidate.least_bytes))
                candidate.why = f"for which a device holds at least {least} of arguments and results"
            elif self.fastest is not None and self.budget.is_over:
                self.budget.left_out.append(text_of(candidate.built.keywords))
            elif not self._is_slower(candidate):
                self._search_one(candidate)

    def _cut_axes(self) -> None:
        """Searches for the fastest configuration on meshes of three axes, near its best plans on meshes of two."""
        candidate = self.fastest
        if candidate is None or candidate.run is None or self.budget.is_over:
            return

        def search(run: SearchRun) -> None:
            run.cut_axes(run.budget)
            self._price(run, [one for one in run.begun if one.near is not None and not self._is_beaten(one)])

        self._within(candidate, search)

    def _search_one(self, candidate: EstimatedStep) -> None:
        """Solves the problem of a configuration on every mesh, and prices the solutions of the most promising ones."""

        def search(run: SearchRun) -> None:
            run.solve(run.budget)
            promising = sorted(run.begun, key=lambda one: one.rank)
            self._price(run, [one for one in promising if not self._is_beaten(one)][:FINISHED])

        self._within(candidate, search)
        # On the meshes that are best for one configuration the others are solved first.
        assert candidate.run is not None
        ranked = sorted(candidate.run.begun, key=lambda one: one.rank)
        places = {one.mesh: i for i, one in enumerate(ranked)}
        self.meshes.sort(key=lambda mesh: places.get(mesh, len(ranked)))

    def _price(self, run: SearchRun, some: Iterable[MeshSearch]) -> None:
        for one in some:
            one.always_prices = self.fastest is None
            one.price_solutions()
            one.price_pipelines()
            run.finished.append(one)

    def _within(self, candidate: EstimatedStep, search: Callable[[SearchRun], None]) -> None:
        """Searches for one configuration in half of the time that is left; what it leaves out gets its name."""
        text, budget = text_of(candidate.built.keywords), self.budget.part()
        budget.progress.step(f"searching: {text}")
        own = dataclasses.replace(
            budget, progress=dataclasses.replace(budget.progress, part=text), left_out=[], failed={}
        )
        if candidate.run is None:
            candidate.run = SearchRun(candidate.searched, self.meshes, False, self.machine, int(self.limit), own)
        candidate.run.budget = own
        try:
            search(candidate.run)
        except Exception as error:  # of any kind: other configurations have plans
            candidate.why = self._failed(error)
            if candidate.chosen is not None:
                self.budget.failed[text] = in_a_line(error)
        finally:
            self.budget.left_out += [f"{text}: {name}" for name in own.left_out]
            self.budget.failed |= {f"{text}: {name}": error for name, error in own.failed.items()}
        self._note(candidate)

    def _is_slower(self, candidate: EstimatedStep) -> bool:
        """Whether a configuration is estimated to take as long as the best plan, or as the estimate of the best.

        The estimate of the best counts if its plan fits without recomputed values.
        """
        if self.fastest is None or self.fastest is candidate or self.fastest.chosen is None:
            return False
        estimate = self.fastest.seconds if self.fastest.fits_as_it_is else math.inf
        if candidate.seconds < min(estimate, self.fastest.chosen.cost.seconds):
            return False
        candidate.why = "estimated to be no faster than the best"
        return True

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
        if known is None or chosen.rank(limit) < known.rank(limit):
            self.fastest = candidate
            self.budget.progress.better(f"{text_of(candidate.built.keywords)}: {chosen.cost}")

    def _configuration(self, candidate: EstimatedStep, stopped: int | None) -> Configuration | None:
        found = None if candidate.run is None else candidate.run.result(stopped)
        if found is None:
            return None
        return Configuration(candidate.built, found, self.given_machine, self.global_batch)

    def result(self, stopped: int | None) -> Configurations | None:
        """What was found; None if a signal ended the search before it had a plan."""
        limit = self.limit
        made = [(candidate, self._configuration(candidate, stopped)) for candidate in self.candidates]
        rows = [row for _, row in made if row is not None]
        if stopped is not None and not rows:
            return None
        rows.sort(key=lambda row: row.found.best.chosen.rank(limit))
        if not rows and self.error is not None:
            raise self.error
        if not rows or rows[0].cost.peak > limit:
            raise self._fits_nowhere(rows)
        others = self.others | {text_of(c.built.keywords): c.why for c, row in made if row is None}
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
    mesh: Any = None,
    machine: str | Machine | None = None,
    global_batch: int | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
    memory_limit: int | str | None = None,
    budget_seconds: float | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    finite: bool = False,
    progress: bool | Callable[[str], object] | None = None,
) -> Configurations:
    """Finds the configuration of a training step with the lowest modelled time on a machine, among those that fit.

    It chooses the keywords of a builder, the mesh, the sharding of every value, and what gshard recomputes to fit.

    Args:
        step_builder: a function of keywords that returns ``(step, *arguments)`` as ``gshard.search`` takes them: a
            function, or one from ``gshard.jit``, ``jax.jit``, ``flax.nnx.jit`` or ``equinox.filter_jit``, and arrays or
            ``jax.ShapeDtypeStruct``. It returns None for keywords that it has no step for. Its keywords get these
            values: those of ``choices``; those of an annotation ``Literal[...]`` or ``bool``; ``micro_batches`` the
            divisors of ``global_batch``; ``recompute`` four names in ``jax.checkpoint_policies``, from
            ``everything_saveable`` to ``nothing_saveable``; ``global_batch`` that number. Others keep their default.
        mesh: as for ``gshard.search``; a number of devices tries every mesh shape with up to two axes, and for the best
            configuration meshes with three axes, near its plans on meshes with two. By default the number is that of
            ``machine``.
        machine: what the devices are, such as ``"h100:8x8"``; by default what the mesh's devices are.
        global_batch: examples of one step, in all micro-batches together.
        choices: for keywords of the builder, the values to choose from.
        memory_limit, static_argnums, static_argnames, donate_argnums, donate_argnames, finite: as for
            ``gshard.search``; donate the training state.
        budget_seconds: how long everything together may take. It takes longer by no more than one planning of one step,
            and of data parallelism and FSDP if no mark splits the step. With None it ends once all configurations are
            searched or estimated to be no faster, after 300 seconds at the latest.
        progress: as for ``gshard.search``.

    Returns:
        the configurations, the best first; print them. ``found.best.jit()`` is the partitioned step,
        ``found.best.save(path)`` writes its plan for ``gshard.SavedPlan.load``. Ctrl-C and SIGTERM end the search, as
        they end ``gshard.search``.

    Raises:
        ArgumentError: the builder has no keyword to choose, or returns no step; a keyword has no values;
            ``global_batch`` is not divided evenly by ``choices`` of micro-batches.
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
    >>> found = configure(build, mesh=8, machine="h100:1x8", global_batch=64, choices={"micro_batches": [1, 4]})
    >>> found.best.keywords
    {'micro_batches': 1}
    """
    budget = TimeBudget.of(budget_seconds, progress)
    budget.progress.name = "gshard.configure"
    found, fixed = choices_of(step_builder, global_batch, choices)
    own = {
        "static_argnums": static_argnums, "static_argnames": static_argnames,
        "donate_argnums": donate_argnums, "donate_argnames": donate_argnames,
    }  # fmt: skip
    if mesh is None and machine is not None:
        mesh = (machine if isinstance(machine, Machine) else Machine.of(machine)).size
    if mesh is None:
        raise ArgumentError("gshard.configure needs the number of devices.", user_line(), hint="Give mesh=64.")
    meshes, any_shape = list(meshes_to_try(mesh)), is_number_of_devices(mesh)
    on = Machine.read(machine_of(meshes[0]) if machine is None else machine, meshes[0].size)
    limit = float(on.memory if memory_limit is None else bytes_of(memory_limit))
    run = ConfigureRun(
        step_builder, found, fixed, {**own, "finite": finite}, meshes, any_shape, machine, on, limit,
        None if global_batch is None else int(global_batch), budget,
    )  # fmt: skip
    return until_stopped(run.search, run.result)
