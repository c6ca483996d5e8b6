"""Tried changes: compiles a program with changes, all together and fewer and fewer, and advises a handful that help.

A change is a sharding constraint on a value inside, or another sharding of arguments, equal layers together
(``sharding_changes``). All figures are those of programs that were compiled with the changes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gshard.core.errors import LISTED, counted
from gshard.core.jax_adapter import Expression
from gshard.core.mark import axes_of_entry, spec_of_axes, text_of_spec
from gshard.core.program import format_bytes
from gshard.device.cost import WORTH
from gshard.explanation.compiled_program import CompiledProgram
from gshard.explanation.difference import Figures, change_text
from gshard.explanation.rows import Moved
from gshard.explanation.traced_expressions import Constraint, TracedExpression, TracedProgram

SECONDS = 30.0  # how long to try, if nothing else is asked for
MORE_PEAK = 1.05  # of the peak: what a constraint may take for less time or fewer bytes
_MORE_FLOPS = 1.02  # of the operations, without a machine: a constraint may move some elementwise work
NEARLY = 0.95  # of the bytes that all constraints save: what the few that are proposed save
_ONE = 0.6  # of what all constraints save: then the search begins with one
# Parts of the time: when changes are no more tried alone, left out, and added.
_ALONE, _FEWER, _MORE = 0.5, 0.65, 0.9
_SAME = 1.001  # of bytes, memory or seconds: no more is no more
SPECS = 12  # shardings of one array that are tried

Specs = Mapping[int, PartitionSpec]  # by the number of the argument


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A change of a program."""

    text: str  # what to write, and where
    spec: PartitionSpec | None  # the other sharding; None removes a constraint
    arguments: tuple[int, ...] = ()  # the numbers of the arguments that have it
    constraint: Constraint | None = None  # None for arguments
    # what the program takes with it alone; None if it is not compiled
    figures: Figures | None = None

    def helps(self, now: Figures, then: Figures, peak: int) -> bool:
        """Whether a program that takes ``now`` is better than one that takes ``then``; ``peak`` is without changes."""
        return sharding_helps(now, then) if self.constraint is None else constraint_helps(now, then, peak)

    @property
    def about(self) -> frozenset[Hashable]:
        """The arguments, or the expression: of each, one change can be made."""
        return frozenset(self.arguments) if self.constraint is None else frozenset([self.constraint.expression])


@dataclasses.dataclass(frozen=True)
class Advice:
    """A handful of changes of a program that help together; print it."""

    before: Figures  # what the unchanged program takes
    planned: int | None  # bytes that each device sends if gshard partitions it; None if it could not plan it in time
    changes: tuple[Change, ...]  # the changes, each with what the program takes with it alone
    after: Figures  # what the program takes with all of them
    compiled: int  # how many programs were compiled
    refused: int  # at how many of these JAX or XLA failed, or ``jax.jit``, which may have been given ``in_shardings``
    seconds: float  # that this took
    is_cut: bool  # whether more would be tried in more time

    @property
    def lines(self) -> tuple[str, list[str]]:
        """The result as a title and lines below it."""
        how = f"{counted(self.compiled, 'program')} compiled in {self.seconds:.0f} s"
        title = f"Changes that help, of {how}" if self.changes else f"No change helps, of {how}"
        rows: list[str] = []
        for change in self.changes:
            rows += [change.text, *([f"  {change_text(self.before, change.figures)}"] if change.figures else [])]
        if len(self.changes) > 1:
            rows += ["together", f"  {change_text(self.before, self.after)}"]
        if self.planned is None:
            rows.append("gshard could not plan this function in the time, so that no constraints were tried")
        else:
            ratio = self.planned / self.before.sent if self.before.sent else 1.0
            of = f"{format_bytes(self.planned)}, {ratio:.2f} of this program's {format_bytes(self.before.sent)}"
            rows.append(f"gshard's partitioner would send {of}")
        rows += [f"JAX or XLA refused {self.refused} of the programs"] * bool(self.refused)
        return title, [*rows, *["with more seconds, more are tried"] * self.is_cut]

    def __str__(self) -> str:
        title, rows = self.lines
        return "\n".join([f"{title}{':' if rows else '.'}", *(f"  {row}" for row in rows)])


class Trials:
    """Compiles a program with changes, each set of them once, until the time is over.

    Args:
        before: what the unchanged program takes.
        compiled: compiles the program with changes, and tells what it takes; None if JAX or XLA refuses it.
        seconds: how long to go on, about. With any time at all one program is compiled.
    """

    def __init__(self, before: Figures, compiled: Callable[[Sequence[Change]], Figures | None], seconds: float):
        self.before, self.seconds, self.is_cut = before, seconds, False
        self.made: dict[frozenset[Change], Figures | None] = {}
        self._compiled, self.began, self._longest = compiled, time.monotonic(), 0.0

    def figures(self, some: Sequence[Change], share: float = 1.0) -> Figures | None:
        """What the program takes with changes; None if it is refused, or if a share of the time is over."""
        if (key := frozenset(some)) not in self.made:
            began = time.monotonic()
            if self.seconds <= 0 or (self.made and began - self.began + self._longest > share * self.seconds):
                self.is_cut = True
                return None
            self.made[key] = self._compiled(some)
            self._longest = max(self._longest, time.monotonic() - began)
        return self.made[key]

    def helping(self, some: Sequence[Change], share: float, best: Figures | None = None) -> Figures | None:
        """What the program takes with changes, if the last of them helps against the best program so far."""
        found = self.figures(some, share) if some else None
        then = self.before if best is None else best
        return found if found is not None and some[-1].helps(found, then, self.before.peak) else None

    def fewest(self, some: Sequence[Change], share: float) -> Sequence[Change]:
        """The first half of changes, and half of these, while nearly as much is saved; none if many are needed."""
        then = self.figures(some)
        while then is not None and (now := self.helping(some[: len(some) // 2], share)) is not None:
            if self.before.sent - now.sent < NEARLY * (self.before.sent - then.sent):
                break
            some = some[: len(some) // 2]
        return some if len(some) <= LISTED else ()


def advised(trials: Trials, constraints: Sequence[Change], others: Sequence[Change], planned: int | None) -> Advice:
    """A few constraints that help together, and then other changes that help besides.

    Changes are tried alone, and all added constraints together. To the one that helps most, or to a few if these save
    much more, others are added one by one, those first that help most alone.
    """
    before = trials.before
    enough = before.sent - NEARLY * (before.sent - (planned or 0))
    added = {change.about: change for change in reversed(constraints) if change.spec is not None}
    helping: list[tuple[int, Sequence[Change]]] = []
    for some in (constraints[:1], [*added.values()][::-1], *([change] for change in (*constraints[1:], *others))):
        if not any(sent <= enough for sent, _ in helping) and (now := trials.helping(some, _ALONE)) is not None:
            helping.append((now.sent, some))
    helping.sort(key=lambda pair: pair[0])
    single = [(sent, some[0]) for sent, some in helping if len(some) == 1]
    kept: list[Change] = []
    if single and before.sent - single[0][0] >= _ONE * (before.sent - helping[0][0]):
        kept = [single[0][1]]
    elif helping:
        kept = [*trials.fewest(helping[0][1], _FEWER)]
    best = (kept and trials.figures(kept)) or before
    for change in (*(change for _, change in single), *constraints, *others):
        rest = [one for one in kept if not change.about & one.about]
        if len(rest) == LISTED or change in kept or (best.sent <= enough and change.constraint is not None):
            continue
        if (now := trials.helping([*rest, change], _MORE, best)) is not None:
            kept, best = [*rest, change], now
            for one in rest:  # without which the program may take no more
                others_of = [other for other in kept if other is not one]
                if (now := trials.figures(others_of)) is not None and _is_no_more(now, best):
                    kept, best = others_of, now
    alone = tuple(dataclasses.replace(change, figures=trials.figures([change])) for change in kept)
    took, refused = time.monotonic() - trials.began, sum(made is None for made in trials.made.values())
    return Advice(before, planned, alone, best, len(trials.made), refused, took, trials.is_cut)


def constraint_helps(now: Figures, then: Figures, peak: int) -> bool:
    """Whether a constraint lowers the time, or the bytes at no more time, and raises the peak by 5 % at most."""
    if now.peak > MORE_PEAK * peak:
        return False
    sends_less = now.sent < WORTH * then.sent
    if not then.seconds:
        return sends_less and now.flops <= _MORE_FLOPS * then.flops
    return now.seconds < WORTH * then.seconds or (sends_less and now.seconds <= _SAME * then.seconds)


def sharding_helps(now: Figures, then: Figures) -> bool:
    """Whether something is lower than before, and nothing higher."""
    is_less = now.sent < WORTH * then.sent or now.peak < WORTH * then.peak or now.seconds < WORTH * then.seconds
    return is_less and _is_no_more(now, then)


def _is_no_more(now: Figures, then: Figures) -> bool:
    pairs = (now.sent, then.sent), (now.peak, then.peak), (now.seconds, then.seconds)
    return all(after <= _SAME * before for after, before in pairs)


def sharding_changes(program: CompiledProgram, moved: Sequence[Moved], leaves: Sequence[Any]) -> Iterator[Change]:
    """Other shardings: of the arguments at which most bytes are at stake first, and of those that are held whole."""
    stake: dict[str, int] = {}
    for part in moved:
        name = part.array.alike.rpartition(" of ")[2]
        stake[name] = stake.get(name, 0) + part.bytes
    groups: dict[tuple[str, str], list[int]] = {}
    for i, argument in enumerate(program.arguments):
        groups.setdefault((argument.short.alike, "" if argument.cut is None else argument.cut.text), []).append(i)

    def weight(group: tuple[tuple[str, str], list[int]]) -> int:
        (name, _), members = group
        held = sum(program.arguments[i].local_bytes for i in members if program.arguments[i].is_whole)
        return stake.get(name, 0) + held

    for (name, sharding), members in sorted(groups.items(), key=lambda group: -weight(group)):
        if weight(((name, sharding), members)):
            own = program.arguments[members[0]].short.text if len(members) == 1 else name
            leaf = leaves[members[0]]
            now = getattr(leaf, "sharding", None)
            if not isinstance(now, NamedSharding):  # its own is not known
                continue
            sizes = {str(axis): size for axis, size in now.mesh.shape.items() if size > 1}
            for spec in itertools.islice(specs_to_try(leaf.shape, sizes, now.spec), SPECS):
                text = f"{own}: {text_of_spec(spec)} instead of {sharding or 'its sharding'}"
                yield Change(text, spec, tuple(members))


def specs_to_try(shape: Sequence[int], sizes: Mapping[str, int], now: PartitionSpec) -> Iterator[PartitionSpec]:
    """Other shardings of an array over axes of these sizes: one axis on one dimension, none, and then more axes."""
    own = [axes_of_entry(entry) for entry in (*now, *[None] * (len(shape) - len(now)))]
    every = itertools.product([*range(len(shape)), None], repeat=len(sizes))
    by_count = sorted(every, key=lambda places: abs(len(sizes) - places.count(None) - 1))
    others = (
        [tuple(axis for axis, place in zip(sizes, places, strict=True) if place == d) for d in range(len(shape))]
        for places in by_count
    )
    for dims in others:
        even = (n % math.prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, dims, strict=True))
        if dims != own and all(even):
            yield spec_of_axes(dims)


Line = tuple[str, int]  # a line of a file


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """What gshard plans for a function."""

    sent: int  # bytes that each device sends in one call
    lines: Mapping[Line, int]  # those of each line, and of what it calls
    # the sharding of the value of an expression, by its shape too
    specs: Mapping[tuple[Expression, tuple[int, ...]], PartitionSpec | None]


def constraints_to_try(
    moved: Sequence[Moved], program: TracedProgram, mesh: Mesh, planned: Planned
) -> list[Constraint]:
    """The constraints to try on the values that lines make or read at which XLA sends more than the plan."""
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    sizes = {str(name): size for name, size, kind in axes if kind == AxisType.Auto}
    at = collections.defaultdict[Any, list[TracedExpression]](list)
    for v, expression in ((v, e) for e in program.expressions if e.spec is None for v in e.values):
        at[v].append(expression)
    sent = collections.Counter[Line]()
    for one, cause in ((one, one.cause) for one in moved if one.cause is not None):
        sent[cause.path, cause.line] += one.bytes
    stakes = collections.Counter[TracedExpression]()
    for line, size in sent.items():
        if (more := size - planned.lines.get(line, 0)) > 0:
            # Large ones matter more.
            roots = {e: math.sqrt(math.prod(e.shape or ())) for v in program.values_at(*line) for e in at[v]}
            stakes.update({e: round(more * root) for e, root in roots.items()})
    found = [Constraint(e, spec) for e, _ in stakes.most_common() if (spec := _spec(e, sizes, planned))]
    wider = [(c.expression.values, c.spec) for c in found]
    found = [c for c in found if not any(c.spec == spec and c.expression.values < values for values, spec in wider)]
    # Values of one type with one sharding mostly bring the same: of each of these the first one is tried first.
    order = {e: i for i, e in enumerate(program.expressions)}
    firsts = {(c.expression.type, c.spec): c for c in sorted(found, key=lambda c: -order[c.expression])}
    ranked = [c for c in found if firsts[c.expression.type, c.spec] is c]
    return [each for c in ranked for each in (c, *_coarser(c))] + [c for c in found if c not in ranked]


def _coarser(c: Constraint) -> list[Constraint]:
    """The same with one axis for each dimension: XLA may not bring other values to a split over several."""
    assert c.spec is not None, "it is planned"
    spec = PartitionSpec(*((axes_of_entry(entry) or (None,))[0] for entry in c.spec))
    return [] if spec == c.spec else [Constraint(c.expression, spec)]


def _spec(expression: TracedExpression, sizes: Mapping[str, int], planned: Planned) -> PartitionSpec | None:
    """The planned sharding of a value, if a constraint can say it."""
    shape = expression.shape or ()
    if (spec := planned.specs.get((expression.place, shape))) is None:
        return None
    axes = [axes_of_entry(entry) for entry in spec]
    is_said = all(a in sizes for names in axes for a in names)
    is_even = all(n % math.prod(sizes.get(a, 1) for a in names) == 0 for n, names in zip(shape, axes, strict=False))
    return spec if is_said and is_even else None
