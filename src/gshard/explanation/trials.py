"""Trials: plans the program again with one change of marks at a time, prices the result, and proposes the best."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import is_transposed
from gshard.core.mark import Mark, mark_of_cut, resolve
from gshard.core.number_text import format_seconds
from gshard.core.plan import Plan, Reason
from gshard.core.planning_tables import with_tables
from gshard.core.program import Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.core.spmd import Collective, SpmdProgram
from gshard.core.time_budget import TRIAL_SECONDS, tried
from gshard.device.cost import WORTH, Cost, cost
from gshard.explanation.advice import roots
from gshard.explanation.difference import change_text
from gshard.planning.added_marks import spec_of_cut, text_of_mark, with_marks
from gshard.planning.strategies import shardings
from gshard.rewrite.equation_graph import with_others

# Changes: finds marks to add, loosen or remove so that the devices may send less.


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A change of marks, and what it brings once it is tried."""

    mark: str  # the source text, ``gshard.shard(x, P('data', None))``
    at: str  # what to mark: an argument's name, or the line and operation that make the value
    instead: str  # the mark that is there now, if this one takes its place; ``mark`` is empty if it can just go
    row: int  # the number of the collectives that it is for
    stake: int  # bytes that each device sends in the collectives that it is about
    # the program with the change
    program: Callable[[], Program | None] = dataclasses.field(repr=False, compare=False)
    as_wanted: bool = False  # whether it marks a value as what reads it wants it. Planning could have chosen that.
    # what a call takes, as the program is and with the change; none before it is tried
    costs: tuple[Cost, ...] = dataclasses.field(default=(), repr=False, compare=False)
    before: int = 0  # before, after: bytes that each device sends in one call, as the program is and with the change
    after: int = 0

    @property
    def change(self) -> str:
        """What to do: ``gshard.replicate(x) on ...``, ``remove replicate(x) at ...``."""
        if not self.instead:
            return f"{self.mark} on {self.at}"
        if not self.mark:
            return f"remove {self.instead} at {self.at}"
        return f"{self.mark} instead of {self.instead} at {self.at}"

    @property
    def is_slower(self) -> bool:
        """Whether a call takes longer with the change."""
        return self.costs[1].seconds > self.costs[0].seconds

    def __str__(self) -> str:
        return f"{self.change} ({change_text(*self.costs)})"


def changes_of(rows: Sequence[Sequence[Collective]], plan: Plan) -> list[Proposal]:
    """The changes that are worth a try: marks that can go first, then looser marks, last what planning could choose.

    Of each kind those at which most bytes are at stake come first.
    """
    found = [*_loosened(rows, plan), *_added(rows, plan)]
    return sorted(found, key=lambda c: (not c.instead, bool(c.mark), c.as_wanted, -c.stake))


def _added(rows: Sequence[Sequence[Collective]], plan: Plan) -> Iterator[Proposal]:
    """Marks on the values that collectives move."""
    program = plan.program
    free, results = _unmarked(program), {v for v in program.block.outputs if isinstance(v, Value)}
    seen = set()
    for row, same in enumerate(rows):
        sent = sum(c.total_bytes for c in same)
        wanted: dict[Sharding, dict[Value, None]] = {}
        for c in same:
            if c.value in free and c.before is not None and c.after is not None:
                for sharding in _wanted(c.value, c.before, c.after, plan, c.value in results):
                    wanted.setdefault(sharding, {})[c.value] = None
        for sharding, values in wanted.items():
            text, key = text_of_mark(sharding, plan.mesh), (sharding, frozenset(values))
            if text is None or key in seen:
                continue
            seen.add(key)
            marks = dict.fromkeys(values, mark_of_cut(sharding.dims, plan.mesh))
            yield Proposal(
                text, _place(list(values), program), "", row, sent, functools.partial(with_marks, program, marks),
                as_wanted=same[0].after is not None and sharding.dims == same[0].after.dims,
            )  # fmt: skip


def _unmarked(program: Program) -> set[Value]:
    """The values that a mark can be put on."""
    first = len(program.captured)
    arguments = zip(program.block.inputs[first:], program.argument_marks, strict=True)
    found = {v for v, mark in arguments if mark is None and not v.made}
    return found | {v for e in program.block.walk() if e.mark is None for v in e.outputs if not v.made}


def _wanted(value: Value, before: Sharding, after: Sharding, plan: Plan, is_result: bool = False) -> list[Sharding]:
    """Shardings that the value might get: the wanted one; for a sum, split over the devices that add it up.

    A result may also keep its sharding: without a mark it leaves replicated, or with the sharding of an argument.
    """
    here, others = Sharding(plan.sharding(value).dims), [Sharding(after.dims)]
    summed = tuple(a for a, _ in before.unreduced if a not in others[0].atoms)
    for d, n in enumerate(value.shape if summed else ()):
        atoms = (*after.dims[d], *summed)
        if n % plan.mesh.count(atoms) == 0:
            others.append(Sharding((*after.dims[:d], atoms, *after.dims[d + 1 :])))
    kept = [here] * bool(is_result and plan.sharding(value).atoms)
    return kept + [sharding for sharding in dict.fromkeys(others) if sharding != here]


def _place(values: Sequence[Value], program: Program) -> str:
    """What to mark, as text: an argument, or the operation and the line, and how many there are."""
    value, others = values[0], len(values) - 1
    if value in program.block.inputs:
        name = program.names[program.block.inputs.index(value)]
        return f"the argument {name}" + (f" and {others} like it" if others else "")
    e = program.producers.get(value)
    if e is None:
        return ""
    made = f"the result of {e.name} {'in the gradient of' if is_transposed(e.source_info) else 'at'} {e.line}"
    return f"{made}, {len(values)} times" if others else made


def _loosened(rows: Sequence[Sequence[Collective]], plan: Plan) -> Iterator[Proposal]:
    """The marks that want a dimension replicated, without that: those of a line together, with their derivatives'."""
    marks: dict[Reason, list[Equation]] = {}
    for e in plan.program.block.walk():
        if e.mark is not None and e.line and not plan.sharding(e.outputs[0]).unreduced:
            marks.setdefault(Reason("mark", e.line, str(e.mark)), []).append(e)
    stake, largest = _at_stake(rows, plan)
    for root, same in marks.items():
        opened = {e: mark for e in same if (mark := _opened(e, plan)) is not None}
        if not opened:
            continue
        dims = plan.sharding(next(iter(opened)).outputs[0]).dims
        spec = spec_of_cut(Sharding(dims), plan.mesh)
        entries = ["P.UNCONSTRAINED" if entry is None else repr(entry) for entry in spec or ()]
        weaker = "" if spec is None or not any(dims) else f"gshard.shard(x, P({', '.join(entries)}))"
        yield Proposal(
            weaker, root.line, root.equation, largest.get(root, 0), stake[root],
            functools.partial(_with_opened, plan.program, opened),
        )  # fmt: skip


def _at_stake(
    rows: Sequence[Sequence[Collective]], plan: Plan
) -> tuple[collections.Counter[Reason], dict[Reason, int]]:
    """Bytes of all collectives that go back to each mark, and the largest row of them."""
    stake: collections.Counter[Reason] = collections.Counter()
    largest: dict[Reason, int] = {}
    for row, same in enumerate(rows):
        for root in roots(same[0], plan):
            stake[root] += sum(c.total_bytes for c in same)
            largest.setdefault(root, row)
    return stake, largest


def _opened(e: Equation, plan: Plan) -> Mark | None:
    """The mark of an equation, leaving open what it replicates; None if it replicates nothing."""
    assert e.mark is not None
    value = e.outputs[0]
    dims = plan.sharding(value).dims
    try:
        already = resolve(e.mark, plan.mesh, value.shape, e.line).open
    except GShardError:  # it is about the automatic axes of a shard_map only
        already = (False,) * len(dims)
    if all(is_open or atoms for is_open, atoms in zip(already, dims, strict=True)):
        return None
    kept = [None if is_open or not atoms else atoms for is_open, atoms in zip(already, dims, strict=True)]
    return mark_of_cut(kept, plan.mesh)


def _with_opened(program: Program, marks: Mapping[Equation, Mark]) -> Program:
    opened = {e: (dataclasses.replace(e, mark=mark, params={"mark": mark}),) for e, mark in marks.items()}
    return dataclasses.replace(program, block=with_others(program.block, opened.get))


# What if: plans the program again under other marks, and prices the result.

Planner = Callable[[Program], SpmdProgram]


@dataclasses.dataclass(frozen=True)
class Instead:
    """Another sharding, and what a call takes with it."""

    sharding: str  # as text
    mark: str  # as text
    cost: Cost  # of the program with that mark;
    now: Cost  # of the program without it

    @property
    def seconds(self) -> float:
        """How much longer a call takes with it."""
        return self.cost.seconds - self.now.seconds

    def __str__(self) -> str:
        return f"{self.sharding}: {change_text(self.now, self.cost)}   {self.mark}"


def replanned(planner: Planner, program: Program | None) -> SpmdProgram | None:
    """What a program with other marks becomes; None where there is none, or where its marks fit no plan."""
    try:
        return None if program is None else planner(program)
    except GShardError:
        return None


def instead(plan: Plan, value: Value, now: Cost, donated: Sequence[int], marked: Planner) -> tuple[Instead, ...]:
    """The other shardings of a value over whole axes, the fastest first; none for one that cannot be marked.

    Those over the fewest axes are tried first: of a large program not all are, in twice the time of trials.
    """
    axes = tuple(atoms for atoms in plan.mesh.atoms_of.values() if atoms)
    ways = shardings(value.shape, plan.mesh, axes, even=value in plan.program.block.inputs)
    others = [way for way in sorted(ways, key=lambda way: len(way.atoms)) if way.dims != plan.sharding(value).dims]
    texts = {way: text for way in others if (text := text_of_mark(way, plan.mesh)) is not None}

    def planned(way: Sharding) -> SpmdProgram | None:
        return replanned(marked, with_marks(plan.program, {value: mark_of_cut(way.dims, plan.mesh)}))

    found = [
        Instead(way.format(plan.mesh, value.shape, value.dtype_name), texts[way], cost(spmd, now.machine, donated), now)
        for way, spmd in tried(texts, planned, 2 * TRIAL_SECONDS)
        if spmd is not None
    ]
    return tuple(sorted(found, key=lambda row: (row.cost.seconds, row.cost.sent, row.sharding)))


@dataclasses.dataclass(frozen=True)
class Trials:
    """What changes of marks bring, as far as they were tried."""

    found: tuple[Proposal, ...]  # the changes that lower the bytes sent
    tried: int  # how many changes were tried;
    changes: int  # of how many
    seconds: float  # of processor time that this took
    one: float = 0.0  # seconds that one change takes, if none was tried because of them

    def best(self, row: int | None = None) -> Proposal | None:
        """The change that lowers the bytes sent most, of those with which a call takes no longer if any; of a row."""
        own = (p for p in self.found if row in (None, p.row))
        return min(own, key=lambda p: (p.is_slower, p.after), default=None)

    @property
    def is_complete(self) -> bool:
        """Whether all changes were tried."""
        return self.tried == self.changes

    def __str__(self) -> str:
        if not self.changes:
            return "No change of marks to try."
        if self.is_complete:
            return f"Tried all changes of marks that the collectives go back to: {self.changes}."
        if self.one:
            return f"Tried none of {self.changes} changes of marks: one takes about {format_seconds(self.one)}."
        took = f" in {format_seconds(self.seconds)}" if self.tried else ""
        return f"Tried {self.tried} of {self.changes} changes of marks{took}, those of the largest collectives first."


@with_tables
def trials(
    rows: Sequence[Sequence[Collective]],
    plan: Plan,
    marked: Planner,
    now: Cost,
    *,
    seconds: float = TRIAL_SECONDS,
    one: float = 0.0,
    clock: Callable[[], float] = time.thread_time,
) -> Trials:
    """Plans the program again with changes of marks, those at which most bytes are at stake first."""
    began = clock()
    sent = sum(c.total_bytes for same in rows for c in same)
    changes = changes_of(rows, plan) if sent else []
    one = one if changes and max(seconds, TRIAL_SECONDS) < one else 0.0
    made = list(tried(changes, lambda c: replanned(marked, c.program()), 0.0 if one else seconds, clock))
    donated, found = [i - len(plan.program.captured) for i in now.donated], []
    for change, spmd in made:
        after = sent if spmd is None else sum(c.total_bytes for c in spmd.collectives)
        if spmd is not None and after < WORTH * sent:
            costs = now, cost(spmd, now.machine, donated)
            found.append(dataclasses.replace(change, costs=costs, before=sent, after=after))
    return Trials(tuple(found), len(made), len(changes), clock() - began, one)
