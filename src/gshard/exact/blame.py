"""Where two programs part: the first values of a sharded program that the plain program does not contain.

The elements of arguments are random, so an element of 62 random bits (two draws) identifies a number. A value of the
sharded program is *explained* if the plain program contains each of its elements. Parts of sums are not; they are
explained once they are added. What a wrong result contains and nothing explains was computed wrongly.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gshard.core import jax_adapter
from gshard.exact.interpreter import Axes, Unequal
from gshard.exact.numbers import Field, P, Residues, Value, inverse
from gshard.exact.operations import Complex

_SUMS = frozenset("psum psum2 psum_invariant reduce_scatter".split())
# What places elements by the position of a device, or moves them between devices.
_MOVES = frozenset(
    """dynamic_slice dynamic_update_slice ppermute all_gather all_gather_invariant all_to_all ragged_all_to_all gather
    pbroadcast reduce_scatter scatter scatter-add slice concatenate pad""".split()
)


_KEEPS = _MOVES | frozenset("reshape transpose squeeze expand_dims broadcast_in_dim rev convert_element_type".split())


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """What is known of a value of the sharded program."""

    partial: frozenset[str] = frozenset()  # the axes over which its parts must still be added
    origin: Any = None  # the equation that made parts of a sum
    departures: tuple[Departure, ...] = ()  # the equations whose wrong results it contains, in order
    moves: tuple[Any, ...] = ()  # equations that moved its elements, the last one last


@dataclasses.dataclass(frozen=True, eq=False)
class Departure:
    """An equation whose operands are explained, or parts of sums, and whose result is neither."""

    number: int  # in the order of the program
    eqn: Any
    axes: Axes
    value: Residues
    operands: tuple[State, ...]


@dataclasses.dataclass(frozen=True)
class Blame:
    """The likely cause of a difference."""

    line: str  # the user's line; empty if unknown
    cause: str  # what is likely, as text


def numbers_of(x: Any, draws: int) -> np.ndarray:
    """A number for each element of an array, of all devices: ``[devices, ...]``."""
    p = Field(draws, 0).flat(x).p if x.x is not None else x.p
    split = p.reshape(draws, -1, *p.shape[1:])
    found = split[0]
    for draw in split[1:]:
        found = found + (draw << 32)
    return np.asarray(found)


class Contents:
    """The elements of all values of the plain program."""

    def __init__(self, domain: Field) -> None:
        self.domain = domain
        self._parts: list[np.ndarray] = []
        self._sorted: np.ndarray | None = None
        self.add(domain.constant(np.zeros((domain.draws, 1)), np.float32))
        self.add(domain.constant(np.ones((domain.draws, 1)), np.float32))

    def add(self, x: Value) -> None:
        """Adds the elements of a value."""
        for part in _parts_of(x):
            self._parts.append(np.unique(numbers_of(part, self.domain.draws)))

    def saw(self, eqn: Any, axes: Axes, operands: Sequence[Value], results: Sequence[Value]) -> None:
        """Adds the results of an equation."""
        for x in results:
            self.add(x)

    def derived(self, new: Value, old: Value) -> None:
        """Parts and joined parts have the same elements."""

    def contains(self, x: Value) -> bool:
        """Whether these are elements of the plain program."""
        if self._sorted is None:
            self._sorted = np.unique(np.concatenate(self._parts))
        for part in _parts_of(x):
            wanted = numbers_of(part, self.domain.draws).ravel()
            at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
            if (self._sorted[at] != wanted).any():
                return False
        return True


def _parts_of(x: Value) -> Iterator[Residues]:
    if isinstance(x, Complex):
        yield from _parts_of(x.real)
        yield from _parts_of(x.imag)
    elif isinstance(x, Residues):
        yield x


_EXPLAINED = State()


class Trail:
    """What each value of the sharded program contains that nothing explains. An ``Observer``."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self._states: dict[int, State] = {}
        self._made: dict[int, Any] = {}  # the equations of values
        self._kept: list[Any] = []  # values, so that no identity is used twice
        self._count = 0

    def state(self, x: Value) -> State:
        """What is known of a value."""
        return self._states.get(id(x), _EXPLAINED)

    def saw(self, eqn: Any, axes: Axes, operands: Sequence[Value], results: Sequence[Value]) -> None:
        """Judges the results of an equation."""
        self._count += 1
        before = tuple(map(self.state, operands))
        moves = tuple(dict.fromkeys(itertools.chain(*(s.moves for s in before))))[-8:]
        if eqn.primitive.name in _MOVES:
            moves = (*moves, eqn)
        for x in results:
            self._made.setdefault(id(x), eqn)
            if id(x) in self._states and isinstance(x, Residues | Complex):  # a body has computed it
                continue
            self._kept.append(x)
            state = self._judged(eqn, axes, before, x)
            is_right = state is _EXPLAINED and eqn.primitive.name not in _KEEPS
            self._states[id(x)] = state if is_right else dataclasses.replace(state, moves=moves)

    def _judged(self, eqn: Any, axes: Axes, before: tuple[State, ...], x: Value) -> State:
        if not isinstance(x, Residues | Complex) or self.contents.contains(x):
            return _EXPLAINED
        departures = {d.number: d for s in before for d in s.departures}
        if departures:
            return State(departures=tuple(departures[n] for n in sorted(departures)))
        part = next(_parts_of(x))
        for over in _subsets(axes):
            total = self._summed(part, axes, over)
            if total is not None and self.contents.contains(total):
                origin = next((s.origin for s in before if s.partial), eqn)
                return State(partial=frozenset(over), origin=origin)
        return State(departures=(Departure(self._count, eqn, axes, part, before),))

    def derived(self, new: Value, old: Value) -> None:
        """A part of a value, or values that are joined, contain what the values contain."""
        self._made.setdefault(id(new), self._made.get(id(old)))
        if isinstance(new, Residues | Complex) and new is not old:
            self._kept.append(new)
            some, more = self.state(new), self.state(old)
            departures = {d.number: d for d in (*some.departures, *more.departures)}
            self._states[id(new)] = State(
                some.partial | more.partial,
                some.origin or more.origin,
                tuple(departures[n] for n in sorted(departures)),
                (*some.moves, *more.moves)[-8:],
            )

    def blame(self, x: Value) -> Blame:
        """The likely cause of a wrong value."""
        state = self.state(x)
        if state.departures:
            return self._of_departure(state.departures[0])
        if state.partial:
            return Blame(_line(state.origin), f"not summed over {_and(state.partial)}")
        if state.moves:
            last = state.moves[-1]
            return Blame(_line(last), f"elements are in other places; '{last.primitive.name}' moved them last")
        made = self._made.get(id(x))
        if made is None:
            return Blame("", "")
        return Blame(_line(made), f"the result of '{made.primitive.name}' is none of the plain program at this place")

    def _of_departure(self, departure: Departure) -> Blame:
        here, name = _line(departure.eqn), departure.eqn.primitive.name
        scaled = self._scale(departure)
        if scaled:
            return Blame(here, scaled)
        for state in departure.operands:
            if state.partial:
                return Blame(_line(state.origin), f"not summed over {_and(state.partial)} before '{name}' at {here}")
        moves = [m for s in departure.operands for m in s.moves]
        if moves:
            text = f"'{name}' at {here} combines elements that do not belong together"
            return Blame(_line(moves[-1]), f"{text}; '{moves[-1].primitive.name}' moved one of them last")
        return Blame(here, f"no value of the plain program equals the result of '{name}'")

    def _scale(self, departure: Departure) -> str:
        """How a value is a multiple of one of the plain program; empty if it is not."""
        axes, x = departure.axes, departure.value
        partial = frozenset().union(*(s.partial for s in departure.operands))
        x = (self._summed(x, axes, tuple(partial)) if partial else None) or x
        for over in _subsets(axes):
            n = math.prod(size for a, size in axes if a in over)
            missing = f", and not over {_and(partial)}" if partial else ""
            if self.contents.contains(_scaled(x, int(inverse(np.array([n]))[0]))):
                return f"{n} times too large: summed twice over {_and(over)}{missing}"
            if self.contents.contains(_scaled(x, n)):
                return f"{n} times too small: a mean instead of a sum over {_and(over)}{missing}"
        return ""

    def _summed(self, x: Residues, axes: Axes, over: Sequence[str]) -> Residues | None:
        """The sum over devices, on each of them; None if all of them have the same."""
        draws = self.contents.domain.draws
        p = self.contents.domain.flat(x).p
        split = np.where(p >= P, 0, p).reshape(draws, *(n for _, n in axes), *p.shape[1:])
        dims = tuple(1 + i for i, (a, _) in enumerate(axes) if a in over)
        if any((split == split.take([0], d)).all() for d in dims):
            return None
        total = split.sum(dims, keepdims=True) % P
        return Residues(np.broadcast_to(total, split.shape).reshape(p.shape))


def _subsets(axes: Axes) -> Iterator[tuple[str, ...]]:
    names = [a for a, n in axes if n > 1]
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)


def _and(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


def _scaled(x: Residues, factor: int) -> Residues:
    return Residues(np.where(x.p >= P, x.p, x.p * factor % P), x=x.x)


def _line(eqn: Any) -> str:
    return jax_adapter.user_line(eqn.source_info)


def of_unequal(trail: Trail, found: Unequal) -> Blame:
    """The likely cause of a result that is not the same on all devices."""
    blame = trail.blame(found.value)
    if blame.cause:
        return blame
    return Blame(blame.line, f"devices along {found.axis} have different parts of a result that is called replicated")
