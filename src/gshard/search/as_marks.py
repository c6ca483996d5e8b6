"""Reproduces a plan with few marks, each tested by planning and pricing, and writes them as statements."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import is_transposed
from gshard.core.mark import mark_of_cut, text_of_spec
from gshard.core.number_text import format_ms, significant
from gshard.core.paths import is_below
from gshard.core.plan import Plan
from gshard.core.program import Program, Value, format_bytes
from gshard.core.sharding import Sharding
from gshard.core.time_budget import TimeBudget
from gshard.naming.argument_names import equal_layers
from gshard.naming.array_names import ArrayNames
from gshard.planning.added_marks import spec_of_cut, text_of_mark, with_marks
from gshard.planning.layer_stacks import schedules_of
from gshard.search.find import ended
from gshard.search.pricing import PricedPlan

_NEAR = 5e-4  # of the plan's time: a smaller difference counts as none
_MORE_MEMORY = 1.01  # ratio of two peaks of memory: a smaller one counts as the same
_TOLERANCE = 0.01  # of the plan's time and memory: what marks may take more, and are enough
_MOST = 6  # values that are tried
_ARGUMENTS = "arguments"  # the place of the mark that places all of them


@dataclasses.dataclass(frozen=True, eq=False)
class FoundMark:
    """One mark, perhaps on several values of the same name in equal layers."""

    at: str  # an argument, or the operation and line that compute the value
    text: str  # the source text, ``gshard.shard(x, P(None, 'model'))``
    saved: float  # seconds of a call that it saves, after the marks before it; 0 before it is tried
    # the marked values, with their shardings in the plan
    shardings: Mapping[Value, Sharding] = dataclasses.field(repr=False)

    @property
    def values(self) -> int:
        """How many values it marks."""
        return len(self.shardings)

    def __str__(self) -> str:
        times = f" ({self.values} values)" if self.values > 1 else ""
        return f"{self.text:<44} {self.at}{times}: {significant(-self.saved * 1e3, 3, '+')} ms"


@dataclasses.dataclass(frozen=True)
class Marks:
    """Marks that make a program nearly as fast as a plan, in about its memory."""

    marks: tuple[FoundMark, ...]  # the marks, in the order in which they were found
    priced: PricedPlan  # the plan with all of them
    bare: PricedPlan  # the plan with none of them
    goal: PricedPlan  # the plan to reproduce
    limit: float  # bytes that a device may hold
    took: float = 0.0  # seconds that the search took
    left_out: tuple[str, ...] = ()  # steps that were cut or not begun because the time was over
    statements: tuple[str, ...] = ()  # lines that mark arguments, for the beginning of the function

    def placed_by_user(self) -> Marks:
        """The same marks where the user places the arguments, because ``in_shardings`` cannot be given."""
        changed = (
            dataclasses.replace(mark, text="placed as print(found) shows") if mark.at == _ARGUMENTS else mark
            for mark in self.marks
        )
        return dataclasses.replace(self, marks=tuple(changed))

    @property
    def seconds(self) -> float:
        """Seconds of a call with all of them."""
        return self.priced.cost.seconds

    @property
    def without(self) -> float:
        """Seconds of a call with none of them."""
        return self.bare.cost.seconds

    @property
    def is_near(self) -> bool:
        """Whether a call takes as long as the plan with them, to the digits that are shown."""
        return abs(self.seconds / self.goal.cost.seconds - 1) < _NEAR

    @property
    def nearness(self) -> str:
        """The time of a call with all of them, that of the plan, and how far one is from the other."""
        over = 100 * (self.seconds / self.goal.cost.seconds - 1)
        side = "above" if over > 0 else "below"
        near = "as the plan" if self.is_near else f"{significant(abs(over), 2)} % {side} the plan"
        how = "with them" if self.marks else "without a further mark"
        peaks = (self.priced.cost.peak, self.goal.cost.peak)
        memory = f"; peak {' instead of '.join(map(format_bytes, peaks))}"
        differs = max(peaks) > min(peaks) * _MORE_MEMORY
        return f"{self._text(self.priced)} {how}, {near} ({self._text(self.goal)}){memory if differs else ''}"

    def __str__(self) -> str:
        rows = [f"  {i}  {mark}" for i, mark in enumerate(self.marks, 1)]
        stages = dict.fromkeys(map(str, schedules_of(self.goal.plan.program).values()))
        with_stages = "".join(f"with {call} for its layers, " for call in stages)
        first = f"{self._text(self.bare)} {with_stages}without further marks"
        lines = [f"in front of the first statement of {self.goal.plan.program.name}:"] if self.statements else []
        lines += [f"  {line}" for line in self.statements]
        return "\n".join([first, *rows, self.nearness, *ended(self.took, self.left_out, None), *lines])

    def _text(self, plan: PricedPlan) -> str:
        size = f", {format_bytes(plan.cost.peak)}: does not fit" if plan.cost.peak > self.limit else ""
        return f"{format_ms(plan.cost.seconds)}{size}"


@dataclasses.dataclass(frozen=True)
class _Trials:
    """Prices the program of a plan with marks, and compares it with the plan."""

    goal: PricedPlan  # the plan to reproduce
    limit: float  # bytes that a device may hold
    price: Callable[[Program], PricedPlan]  # plans a program and prices it
    budget: TimeBudget

    def priced(self, marks: Sequence[FoundMark]) -> PricedPlan | None:
        """The plan with these marks; None if they do not fit the program, or if the time is over."""
        doing = f"{marks[-1].text} {marks[-1].at}" if marks else "the program without further marks"
        program, mesh = self.goal.plan.program, self.goal.plan.mesh
        marked = with_marks(program, {v: mark_of_cut(s.dims, mesh) for c in marks for v, s in c.shardings.items()})

        def planned() -> PricedPlan | None:
            with contextlib.suppress(GShardError):
                return None if marked is None else self.price(marked)
            return None

        return self.budget.attempt(doing, planned, always=not marks, raises=True)

    def is_near(self, now: PricedPlan) -> bool:
        """Whether a plan takes about as long as the goal, and about its memory."""
        goal, most = self.goal.cost, 1 + _TOLERANCE
        fits = now.cost.peak <= self.limit or goal.peak > self.limit
        return now.cost.seconds <= goal.seconds * most and now.cost.peak <= goal.peak * most and fits

    def is_better(self, now: PricedPlan, best: PricedPlan) -> bool:
        """Whether a plan is better than another one."""
        return now.rank(self.limit) < best.rank(self.limit)

    def together(
        self, start: PricedPlan, marks: Callable[[PricedPlan], Iterator[FoundMark]]
    ) -> list[tuple[FoundMark, PricedPlan]]:
        """Puts marks together: each is kept if the plan is better with it than with those before. It has the plans.

        ``marks`` has those that are left to try, given the best plan so far; the first of them is tried next.
        """
        kept, best = list[tuple[FoundMark, PricedPlan]](), start
        while not self.is_near(best) and (mark := next(marks(best), None)) is not None:
            found = self.priced([*(earlier for earlier, _ in kept), mark])
            if found is not None and self.is_better(found, best):
                kept.append((mark, found))
                best = found
        return kept

    def needed(self, kept: Sequence[tuple[FoundMark, PricedPlan]]) -> tuple[list[FoundMark], PricedPlan]:
        """The marks without those that the others make superfluous, and the plan with them."""
        needed, current = [c for c, _ in kept], kept[-1][1]
        for candidate in list(needed) if len(kept) > 1 else ():
            others = [c for c in needed if c is not candidate]
            now = self.priced(others)
            if now is not None and (self.is_near(now) or not self.is_better(current, now)):
                needed, current = others, now
        return needed, current


def marks_of(goal: PricedPlan, limit: float, price: Callable[[Program], PricedPlan], budget: TimeBudget) -> Marks:
    """Finds marks that reproduce a plan: a single one if it suffices, else several that are all needed.

    It tries the values whose sharding differs from the plan: arguments alone, six of them. If none is enough, it
    marks all arguments, then others that still differ, six of them.
    """
    trials, program = _Trials(goal, limit, price, budget), goal.plan.program
    without = trials.priced([])
    assert without is not None
    arguments = {*program.block.inputs}
    of_arguments = [m for m in _candidates(goal.plan, without.plan) if not arguments.isdisjoint(m.shardings)]
    targets = {v: s for m in of_arguments for v, s in m.shardings.items() if without.plan.shardings[v].dims != s.dims}
    every = [FoundMark(_ARGUMENTS, "in_shardings=found.in_shardings", 0.0, targets)] if len(targets) > 1 else []
    seen = set[tuple[str, str]]()

    def more(best: PricedPlan) -> Iterator[FoundMark]:
        for mark in (*every, *_candidates(goal.plan, best.plan)):
            if (mark.at, mark.text) not in seen and len(seen) <= _MOST:
                seen.add((mark.at, mark.text))
                yield mark

    kept = list[tuple[FoundMark, PricedPlan]]()
    if not trials.is_near(without):
        alone = ((mark, trials.priced([mark])) for mark in of_arguments[:_MOST])
        enough = next(((mark, now) for mark, now in alone if now is not None and trials.is_near(now)), None)
        kept = trials.together(without, more) if enough is None else [enough]
    needed, current = trials.needed(kept) if kept else ([], without)
    before = [without, *(now for _, now in kept)]
    marks = [
        dataclasses.replace(c, saved=then.cost.seconds - now.cost.seconds)
        for (c, now), then in zip(kept, before, strict=False)
        if c in needed
    ]
    return Marks(tuple(marks), current, without, goal, limit, budget.spent, ("further marks",) * bool(budget.left_out))


def _candidates(plan: Plan, current: Plan) -> list[FoundMark]:
    """Names and values with another sharding than in the plan: arguments first, then those with the most bytes."""
    arguments = {*plan.program.block.inputs[len(plan.program.captured) :]}
    groups: dict[tuple[str, str], dict[Value, Sharding]] = {}
    for v, name in _named(plan.program).items():
        target = Sharding(plan.shardings[v].dims)
        if v.shape and (text := text_of_mark(target, plan.mesh)) is not None:
            groups.setdefault((name, text), {})[v] = target
    differ = [
        FoundMark(name, text, 0.0, values)
        for (name, text), values in groups.items()
        if any(Sharding(current.shardings[v].dims) != s for v, s in values.items())
    ]
    return sorted(differ, key=lambda c: (arguments.isdisjoint(c.shardings), -sum(v.bytes for v in c.shardings)))


def _named(program: Program) -> Mapping[Value, str]:
    """The values that a user can mark, with their names. Values of equal layers have equal names."""
    first = len(program.captured)
    arguments = ArrayNames(program).arguments
    names = {v: arguments[v].alike for v in program.block.inputs[first:]}
    for e in program.block.walk():
        if e.mark is None and e.line and not is_transposed(e.source_info):
            names.update({v: f"{e.name} at {e.line}" for v in e.outputs if not v.made})
    return {v: f"{v.dtype_name}[{','.join(map(str, v.shape))}] of {name}" for v, name in names.items()}


# Writes the marks of arguments as statements of the function.


def statements_of(marks: Marks, paths: Sequence[str]) -> tuple[str, ...]:
    """The lines that mark arguments, for the place in front of the first statement of the function.

    Paths as of ``gshard.shard_by_path`` name the arrays inside of an argument. Marks without such a line are left out.
    """
    program, mesh = marks.goal.plan.program, marks.goal.plan.mesh
    inputs = program.block.inputs[len(program.captured) :]
    cuts = {v: s for mark in marks.marks for v, s in mark.shardings.items() if v in inputs}
    specs = {v: spec_of_cut(s, mesh) if s.atoms else PartitionSpec() for v, s in cuts.items()}
    texts = {v: f"shard(x, jax.{text_of_spec(spec)})" for v, spec in specs.items() if spec is not None}
    stages = {inputs[i]: str(schedule) for i, schedule in schedules_of(program).items()}
    staged, marked = (argument_statements(calls, inputs, paths) for calls in (stages, texts))
    return tuple(row for name in {**staged, **marked} for of in (staged, marked) for row in of.get(name, ()))


def argument_statements(
    calls: Mapping[Value, str], inputs: Sequence[Value], paths: Sequence[str]
) -> dict[str, list[str]]:
    """The lines that call a function of gshard with arguments, by parameter."""
    statements, parameters = dict[str, list[str]](), dict[str, dict[str, Value]]()
    for v, path in zip(inputs, paths, strict=bool(paths)):
        parameters.setdefault(path.partition("/")[0], {})[path.partition("/")[2]] = v
    for name, values in parameters.items():
        own = {path: calls[v].replace("'", '"') for path, v in values.items() if v in calls}
        patterns = own if "" in own else _patterns(own, values)
        if not patterns or not name.isidentifier():
            continue
        call = next(iter(own.values())).replace("(x,", f"({name},", 1)
        if "" in own:
            statements[name] = [f"{name} = gshard.{call}"]
        elif call.startswith("shard("):
            rows = [f"{json.dumps(pattern, ensure_ascii=False)}: {text[9:-1]}" for pattern, text in patterns.items()]
            call = f"{name} = gshard.shard_by_path({name}, {{"
            statements[name] = [call, *(f"    {row}," for row in rows), "})"] if rows[1:] else [f"{call}{rows[0]}}})"]
        elif len({*own.values()}) == 1:
            statements[name] = [f"{name} = gshard.{call[:-1]}, paths={json.dumps([*patterns], ensure_ascii=False)})"]
    return statements


def _patterns(texts: Mapping[str, str], values: Mapping[str, Value]) -> dict[str, str] | None:
    """Patterns that give each path its text and match no other path; None if there are none."""
    words = {path: tuple(path.split("/")) for path in values}
    folded = equal_layers({words[path]: (v.shape, v.dtype, texts.get(path)) for path, v in values.items()})
    alike = {"/".join(folded.get(words[path], words[path])): text for path, text in texts.items()}
    for candidate in (alike, dict(texts)):
        first_match = {path: next((p for p in candidate if is_below(p, path)), "") for path in values}
        if all(candidate.get(p) == texts.get(path) for path, p in first_match.items()):
            return candidate
    return None
