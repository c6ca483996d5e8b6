"""Marks: a plan said in few marks, each of which was tried: with it the program was planned and priced again.

A plan has a sharding for every value; of most of them propagation says the same once a few are marked. Which few, a
greedy choice finds: of the values that are sharded otherwise than in the plan, those of the same name in equal layers
taken together, the largest are tried, and what lowers the price most is kept. Then those that are not needed any more
are left out. Where marks do not reach the price of the plan, the plan itself does (``gshard.jit(plan=...)``).
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gshard.analysis.proposal import text_of_mark, with_mark
from gshard.core.errors import GShardError
from gshard.core.jax_adapter import is_transposed
from gshard.core.mark import mark_of_cut
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Program, Value
from gshard.core.sharding import Sharding
from gshard.passes.propagate import propagate

_TRIED = 6  # candidates of each round


@dataclasses.dataclass(frozen=True)
class FoundMark:
    """One mark, perhaps on several values of the same name in equal layers.

    Attributes:
        at: an argument, or the operation and line that make the value.
        text: as it is written, ``gshard.shard(x, P(None, 'model'))``.
        saved: seconds of a call that it saves, after those before it.
        values: how many values it is about.
    """

    at: str
    text: str
    saved: float
    values: int

    def __str__(self) -> str:
        times = f" ({self.values} values)" if self.values > 1 else ""
        return f"{self.text:<44} {self.at}{times}: {-self.saved * 1e3:+.3g} ms"


@dataclasses.dataclass(frozen=True)
class Marks:
    """Marks that make a program nearly as fast as a plan.

    Attributes:
        marks: in the order in which they were found.
        seconds: of a call, with all of them.
        without: with none of them.
        goal: of the plan.
    """

    marks: tuple[FoundMark, ...]
    seconds: float
    without: float
    goal: float

    def __str__(self) -> str:
        over = 100 * (self.seconds / self.goal - 1)
        near = "as the plan" if abs(over) < 0.05 else f"{abs(over):.2g} % {'above' if over > 0 else 'below'} the plan"
        rows = [f"  {i}  {mark}" for i, mark in enumerate(self.marks, 1)]
        end = f"{self.seconds * 1e3:.4g} ms with them, {near} ({self.goal * 1e3:.4g} ms)"
        return "\n".join([f"{self.without * 1e3:.4g} ms without further marks", *rows, end])


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """Values that are to be marked together, and the sharding that the plan gives them."""

    at: str
    values: tuple[Value, ...]
    sharding: Sharding
    text: str

    @property
    def bytes(self) -> int:
        return sum(v.bytes for v in self.values)

    def marked(self, program: Program, mesh: Mesh) -> Program | None:
        mark = mark_of_cut(self.sharding.dims, mesh)
        for v in self.values:
            changed = with_mark(program, v, mark)
            if changed is None:
                return None
            program = changed
        return program


def marks_of(
    plan: Plan,
    goal: float,
    price: Callable[[Plan], float],
    *,
    tolerance: float = 0.01,
    most: int = 12,
    budget_seconds: float = 60.0,
) -> Marks:
    """Says a plan in marks.

    Args:
        plan: the plan; its program has the marks that the user wrote.
        goal: seconds that it takes.
        price: tells the seconds of another plan of the program.
        tolerance: how far above the goal is near enough.
        most: how many marks at most.
        budget_seconds: when to stop looking for more.
    """
    program, mesh = plan.program, plan.mesh
    end = time.monotonic() + budget_seconds
    chosen: list[_Candidate] = []

    def tried(candidates: Sequence[_Candidate]) -> tuple[Plan, float] | None:
        marked: Program | None = program
        for candidate in candidates:
            marked = None if marked is None else candidate.marked(marked, mesh)
        if marked is None:
            return None
        try:
            made = propagate(marked, mesh)
            return made, price(made)
        except GShardError:
            return None

    here = tried([])
    assert here is not None
    now, seconds = here
    without, saved = seconds, []
    while seconds > goal * (1 + tolerance) and len(chosen) < most and time.monotonic() < end:
        results = [
            (found[1], candidate, found[0])
            for candidate in _candidates(plan, now, chosen)
            if time.monotonic() < end and (found := tried([*chosen, candidate])) is not None
        ]
        if not results:
            break
        after, candidate, planned = min(results, key=lambda result: result[0])
        if after > seconds * 0.9999 and len(results) < 2:
            break
        chosen.append(candidate)
        saved.append(seconds - after)
        now, seconds = planned, after
    for candidate in list(chosen):
        rest = [c for c in chosen if c is not candidate]
        found = tried(rest) if len(chosen) > 1 and time.monotonic() < end else None
        if found is not None and found[1] <= max(seconds, goal * (1 + tolerance)):
            del saved[chosen.index(candidate)]
            chosen, seconds = rest, found[1]
    marks = [FoundMark(c.at, c.text, s, len(c.values)) for c, s in zip(chosen, saved, strict=True)]
    return Marks(tuple(marks), seconds, without, goal)


def _candidates(plan: Plan, now: Plan, chosen: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """What is sharded otherwise than in the plan: the largest, and the first."""
    done = {v for c in chosen for v in c.values}
    groups: dict[tuple[str, Sharding], list[Value]] = {}
    for v, name in _named(plan.program).items():
        target = Sharding(plan.shardings[v].dims)
        if v not in done and v.shape and Sharding(now.shardings[v].dims) != target:
            groups.setdefault((name, target), []).append(v)
    found = [
        _Candidate(name, tuple(values), sharding, text)
        for (name, sharding), values in groups.items()
        if (text := text_of_mark(sharding, plan.mesh)) is not None
    ]
    largest = sorted(found, key=lambda c: -c.bytes)[: _TRIED - 2]
    return iter(dict.fromkeys([*largest, *found[:2]]))


def _named(program: Program) -> Mapping[Value, str]:
    """What a user can mark, by what it is called: those of equal layers alike."""
    first = len(program.captured)
    arguments = zip(program.block.inputs[first:], program.names[first:], strict=True)
    names = {v: without_numbers(name) for v, name in arguments}
    for e in program.block.walk():
        if e.mark is None and e.line and not is_transposed(e.source_info):
            names.update({v: f"{e.name} at {e.line}" for v in e.outputs})
    return {v: f"{v.dtype_name}[{','.join(map(str, v.shape))}] of {name}" for v, name in names.items()}


def without_numbers(name: str) -> str:
    """``params['layers'][3]['w']`` as ``params['layers'][*]['w']``: those of equal layers are called alike."""
    return re.sub(r"\[\d+\]", "[*]", name)
