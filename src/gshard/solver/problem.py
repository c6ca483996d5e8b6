"""Problem: chooses one state for each node with the least cost, within limits of memory.

    minimise    sum of costs[i][x_i]  +  sum of table[x_u, x_v] over edges
    so that     at every moment, the bytes of the loads alive then are at most the limit

A node is an unknown (the sharding of a value, the split of an equation) and its states are the choices. A load is
memory that a node takes in the half-open interval [start, end) of moments, as many bytes as its state says. This is
the class of problems of the ASPLOS 2025 contest on intra-operator parallelism (google/iopddl). Nothing here knows
what the states mean.

A choice that is forbidden costs ``inf``. Bytes are whole numbers, so that sums of them are exact.

    >>> p = Problem.of([[0, 3], [1, 0]], [(0, 1, [[0, 9], [9, 0]])], loads=[(0, 0, 2, [8, 4])], limit=6)
    >>> p.value([1, 1]), p.peak([1, 1]), p.fits([1, 1]), p.fits([0, 0])
    (3.0, 4.0, True, False)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gshard.core.errors import GShardError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
MOST_BYTES = 2.0**53  # above, sums of whole numbers in float64 are no longer exact


class ProblemError(GShardError):
    """A problem contradicts itself: shapes that do not agree, costs that are not numbers, nothing that is allowed."""


class Load(NamedTuple):
    """Memory that a node takes.

    Attributes:
        node: whose state says how much.
        start: the first moment.
        end: the moment after the last.
        bytes: float64 [states of the node], whole numbers.
    """

    node: int
    start: int
    end: int
    bytes: Floats


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Costs, tables and loads of a choice of states; made by ``Problem.of``, which checks them.

    Attributes:
        costs: of each node, float64 [states].
        ends: int64 [edges, 2], the two nodes of each edge, the smaller first; no pair twice, in lexicographic order.
        tables: of each edge, float64 [states of the first, states of the second]; what was given as one array, is one.
        loads: memory, empty ones left out.
        limit: bytes at any moment, or None.
        names: of the nodes, for messages; may be empty.
    """

    costs: tuple[Floats, ...]
    ends: Ints
    tables: tuple[Floats, ...]
    loads: tuple[Load, ...] = ()
    limit: float | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        costs: Iterable[ArrayLike],
        edges: Iterable[tuple[int, int, ArrayLike]] = (),
        loads: Iterable[tuple[int, int, int, ArrayLike]] = (),
        limit: float | None = None,
        names: Sequence[str] = (),
    ) -> Problem:
        """A problem from plain lists. Tables of the same two nodes are added up; one of a node with itself is its cost.

        Raises:
            ProblemError: shapes that do not agree, NaN, numbers below zero, bytes that are not whole.
        """
        called = _Names(tuple(names))
        numbers = _Numbers(called)
        own = [numbers(cost, "the cost of", i) for i, cost in enumerate(costs)]
        if names and len(names) != len(own):
            raise ProblemError(f"{len(names)} names for {len(own)} nodes.")
        for i, cost in enumerate(own):
            if cost.ndim != 1 or not cost.size:
                raise ProblemError(f"{called(i)} has costs of shape {cost.shape}.", hint="One cost for each state.")
        sums: dict[tuple[int, int], Floats] = {}
        turned: dict[int, Floats] = {}
        for u, v, given in edges:
            u, v = called.node(u, len(own)), called.node(v, len(own))
            table = numbers(given, "the table of", u, v)
            if table.shape != (own[u].size, own[v].size):
                raise ProblemError(
                    f"The table of {called(u)} and {called(v)} has shape {table.shape}.",
                    got=f"their states: {own[u].size} and {own[v].size}",
                )
            if u == v:
                own[u] = own[u] + np.diagonal(table)
                continue
            if u > v:
                if id(table) not in turned:
                    turned[id(table)] = np.ascontiguousarray(table.T)
                u, v, table = v, u, turned[id(table)]
            sums[u, v] = sums[u, v] + table if (u, v) in sums else table
        keys = sorted(sums)
        return cls(
            costs=tuple(own),
            ends=np.array(keys, dtype=np.int64).reshape(-1, 2),
            tables=tuple(np.ascontiguousarray(sums[key]) for key in keys),
            loads=tuple(_loads(loads, own, called, numbers)),
            limit=_limit(limit),
            names=tuple(names),
        )

    def name(self, node: int) -> str:
        return _Names(self.names)(node)

    @cached_property
    def states(self) -> Ints:
        """The number of states of each node."""
        return np.array([cost.size for cost in self.costs], dtype=np.int64)

    @cached_property
    def first(self) -> Ints:
        """int64 [nodes + 1]: where the states of each node begin, if those of all stand one after the other."""
        return offsets(self.states)

    @cached_property
    def cost(self) -> Floats:
        """float64 [all states]."""
        return _flat(self.costs)

    @cached_property
    def table_first(self) -> Ints:
        """int64 [edges]: where each table begins in ``table``."""
        different = self._different
        begin = offsets(np.array([table.size for table in different.values()], dtype=np.int64)).tolist()
        first = dict(zip(different, begin))
        return np.array([first[id(table)] for table in self.tables], dtype=np.int64)

    @cached_property
    def table(self) -> Floats:
        """All tables one after the other, row by row; those that are one array, once."""
        return _flat([table.ravel() for table in self._different.values()])

    @property
    def _different(self) -> dict[int, Floats]:
        return {id(table): table for table in self.tables}

    @cached_property
    def moments(self) -> Ints:
        """The moments at which most is alive: memory that suffices at these suffices at all.

        They are the last starts before an end; between two of them loads only end and then only start.
        """
        starts = np.unique(np.array([load.start for load in self.loads], dtype=np.int64))
        ends = np.unique(np.array([load.end for load in self.loads], dtype=np.int64))
        before = np.searchsorted(ends, starts, side="right")
        return starts[before < np.append(before[1:], len(ends))]

    @cached_property
    def rows(self) -> Ints:
        """int64 [loads, 2]: the moments, by their index, that each load is a part of: [first, last)."""
        spans = np.array([(load.start, load.end) for load in self.loads], dtype=np.int64).reshape(-1, 2)
        return np.searchsorted(self.moments, spans)

    def value(self, states: Sequence[int] | Ints) -> float:
        """What the states cost; ``inf`` if one of them is forbidden."""
        chosen = self._checked(states)
        u, v = self.ends[:, 0], self.ends[:, 1]
        entries = self.table[self.table_first + chosen[u] * self.states[v] + chosen[v]]
        return float(self.cost[self.first[:-1] + chosen].sum() + entries.sum())

    def usage(self, states: Sequence[int] | Ints) -> Floats:
        """Bytes alive at each of ``moments``."""
        chosen = self._checked(states)
        return accumulated(self.rows, [load.bytes[chosen[load.node]] for load in self.loads], len(self.moments))

    def peak(self, states: Sequence[int] | Ints) -> float:
        """Most bytes alive at any moment."""
        return float(self.usage(states).max(initial=0.0))

    def fits(self, states: Sequence[int] | Ints) -> bool:
        """Whether memory suffices and nothing is forbidden."""
        return (self.limit is None or self.peak(states) <= self.limit) and self.value(states) < np.inf

    def __str__(self) -> str:
        """Its sizes: ``816 nodes (12.5 states, at most 39), 1,096 edges (236,126 entries), 665 loads ...``."""
        states = self.states
        text = (
            f"{states.size:,} nodes ({states.mean() if states.size else 0:.1f} states, at most {states.max(initial=0)})"
        )
        text += f", {len(self.tables):,} edges ({sum(t.size for t in self.tables):,} entries)"
        text += f", {len(self.loads):,} loads at {len(self.moments):,} moments"
        return text if self.limit is None else text + f", limit {self.limit:,.0f}"

    def _checked(self, states: Sequence[int] | Ints) -> Ints:
        chosen = np.asarray(states, dtype=np.int64)
        if chosen.shape != self.states.shape:
            raise ProblemError(f"{chosen.size} states for {len(self.costs)} nodes.")
        for i in np.flatnonzero((chosen < 0) | (chosen >= self.states))[:1].tolist():
            raise ProblemError(f"{self.name(i)} has no state {chosen[i]}.", got=f"it has {self.states[i]}")
        return chosen


def accumulated(rows: Ints, amounts: ArrayLike, length: int) -> Floats:
    """Sums over intervals: ``amounts[k]`` is added to all of ``rows[k, 0]:rows[k, 1]`` of a vector of that length."""
    weights = np.asarray(amounts, dtype=np.float64)
    change = np.bincount(rows[:, 0], weights, length + 1) - np.bincount(rows[:, 1], weights, length + 1)
    return np.cumsum(change[:length], dtype=np.float64)


def offsets(counts: Ints) -> Ints:
    """Where each begins, and the end of the last, if so many of each stand one after the other.

    >>> offsets(np.array([2, 3])).tolist()
    [0, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


class _Names:
    """How a message calls a node."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def __call__(self, node: int) -> str:
        return f"node {node} ({self.names[node]})" if node < len(self.names) else f"node {node}"

    def node(self, node: int, count: int) -> int:
        if not 0 <= node < count:
            raise ProblemError(f"There is no node {node}.", got=f"nodes: 0 to {count - 1}")
        return int(node)


class _Numbers:
    """Arrays of what is given, checked; what is given more than once is looked at once."""

    def __init__(self, called: _Names):
        self.called = called
        self._known: dict[int, tuple[ArrayLike, Floats]] = {}  # with what was given, so that it stays

    def __call__(self, given: ArrayLike, what: str, *nodes: int) -> Floats:
        if id(given) not in self._known:
            array = np.array(given, dtype=np.float64)
            if not (array >= 0).all():  # NaN compares false
                whose = " and ".join(map(self.called, nodes))
                raise ProblemError(
                    f"In {what} {whose} is a number below zero or NaN.", hint="What is forbidden costs inf."
                )
            self._known[id(given)] = given, array
        return self._known[id(given)][1]


def _loads(
    loads: Iterable[tuple[int, int, int, ArrayLike]], own: list[Floats], called: _Names, numbers: _Numbers
) -> Iterable[Load]:
    total = 0.0
    for node, start, end, given in loads:
        node = called.node(node, len(own))
        amount = numbers(given, "the bytes of", node)
        if amount.shape != own[node].shape:
            raise ProblemError(
                f"A load of {called(node)} has shape {amount.shape}.", got=f"its states: {own[node].size}"
            )
        if not (amount == np.floor(amount)).all() or not np.isfinite(amount).all():
            raise ProblemError(f"A load of {called(node)} is not a whole number of bytes.")
        total += float(amount.max())
        if end > start and amount.any():
            yield Load(node, int(start), int(end), amount)
    if total >= MOST_BYTES:
        raise ProblemError(
            f"The loads are {total:.3g} bytes together.", hint="Count in larger units: sums must stay below 2**53."
        )


def _limit(limit: float | None) -> float | None:
    if limit is not None and not limit >= 0:
        raise ProblemError(f"The limit is {limit}.", hint="Give bytes, or None.")
    return None if limit is None else float(np.floor(limit))


def _flat(arrays: Iterable[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *arrays])
