"""Tried changes: compiles a program with changes, one by one, and puts those together that help, the best first.

A change is another sharding of arguments, equal layers together (``sharding_changes``), or a sharding constraint on a
value inside. The figures of all together are those of one program that was compiled with them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import LISTED, listed
from gshard.core.mark import axes_of_entry, spec_of_axes, text_of_spec
from gshard.device.cost import WORTH
from gshard.explanation.compiled_program import CompiledProgram
from gshard.explanation.difference import Figures, change_text
from gshard.explanation.rows import Moved
from gshard.explanation.traced_expressions import Constraint
from gshard.solver.moves import improve, tried

SECONDS = 30.0  # how long to try, if nothing else is asked for
MORE_PEAK = 1.05  # of the peak: what a constraint may take for less time or fewer bytes
_MORE_FLOPS = 1.02  # of the operations, without a machine: a constraint may move some elementwise work
_SAME = 1.001  # of bytes, memory or seconds: no more is no more
SPECS = 12  # shardings of one array that are tried

Specs = Mapping[int, PartitionSpec]  # by the number of the argument


def _rank(figures: Figures) -> tuple[float, int, int]:
    """Orders figures, the better first: by time, where it is known, then by bytes and memory."""
    return figures.seconds, figures.sent, figures.peak


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A change of a program."""

    text: str  # what to write, and where
    spec: PartitionSpec | None  # the other sharding; None removes a constraint
    arguments: tuple[int, ...] = ()  # the numbers of the arguments that have it
    constraint: Constraint | None = None  # None for arguments
    # what the program takes with it; None before it is compiled, and if JAX or XLA refuses it
    figures: Figures | None = None

    @property
    def about(self) -> frozenset[Hashable]:
        """The arguments, or the expression: of each, one change can be made."""
        return frozenset(self.arguments) if self.constraint is None else frozenset([self.constraint.expression])


@dataclasses.dataclass(frozen=True)
class Tried:
    """What became of changes; print it."""

    before: Figures  # what the unchanged program takes
    what: str  # what the changes are, as text
    helping: tuple[Change, ...]  # the changes that help by themselves, of each value the best one, the best first
    together: tuple[tuple[Change, ...], Figures]  # those of them that help together, and what the program then takes
    tried: int  # tried, changes: how many changes were compiled, of how many
    changes: int
    refused: int  # at how many of these JAX or XLA failed, or ``jax.jit``, which may have been given ``in_shardings``
    seconds: float  # that this took
    notes: tuple[str, ...] = ()  # further lines

    @property
    def lines(self) -> tuple[str, list[str]]:
        """The result as a title and lines below it."""
        of = f"{self.tried} of {self.changes}" if self.tried < self.changes else f"all {self.changes}"
        how = f"ompiled with {of} in {self.seconds:.0f} s"
        if self.helping:
            title = f"{self.what[0].upper()}{self.what[1:]} that help, c{how}"
        else:
            title = f"C{how}, {self.what}: none helps" if self.changes else f"No {self.what} to try"
        rows: list[str] = []
        for change in self.helping[:LISTED]:
            assert change.figures is not None, "it helps"
            rows += [change.text, f"  {change_text(self.before, change.figures)}"]
        rows += listed([change.text for change in self.helping])[LISTED:]
        kept, after = self.together
        if len(kept) > 1:
            numbers = " ".join(f"({self.helping.index(change) + 1})" for change in kept)
            rows += [f"together {numbers}", f"  {change_text(self.before, after)}"]
        rows += [f"JAX or XLA refused {self.refused} of them"] * bool(self.refused)
        return title, [*rows, *self.notes, *["with more seconds, more are tried"] * (self.tried < self.changes)]

    def __str__(self) -> str:
        title, rows = self.lines
        return "\n".join([f"{title}{':' if rows else '.'}", *(f"  {row}" for row in rows)])


def try_changes(
    before: Figures,
    what: str,
    changes: Sequence[Change],
    compiled: Callable[[Sequence[Change]], Figures | None],
    helps: Callable[[Figures, Figures], bool],
    seconds: float,
    notes: Sequence[str] = (),
) -> Tried:
    """Compiles a program with changes."""
    began = time.monotonic()
    # Many changes may be about one value: then there is time to put the best of each together.
    alone = list(tried(changes, lambda change: compiled([change]), seconds / (1 + any(c.constraint for c in changes))))
    best: dict[Hashable, Change] = {}
    helping = [(change, made) for change, made in alone if made is not None and helps(made, before)]
    for change, made in sorted(helping, key=lambda pair: _rank(pair[1])):
        key = change.about if change.constraint else change
        best.setdefault(key, dataclasses.replace(change, figures=made))

    def together(some: Sequence[Change]) -> Figures | None:
        *earlier, last = some
        if not earlier:
            return last.figures
        is_over = time.monotonic() - began > seconds
        return None if is_over or any(last.about & other.about for other in earlier) else compiled(some)

    ranked = iter(best.values())
    kept = improve(before, lambda _: ranked, together, helps)
    return Tried(
        before, what, tuple(best.values()), (tuple(c for c, _ in kept), kept[-1][1] if kept else before), len(alone),
        len(changes), sum(made is None for _, made in alone), time.monotonic() - began, tuple(notes),
    )  # fmt: skip


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
    pairs = [(now.sent, then.sent), (now.peak, then.peak), (now.seconds, then.seconds)]
    return all(after <= _SAME * before for after, before in pairs) and any(a < WORTH * b for a, b in pairs)


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


def specs_to_try(
    shape: Sequence[int], sizes: Mapping[str, int], now: PartitionSpec | None, first: PartitionSpec | None = None
) -> Iterator[PartitionSpec]:
    """Other shardings of an array over axes of these sizes, each once.

    After the first one those with one axis on one dimension, then none, and those with more axes.
    """
    seen = [] if now is None else [_dims(now, len(shape))]
    every = itertools.product([*range(len(shape)), None], repeat=len(sizes))
    by_count = sorted(every, key=lambda places: abs(len(sizes) - places.count(None) - 1))
    others = (
        [tuple(axis for axis, place in zip(sizes, places, strict=True) if place == d) for d in range(len(shape))]
        for places in by_count
    )
    for dims in (*([] if first is None else [_dims(first, len(shape))]), *others):
        if dims in seen or not all(axis in sizes for axes in dims for axis in axes):
            continue
        seen.append(dims)
        if all(n % math.prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, dims, strict=True)):
            yield spec_of_axes(dims)


def _dims(spec: PartitionSpec, rank: int) -> list[tuple[str, ...]]:
    return [axes_of_entry(entry) for entry in (*spec, *[None] * (rank - len(spec)))]
