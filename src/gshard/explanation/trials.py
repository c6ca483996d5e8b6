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
from gshard.core.program import Equation, Program, Value, format_bytes
from gshard.core.sharding import Sharding
from gshard.core.spmd import Collective, SpmdProgram
from gshard.core.time_budget import TRIAL_SECONDS
from gshard.device.cost import WORTH, Cost, cost
from gshard.explanation.advice import direct_roots, roots
from gshard.planning.added_marks import spec_of_cut, text_of_mark, with_marks
from gshard.planning.strategies import shardings
from gshard.rewrite.equation_graph import with_others
from gshard.solver.moves import tried

# Changes: finds marks to add, loosen or remove so that the devices may send less.


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A change of marks, and what it brings once it is tried."""

    mark: str  # the source text, ``gshard.shard(x, P('data', None))``
    at: str  # what to mark: an argument's name, or the line and operation that make the value
    instead: str  # the mark that is there now, if this one takes its place; ``mark`` is empty if it can just go
    row: int  # the number of the collectives that it is for
    direct: int  # bytes that each device sends in the collectives that it is about;
    indirect: int  # and in all that go back to the mark
    # the program with the change
    program: Callable[[], Program | None] = dataclasses.field(repr=False, compare=False)
    as_wanted: bool = False  # whether it marks a value as what reads it wants it. Planning could have chosen that.
    before: int = 0  # before, after: bytes that each device sends in one call, as the program is and with the change
    after: int = 0
    # the per-device program with the change
    spmd: SpmdProgram | None = dataclasses.field(default=None, repr=False, compare=False)
    # what a call takes on a machine, as the program is and with the change (``on``)
    costs: tuple[Cost, Cost] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def turn(self) -> int:
        """When it is tried: first marks that move an array themselves, last what planning could have chosen."""
        return 0 if self.instead and self.direct else 2 if self.as_wanted else 1

    @property
    def change(self) -> str:
        """What to do: ``gshard.replicate(x) on ...``, ``remove replicate(x) at ...``."""
        if not self.instead:
            return f"{self.mark} on {self.at}"
        return (
            f"{self.mark} instead of {self.instead} at {self.at}"
            if self.mark
            else f"remove {self.instead} at {self.at}"
        )

    def on(self, now: Cost) -> Proposal:
        """The same with what a call takes on a machine, by which those that send less but take longer can be told."""
        if self.spmd is None:
            return self
        captured = len(self.spmd.program.captured)
        return dataclasses.replace(self, costs=(now, cost(self.spmd, now.machine, [i - captured for i in now.donated])))

    @property
    def is_slower(self) -> bool:
        """Whether a call takes longer with the change, where that is known."""
        return self.costs is not None and self.costs[1].seconds > self.costs[0].seconds

    @property
    def result(self) -> str:
        """What was found: bytes, and where a machine is known time and memory too."""
        text = f"with this change, each device sends {format_bytes(self.after)} instead of {format_bytes(self.before)}"
        if self.costs is None:
            return f"{text}."
        now, then = self.costs
        times = f"a call takes {format_seconds(then.seconds)} instead of {format_seconds(now.seconds)}"
        held = f"the memory peak is {format_bytes(then.peak)} instead of {format_bytes(now.peak)}"
        same = format_bytes(then.peak) == format_bytes(now.peak)
        return f"{text}, and {times}." if same else f"{text}, {times}, and {held}."

    def __str__(self) -> str:
        return f"This change removes or reduces it: {self.change}: {self.result}"


def changes_of(rows: Sequence[Sequence[Collective]], plan: Plan) -> list[Proposal]:
    """The changes that are worth a try, those at which most bytes are at stake first."""
    found = [*_loosened(rows, plan), *_added(rows, plan)]
    return sorted(found, key=lambda c: (c.turn, -max(c.direct, c.indirect), not c.instead))


def _added(rows: Sequence[Sequence[Collective]], plan: Plan) -> Iterator[Proposal]:
    """Marks on the values that collectives move."""
    program = plan.program
    producers = {v: e for e in program.block.walk() for v in e.outputs}
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
                text,
                _place(list(values), program, producers),
                "",
                row,
                sent,
                sent,
                functools.partial(with_marks, program, marks),
                same[0].after is not None and sharding.dims == same[0].after.dims,
            )


def _unmarked(program: Program) -> set[Value]:
    """The values that a mark can be put on."""
    first = len(program.captured)
    arguments = zip(program.block.inputs[first:], program.argument_marks, strict=True)
    found = {v for v, mark in arguments if mark is None and not v.made}
    return found | {v for e in program.block.walk() if e.mark is None for v in e.outputs if not v.made}


def _wanted(value: Value, before: Sharding, after: Sharding, plan: Plan, is_result: bool = False) -> Iterator[Sharding]:
    """Shardings that the value might get: the wanted one; for a sum, split over the devices that add it up.

    A result may also keep its sharding: without a mark it leaves replicated, or with the sharding of an argument.
    """
    here = plan.sharding(value)
    seen = {here.dims}
    if is_result and here.atoms:
        yield Sharding(here.dims)
    whole = Sharding(after.dims)
    if whole.dims not in seen:
        seen.add(whole.dims)
        yield whole
    summed = tuple(a for a, _ in before.unreduced if a not in whole.atoms)
    for d, n in enumerate(value.shape if summed else ()):
        dims = tuple((*atoms, *summed) if i == d else atoms for i, atoms in enumerate(whole.dims))
        if dims not in seen and n % plan.mesh.count(dims[d]) == 0:
            seen.add(dims)
            yield Sharding(dims)


def _place(values: Sequence[Value], program: Program, producers: Mapping[Value, Equation]) -> str:
    """What to mark, as text: an argument, or the operation and the line, and how many there are."""
    value, others = values[0], len(values) - 1
    if value in program.block.inputs:
        name = program.names[program.block.inputs.index(value)]
        return f"the argument {name}" + (f" and {others} like it" if others else "")
    e = producers.get(value)
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
    direct, indirect, largest = _at_stake(rows, plan)
    for root, same in marks.items():
        opened = {e: mark for e in same if (mark := _opened(e, plan)) is not None}
        if not opened:
            continue
        dims = plan.sharding(next(iter(opened)).outputs[0]).dims
        spec = spec_of_cut(Sharding(dims), plan.mesh)
        entries = ["P.UNCONSTRAINED" if entry is None else repr(entry) for entry in spec or ()]
        weaker = "" if spec is None or not any(dims) else f"gshard.shard(x, P({', '.join(entries)}))"
        yield Proposal(
            weaker, root.line, root.equation, largest.get(root, 0), direct[root], indirect[root],
            functools.partial(_with_opened, plan.program, opened),
        )  # fmt: skip


def _at_stake(
    rows: Sequence[Sequence[Collective]], plan: Plan
) -> tuple[collections.Counter[Reason], collections.Counter[Reason], dict[Reason, int]]:
    """Bytes of the collectives that each mark causes itself, of all that go back to it, and the largest row of them."""
    producers = {v: e for e in plan.program.block.walk() for v in e.outputs}
    direct: collections.Counter[Reason] = collections.Counter()
    indirect: collections.Counter[Reason] = collections.Counter()
    largest: dict[Reason, int] = {}
    for row, same in enumerate(rows):
        for c in same:
            for root in {*direct_roots(c)}:
                direct[root] += c.total_bytes
        sent = sum(c.total_bytes for c in same)
        for root in roots(same[0], plan, producers):
            indirect[root] += sent
            largest.setdefault(root, row)
    return direct, indirect, largest


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
    def opened(e: Equation) -> tuple[Equation] | None:
        return (dataclasses.replace(e, mark=marks[e], params={"mark": marks[e]}),) if e in marks else None

    return dataclasses.replace(program, block=with_others(program.block, opened))


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
        sent, held = self.cost.sent - self.now.sent, self.cost.peak - self.now.peak
        lines: collections.Counter[str] = collections.Counter()
        for k, sign in (*((k, 1) for k in self.cost.kernels), *((k, -1) for k in self.now.kernels)):
            lines[k.line] += sign * k.sent * k.times
        line = max(lines, key=lambda at: abs(lines[at]), default="")
        most = f" ({_signed(lines[line])} at {line})" if line and lines[line] else ""
        amounts = (f"{_signed(sent)} sent by each device{most}", f"{_signed(held)} at the peak")
        return f"{self.sharding}: {format_seconds(self.seconds, '+')} a call, {', '.join(amounts)}   {self.mark}"


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


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"


@dataclasses.dataclass(frozen=True)
class Trials:
    """What changes of marks bring, as far as they were tried."""

    found: tuple[Proposal, ...]  # the changes that lower the bytes sent
    tried: int  # how many changes were tried;
    changes: int  # of how many
    seconds: float  # of processor time that this took
    one: float = 0.0  # seconds that one change takes, if none was tried because of them

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
    again = [
        dataclasses.replace(change, before=sent, after=sum(c.total_bytes for c in spmd.collectives), spmd=spmd)
        for change, spmd in made
        if spmd is not None
    ]
    found = tuple(change for change in again if change.after < WORTH * sent)
    return Trials(found, len(made), len(changes), clock() - began, one)
