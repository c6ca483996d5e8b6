"""Defines the optimisation problem: choose one state for each node with the least cost, within limits of memory.

    minimise    sum of costs[i][x_i]  +  sum of table[x_u, x_v] over edges
    so that     at every moment, the bytes of the loads alive then are at most the limit

A node is an unknown (the sharding of a value, the split of an equation), and its states are the choices. A load is
memory that a node holds in the half-open interval [start, end) of moments, with bytes for each state. This is the class
of problems of the ASPLOS 2025 contest on intra-operator parallelism (google/iopddl). The solver does not depend on what
the states mean.

The cost of a forbidden choice is ``inf``. Bytes are whole numbers, so that sums of them are exact.

    >>> p = Problem.of([[0, 3], [1, 0]], [(0, 1, [[0, 9], [9, 0]])], loads=[(0, 0, 2, [8, 4])], limit=6)
    >>> p.value([1, 1]), p.peak([1, 1]), p.fits([1, 1]), p.fits([0, 0])
    (3.0, 4.0, True, False)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gshard.core.errors import GShardError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_BYTES = 2.0**53  # sums of larger whole numbers are not exact in float64


class ProblemError(GShardError):
    """A problem contradicts itself: shapes disagree, costs are not numbers, or nothing is allowed."""


class Load(NamedTuple):
    """Memory that a node holds."""

    node: int  # the node whose state decides the bytes
    start: int  # the first moment
    end: int  # the moment after the last
    bytes: Floats  # float64 [states of the node], whole numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Costs, tables and loads. ``Problem.of`` makes and checks a problem."""

    costs: tuple[Floats, ...]  # for each node, float64 [states]
    ends: Ints  # int64 [edges, 2], the two nodes of each edge, the smaller first; no pair twice, in lexicographic order
    # for each edge, float64 [states of the first, states of the second]. Equal arrays may be one object.
    tables: tuple[Floats, ...]
    loads: tuple[Load, ...] = ()  # the loads, without empty ones
    limit: float | None = None  # bytes at any moment, or None

    @classmethod
    def of(
        cls,
        costs: Iterable[ArrayLike],
        edges: Iterable[tuple[int, int, ArrayLike]] = (),
        loads: Iterable[tuple[int, int, int, ArrayLike]] = (),
        limit: float | None = None,
    ) -> Problem:
        """Makes a problem from plain lists. Tables of equal nodes are added; one of a node with itself is its cost."""
        numbers = _Numbers()
        node_costs = [numbers(cost, f"the cost of node {i}") for i, cost in enumerate(costs)]
        for i, cost in enumerate(node_costs):
            if cost.ndim != 1 or not cost.size:
                raise ProblemError(f"Node {i} has costs of shape {cost.shape}.", hint="One cost for each state.")
        sums: dict[tuple[int, int], Floats] = {}
        transposed: dict[int, Floats] = {}
        for u, v, given in edges:
            u, v = _checked_node(u, len(node_costs)), _checked_node(v, len(node_costs))
            table = numbers(given, f"the table of nodes {u} and {v}")
            if table.shape != (node_costs[u].size, node_costs[v].size):
                raise ProblemError(
                    f"The table of nodes {u} and {v} has shape {table.shape}.",
                    got=f"their states: {node_costs[u].size} and {node_costs[v].size}",
                )
            if u == v:
                node_costs[u] = node_costs[u] + np.diagonal(table)
                continue
            if u > v:
                if id(table) not in transposed:
                    transposed[id(table)] = np.ascontiguousarray(table.T)
                u, v, table = v, u, transposed[id(table)]
            sums[u, v] = sums[u, v] + table if (u, v) in sums else table
        keys = sorted(sums)
        if limit is not None and not limit >= 0:
            raise ProblemError(f"The limit is {limit}.", hint="Give bytes, or None.")
        return cls(
            costs=tuple(node_costs),
            ends=np.array(keys, dtype=np.int64).reshape(-1, 2),
            tables=tuple(np.ascontiguousarray(sums[key]) for key in keys),
            loads=tuple(_loads(loads, node_costs, numbers)),
            limit=None if limit is None else float(np.floor(limit)),
        )

    def restricted(self, states: Mapping[int, int]) -> Problem:
        """The problem in which some nodes may have one state only."""
        costs = list(self.costs)
        for node, state in states.items():
            costs[node] = np.where(np.arange(costs[node].size) == state, costs[node], np.inf)
        return dataclasses.replace(self, costs=tuple(costs))

    @cached_property
    def states(self) -> Ints:
        """The number of states of each node."""
        return np.array([cost.size for cost in self.costs], dtype=np.int64)

    @cached_property
    def first(self) -> Ints:
        """int64 [nodes + 1]: where the states of each node begin in an array of all states."""
        return offsets(self.states)

    @cached_property
    def cost(self) -> Floats:
        """float64 [all states]: the costs of all nodes, one after the other."""
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
        """float64: all tables one after the other, row by row; tables that are one object, once."""
        return _flat([table.ravel() for table in self._different.values()])

    @property
    def _different(self) -> dict[int, Floats]:
        return {id(table): table for table in self.tables}

    @cached_property
    def moments(self) -> Ints:
        """int64: the moments of the highest memory. A solution that fits at these moments fits at all.

        They are the last starts before an end. Between two of them, loads only end and then only start.
        """
        starts = np.unique(np.array([load.start for load in self.loads], dtype=np.int64))
        ends = np.unique(np.array([load.end for load in self.loads], dtype=np.int64))
        before = np.searchsorted(ends, starts, side="right")
        return starts[before < np.append(before[1:], len(ends))]

    @cached_property
    def rows(self) -> Ints:
        """int64 [loads, 2]: for each load, the range [first, last) of indices of ``moments`` at which it is alive."""
        spans = np.array([(load.start, load.end) for load in self.loads], dtype=np.int64).reshape(-1, 2)
        return np.searchsorted(self.moments, spans)

    def value(self, states: Sequence[int] | Ints) -> float:
        """The cost of the states; ``inf`` if one of them is forbidden."""
        chosen = self._checked(states)
        u, v = self.ends[:, 0], self.ends[:, 1]
        entries = self.table[self.table_first + chosen[u] * self.states[v] + chosen[v]]
        return float(self.cost[self.first[:-1] + chosen].sum() + entries.sum())

    def usage(self, states: Sequence[int] | Ints) -> Floats:
        """float64 [moments]: bytes alive at each moment."""
        chosen = self._checked(states)
        return accumulated(self.rows, [load.bytes[chosen[load.node]] for load in self.loads], len(self.moments))

    def peak(self, states: Sequence[int] | Ints) -> float:
        """The most bytes alive at any moment."""
        return float(self.usage(states).max(initial=0.0))

    def fits(self, states: Sequence[int] | Ints) -> bool:
        """Whether the states are within the limit of memory, and none is forbidden."""
        return (self.limit is None or self.peak(states) <= self.limit) and self.value(states) < np.inf

    def _checked(self, states: Sequence[int] | Ints) -> Ints:
        chosen = np.asarray(states, dtype=np.int64)
        if chosen.shape != self.states.shape:
            raise ProblemError(f"{chosen.size} states for {len(self.costs)} nodes.")
        for i in np.flatnonzero((chosen < 0) | (chosen >= self.states))[:1].tolist():
            raise ProblemError(f"Node {i} has no state {chosen[i]}.", got=f"it has {self.states[i]}")
        return chosen


def accumulated(rows: Ints, amounts: ArrayLike, length: int) -> Floats:
    """Sums over intervals: float64 [length], where ``amounts[k]`` is added to all of ``rows[k, 0]:rows[k, 1]``."""
    weights = np.asarray(amounts, dtype=np.float64)
    change = np.bincount(rows[:, 0], weights, length + 1) - np.bincount(rows[:, 1], weights, length + 1)
    return np.cumsum(change[:length], dtype=np.float64)


def offsets(counts: Ints) -> Ints:
    """int64 [groups + 1]: where each group begins, and the end of the last, for groups of these sizes in a row.

    >>> offsets(np.array([2, 3])).tolist()
    [0, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _checked_node(node: int, count: int) -> int:
    if not 0 <= node < count:
        raise ProblemError(f"There is no node {node}.", got=f"nodes: 0 to {count - 1}")
    return int(node)


class _Numbers:
    """Checks given arrays and converts them to float64, each object once."""

    def __init__(self) -> None:
        # By identity of the given object, which is kept so that its identity stays valid.
        self._known: dict[int, tuple[ArrayLike, Floats]] = {}

    def __call__(self, given: ArrayLike, what: str) -> Floats:
        if id(given) not in self._known:
            array = np.array(given, dtype=np.float64)
            if not (array >= 0).all():  # NaN compares false
                raise ProblemError(f"In {what} is a number below zero or NaN.", hint="What is forbidden costs inf.")
            self._known[id(given)] = given, array
        return self._known[id(given)][1]


def _loads(
    loads: Iterable[tuple[int, int, int, ArrayLike]], node_costs: list[Floats], numbers: _Numbers
) -> Iterable[Load]:
    total = 0.0
    for node, start, end, given in loads:
        node = _checked_node(node, len(node_costs))
        amount = numbers(given, f"the bytes of node {node}")
        if amount.shape != node_costs[node].shape:
            raise ProblemError(
                f"A load of node {node} has shape {amount.shape}.", got=f"its states: {node_costs[node].size}"
            )
        if not (amount == np.floor(amount)).all() or not np.isfinite(amount).all():
            raise ProblemError(f"A load of node {node} is not a whole number of bytes.")
        total += float(amount.max())
        if end > start and amount.any():
            yield Load(node, int(start), int(end), amount)
    if total >= MOST_BYTES:
        raise ProblemError(
            f"The loads are {total:.3g} bytes together.", hint="Count in larger units: sums must stay below 2**53."
        )


def _flat(arrays: Iterable[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *arrays])
