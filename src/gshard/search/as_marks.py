"""Reproduces a plan with few marks; each was tried by planning and pricing the program again.

A plan has a sharding for every value; of most of them propagation says the same once a few are marked. Which few, a
greedy choice finds: of the values that are sharded otherwise than in the plan, those of the same name in equal layers
taken together, the largest are tried, and what lowers the price most is kept. Then those that are not needed any more
are left out. Where marks do not reach the price of the plan, the plan itself does (``gshard.jit(plan=...)``).

A time budget limits this: the program without further marks is priced in any case, and the marks that were found until
the time is over are returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import is_transposed
from gshard.core.mark import mark_of_cut
from gshard.core.plan import Plan
from gshard.core.program import Program, Value, format_bytes
from gshard.core.sharding import Sharding
from gshard.naming.array_names import ArrayNames
from gshard.planning.added_marks import text_of_mark, with_marks
from gshard.search.how_near import ended
from gshard.search.priced import PricedPlan
from gshard.search.time_budget import TimeBudget

_LARGEST, _FIRST = 3, 2  # candidates of each round
_NEAR = 5e-4  # of the plan's time: a smaller difference is none
_MORE = "further marks"


@dataclasses.dataclass(frozen=True)
class FoundMark:
    """One mark, perhaps on several values of the same name in equal layers.

    Attributes:
        at: an argument, or the operation and line that make the value.
        text: the source text, ``gshard.shard(x, P(None, 'model'))``.
        saved: seconds of a call that it saves, after those before it.
        shardings: the values that it is about, as the plan cuts them.
    """

    at: str
    text: str
    saved: float
    shardings: Mapping[Value, Sharding] = dataclasses.field(repr=False)

    @property
    def values(self) -> int:
        """How many values it is about."""
        return len(self.shardings)

    def __str__(self) -> str:
        times = f" ({self.values} values)" if self.values > 1 else ""
        return f"{self.text:<44} {self.at}{times}: {-self.saved * 1e3:+.3g} ms"


@dataclasses.dataclass(frozen=True)
class Marks:
    """Marks that make a program nearly as fast as a plan.

    Attributes:
        marks: in the order in which they were found.
        priced: the plan that follows from all of them.
        bare: that without any of them.
        goal: the plan that they are to say.
        limit: bytes that a device may hold.
        took: seconds that finding them took.
        left_out: what was not tried, or cut, since the time was over.
    """

    marks: tuple[FoundMark, ...]
    priced: PricedPlan
    bare: PricedPlan
    goal: PricedPlan
    limit: float
    took: float = 0.0
    left_out: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of a call, with all of them."""
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
        near = "as the plan" if self.is_near else f"{abs(over):.2g} % {'above' if over > 0 else 'below'} the plan"
        how = "with them" if self.marks else "without a further mark"
        return f"{self._text(self.priced)} {how}, {near} ({self._text(self.goal)})"

    @property
    def cut(self) -> list[str]:
        """A line on what the time was too short for, if on anything."""
        return ended(self.took, self.left_out, None)

    def __str__(self) -> str:
        rows = [f"  {i}  {mark}" for i, mark in enumerate(self.marks, 1)]
        return "\n".join([f"{self._text(self.bare)} without further marks", *rows, self.nearness, *self.cut])

    def _text(self, plan: PricedPlan) -> str:
        size = f", {format_bytes(plan.cost.peak)}: does not fit" if plan.cost.peak > self.limit else ""
        return f"{plan.cost.seconds * 1e3:.4g} ms{size}"


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """Values that are to be marked together, and the shardings that the plan gives them."""

    at: str
    text: str
    shardings: Mapping[Value, Sharding]

    @property
    def bytes(self) -> int:
        return sum(v.bytes for v in self.shardings)


def marks_of(
    goal: PricedPlan,
    limit: float,
    price: Callable[[Program], PricedPlan],
    budget: TimeBudget,
    *,
    tolerance: float = 0.01,
    most: int = 12,
) -> Marks:
    """Says a plan in marks.

    Args:
        goal: the plan; its program has the marks that the user wrote.
        limit: bytes that a device may hold; marks with which a call takes more are as good as none.
        price: plans the program with other marks, and prices that.
        budget: the time that is left; the program without further marks is priced in any case.
        tolerance: how far above the goal is near enough.
        most: how many marks at most.
    """
    program, mesh = goal.plan.program, goal.plan.mesh
    near = goal.cost.seconds * (1 + tolerance)
    chosen: list[_Candidate] = []

    def tried(candidates: Sequence[_Candidate], doing: str, *, always: bool = False) -> PricedPlan | None:
        marks = {v: mark_of_cut(s.dims, mesh) for c in candidates for v, s in c.shardings.items()}
        marked, found = with_marks(program, marks), None
        with budget.step(doing, always=always), contextlib.suppress(GShardError):
            found = None if marked is None else price(marked)
        return found

    def is_over() -> bool:
        if budget.is_over and _MORE not in budget.left_out:
            budget.left_out.append(_MORE)
        return budget.is_over

    def is_near(found: PricedPlan) -> bool:
        return found.cost.seconds <= near and (found.cost.peak <= limit or goal.cost.peak > limit)

    without = tried([], "the program without further marks", always=True)
    assert without is not None
    now, saved = without, []
    while not is_near(now) and len(chosen) < most and not is_over():
        results = [
            (found, candidate)
            for candidate in _candidates(goal.plan, now.plan, chosen)
            if not is_over() and (found := tried([*chosen, candidate], f"{candidate.text} {candidate.at}")) is not None
        ]
        if not results:
            break
        after, candidate = min(results, key=lambda result: result[0].rank(limit))
        enough = [result for result in results if is_near(result[0])]
        if enough:
            after, candidate = min(enough, key=lambda result: len(result[1].shardings))
        elif not chosen:  # one is not enough: all arguments at once, and then the rest
            after, candidate = results[0]
        if after.rank(limit) >= now.rank(limit) and len(results) < 2:
            break
        chosen.append(candidate)
        saved.append(now.cost.seconds - after.cost.seconds)
        now = after
    for candidate in list(chosen):
        rest = [c for c in chosen if c is not candidate]
        found = tried(rest, f"without {candidate.text} {candidate.at}") if len(chosen) > 1 and not is_over() else None
        if found is not None and (is_near(found) or found.rank(limit) <= now.rank(limit)):
            del saved[chosen.index(candidate)]
            chosen, now = rest, found
    marks = [FoundMark(c.at, c.text, s, c.shardings) for c, s in zip(chosen, saved, strict=True)]
    return Marks(tuple(marks), now, without, goal, limit, budget.spent, tuple(budget.left_out))


def _candidates(plan: Plan, now: Plan, chosen: Sequence[_Candidate]) -> list[_Candidate]:
    """What is sharded otherwise than in the plan: all arguments; of values called alike the largest and the first."""
    done = {v for c in chosen for v in c.shardings}
    first = len(plan.program.captured)
    arguments: dict[Value, Sharding] = {}
    groups: dict[tuple[str, Sharding], dict[Value, Sharding]] = {}
    for v, name in _named(plan.program).items():
        target = Sharding(plan.shardings[v].dims)
        nameable = text_of_mark(target, plan.mesh) is not None
        if v not in done and nameable and v.shape and Sharding(now.shardings[v].dims) != target:
            groups.setdefault((name, target), {})[v] = target
            if v in plan.program.block.inputs[first:]:
                arguments[v] = target
    alike = [
        _Candidate(name, text_of_mark(target, plan.mesh) or "", values) for (name, target), values in groups.items()
    ]
    largest = sorted(alike, key=lambda c: -c.bytes)[:_LARGEST]
    together = [_Candidate("arguments", "in_shardings=found.in_shardings", arguments)]
    together = together if len(arguments) > 1 and not chosen else []
    return [*together, *dict.fromkeys([*largest, *alike[:_FIRST]])]


def _named(program: Program) -> Mapping[Value, str]:
    """What a user can mark, by what it is called: those of equal layers alike."""
    first = len(program.captured)
    arguments = ArrayNames(program).arguments
    names = {v: arguments[v].alike for v in program.block.inputs[first:]}
    for e in program.block.walk():
        if e.mark is None and e.line and not is_transposed(e.source_info):
            names.update({v: f"{e.name} at {e.line}" for v in e.outputs if not v.made})
    return {v: f"{v.dtype_name}[{','.join(map(str, v.shape))}] of {name}" for v, name in names.items()}
