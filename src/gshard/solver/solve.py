"""Finds good states of a problem, exactly if there are few, and a bound on their distance from the best."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from gshard.core.time_budget import EFFORT, OutOfTime, check_deadline
from gshard.solver.descent import Descent, Forest
from gshard.solver.messages import Flat, Messages
from gshard.solver.problem import Floats, Ints, Problem, ProblemError
from gshard.solver.reduce import DoesNotFit, Reduced, reduce

# Minimises the peak of memory, for problems without a known solution that fits.

ROUNDS = 60


def least_peak(problem: Problem, deadline: float = np.inf) -> Ints | None:
    """The states of the lowest peak found; None if only forbidden states were found.

    >>> least_peak(Problem.of([[0, 0], [0, 0]], loads=[(0, 0, 2, [8, 4]), (1, 1, 2, [5, 9])]))
    array([1, 0])
    """
    reduced = reduce(_memory_only(problem))
    flat, generator = Flat(reduced.problem), np.random.default_rng(0)
    messages = Messages(flat, generator.permutation(flat.size.size))
    weights = np.full(len(flat.problem.moments), 1.0 / max(1, len(flat.problem.moments)))
    best: Ints | None = None
    best_peak = np.inf
    for round_index in range(ROUNDS):
        if round_index and time.monotonic() > deadline:
            break
        costs = flat.priced(weights)
        messages.sweep(costs, forward=True)
        _, states = messages.sweep(costs, forward=False, choose=True)
        states = Forest(flat, generator).improve(costs, states)
        usage = flat.usage(states)
        peak = float(usage.max(initial=0.0))
        if np.isfinite(flat.problem.value(states)) and peak < best_peak:
            best, best_peak = states, peak
        weights *= np.exp(3.0 / (1.0 + round_index / 10.0) * (usage / max(peak, 1.0) - 1.0))
        weights /= max(weights.sum(), 1e-300)
    return None if best is None else reduced.lift(best)


def _memory_only(problem: Problem) -> Problem:
    """The problem with costs of 0 for allowed choices, and a limit of 0, so that no state is removed for its bytes."""
    costs, tables = (
        tuple(np.where(np.isfinite(array), 0.0, np.inf) for array in arrays)
        for arrays in (problem.costs, problem.tables)
    )
    return dataclasses.replace(problem, costs=costs, tables=tables, limit=0.0)


# Makes a problem in which all nodes of a class have one state.


def tied(problem: Problem, classes: Ints) -> Problem:
    """The problem (without loads) with one node for each class, whose nodes have equally many states.

    Its states ``s`` cost as much as ``s[classes]`` in the whole problem.
    """
    costs: dict[int, Floats] = {}
    for group, cost in zip(classes.tolist(), problem.costs, strict=True):
        costs[group] = costs[group] + cost if group in costs else cost
    count_of: Counter[tuple[int, int, int]] = Counter()
    tables = {id(table): table for table in problem.tables}
    for (u, v), table in zip(classes[problem.ends].tolist(), problem.tables, strict=True):
        count_of[u, v, id(table)] += 1
    edges = [(u, v, times * tables[table_id]) for (u, v, table_id), times in count_of.items()]
    return Problem.of([costs[group] for group in range(len(costs))], edges)


# Finds the best solution by enumeration, if there are few enough states.

TABLE = 1_000_000  # entries of the largest table
NODES = 500  # eliminated nodes; for more, messages are faster
EXACT_WORK = 30_000_000  # entries of all tables, and the choices of nodes with loads times the moments


def exact(problem: Problem) -> list[Ints] | None:
    """The cheapest states that fit, in a list, which is empty if nothing fits; None if the problem is too large.

    >>> exact(Problem.of([[0, 3], [1, 0]], [(0, 1, [[9, 9], [0, 9]])]))
    [array([1, 0])]
    """
    order = _order(problem)
    if order is None:
        return None
    tables: list[tuple[tuple[int, ...], Floats]] = [((i,), cost) for i, cost in enumerate(problem.costs)]
    tables += [((u, v), table) for (u, v), table in zip(problem.ends.tolist(), problem.tables)]
    eliminations: list[tuple[int, tuple[int, ...], Floats]] = []
    for node in order:
        tables_of_node = [entry for entry in tables if node in entry[0]]
        scope = tuple(sorted({i for nodes, _ in tables_of_node for i in nodes}))
        total = _sum(tables_of_node, scope)
        axis = scope.index(node)
        tables = [entry for entry in tables if node not in entry[0]]
        other_nodes = tuple(i for i in scope if i != node)
        tables.append((other_nodes, total.min(axis)))
        eliminations.append((node, other_nodes, total.argmin(axis)))
    eliminated = set(order)
    remaining = tuple(i for i in range(len(problem.costs)) if i not in eliminated)
    total = _sum(tables, remaining, tuple(problem.costs[i].size for i in remaining))
    if problem.limit is not None:
        for moment in range(len(problem.moments)):
            used = _sum(
                [((load.node,), load.bytes) for load, (a, b) in zip(problem.loads, problem.rows) if a <= moment < b],
                remaining,
                total.shape,
            )
            total = np.where(used <= problem.limit, total, np.inf)
    best = np.unravel_index(int(total.argmin()), total.shape) if remaining else ()
    if not np.isfinite(total[best]):
        return []
    states = np.zeros(len(problem.costs), dtype=np.int64)
    states[list(remaining)] = best
    for node, other_nodes, choice in reversed(eliminations):
        states[node] = choice[tuple(states[list(other_nodes)])] if other_nodes else int(choice)
    return [states]


def _order(problem: Problem) -> list[int] | None:
    """The nodes without loads in the order of their elimination; None if tables become too large."""
    size = problem.states.tolist()
    loaded = {load.node for load in problem.loads} if problem.limit is not None else set()
    loaded_choices = math.prod(size[i] for i in sorted(loaded))
    if loaded_choices > TABLE or loaded_choices * max(1, len(problem.moments)) > EXACT_WORK:
        return None
    neighbours: list[set[int]] = [set() for _ in size]
    for u, v in problem.ends.tolist():
        neighbours[u].add(v)
        neighbours[v].add(u)
    remaining, order, work = [i for i in range(len(size)) if i not in loaded], [], 0
    if len(remaining) > NODES:
        return None
    table_of = {i: math.prod(size[j] for j in neighbours[i]) * size[i] for i in remaining}
    while table_of:
        table, node = min((table, i) for i, table in table_of.items())
        work += table
        if table > TABLE or work > EXACT_WORK or len(neighbours[node]) > 24:
            return None
        del table_of[node]
        for j in neighbours[node]:
            neighbours[j] |= neighbours[node]
            neighbours[j] -= {j, node}
        table_of |= {i: math.prod(size[j] for j in neighbours[i]) * size[i] for i in neighbours[node] if i in table_of}
        order.append(node)
    return order


def _sum(tables: list[tuple[tuple[int, ...], Floats]], scope: tuple[int, ...], shape: tuple[int, ...] = ()) -> Floats:
    """The sum of tables as one table over the nodes of ``scope``. Nodes increase in ``scope`` and in each table."""
    total = np.zeros(shape)
    for nodes, table in tables:
        extents = dict(zip(nodes, table.shape))
        total = total + table.reshape([extents.get(i, 1) for i in scope])
    return total


TOLERANCE = 1e-6  # a gap that counts as none
WORK = 1e8  # entries of tables that the usual number of rounds goes through
LEAST, MOST = 60, 400  # the fewest and the most of these rounds
BURN = 15  # rounds before the first leap, in which prices settle
LEAPS = 2  # leaps after each later round
IDLE = 300  # steps without a better solution after which the search ends
_NONE: Mapping[int, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """States, with their cost and bounds."""

    problem: Problem  # the problem
    states: Ints  # int64 [nodes]
    value: float  # the cost of the states; ``inf`` if no allowed states were found
    bound: float  # no states that fit cost less
    peak: float  # bytes at the fullest moment
    steps: int = 0  # the number of rounds and leaps
    cut: bool = False  # whether the time was over before all planned steps
    interrupted: bool = False  # whether Ctrl-C ended the search

    @property
    def fits(self) -> bool:
        """Whether the states are allowed and within the limit of memory."""
        return bool(np.isfinite(self.value)) and (self.problem.limit is None or self.peak <= self.problem.limit)

    @property
    def gap(self) -> float:
        """The largest share of the value that other states could save; 1 if the states do not fit."""
        if not self.fits:
            return 1.0
        return max(0.0, self.value - self.bound) / self.value if self.value > 0 else 0.0


def solve(
    problem: Problem,
    most_seconds: float = np.inf,
    start: Sequence[Sequence[int] | Ints] = (),
    tolerance: float = TOLERANCE,
    effort: float = 1.0,
    enough: float = np.inf,
    likely: Mapping[int, int] = _NONE,
) -> Solution:
    """Searches for the best states. An interrupt (Ctrl-C) ends the search early.

    Args:
        problem: the problem.
        most_seconds: the most time that the search may take.
        start: states from which the search begins, besides its own.
        tolerance: the search ends at a smaller gap.
        effort: the number of steps, relative to the usual one; ``inf`` for as many as the time allows.
        enough: the search ends at a higher bound.
        likely: states of some nodes. The search also begins at the best states in which they have these.

    Raises:
        ProblemError: no states are allowed together, which the reduction of the problem shows.
    """
    search = _Search(problem, time.monotonic() + most_seconds)
    try:
        search.run(start, likely, tolerance, effort, enough)
    except (KeyboardInterrupt, OutOfTime) as end:
        if search.states is None:
            raise
        search.interrupted, search.cut = isinstance(end, KeyboardInterrupt), True
    return search.solution()


class _Search:
    """The search in the reduced problem, with the best solution of the whole problem so far."""

    def __init__(self, problem: Problem, deadline: float):
        self.problem, self.deadline = problem, deadline
        self.states: Ints | None = None  # the best states that fit
        self.value, self.bound, self.steps = np.inf, 0.0, 0
        self.least: Ints | None = None  # the states of the lowest peak, if none fit
        self.cut = self.interrupted = False

    def offer(self, states: Ints) -> None:
        """Keeps states that fit and are better than all before."""
        value = self.problem.value(states)
        if value < self.value and self.problem.fits(states):
            self.states, self.value = states, value

    def run(
        self,
        start: Sequence[Sequence[int] | Ints],
        likely: Mapping[int, int],
        tolerance: float,
        effort: float,
        enough: float,
    ) -> None:
        for states in start:
            self.offer(np.array(states, dtype=np.int64))
        try:
            reduced = reduce(self.problem)
        except DoesNotFit:
            self._peak()
            return
        outcome = exact(reduced.problem)
        for states in [] if outcome is None else outcome:
            self.offer(reduced.lift(states))
            self.bound = reduced.problem.value(states)
        if outcome is None:
            given = [*map(reduced.lower, start), *_likely_states(reduced, likely)]
            self._descend(reduced, given, tolerance, effort, enough)
        if self.states is None and self.least is None:
            self._peak()

    def _descend(self, reduced: Reduced, given: Sequence[Ints], tolerance: float, effort: float, enough: float) -> None:
        """Runs rounds and leaps: a number that depends on the sizes, times ``effort``, as far as the time allows."""
        descent = Descent(reduced.problem)

        if any([descent.offer(states) for states in given]) and descent.states is not None:
            self.offer(reduced.lift(descent.states))
        entries = sum(table.size for table in reduced.problem.tables) + descent.flat.cost.size
        rounds = int(min(effort * min(MOST, max(LEAST, WORK / entries)), sys.maxsize))
        burn_in, idle = min(BURN, rounds // 3), 0  # idle: steps without a better solution
        for round_index in range(rounds):
            for step in (descent.round, *[descent.leap] * (LEAPS if round_index >= burn_in else 0)):
                check_deadline()
                if self.value - self.bound <= tolerance * self.bound or self.bound >= enough:
                    return
                if time.monotonic() > self.deadline:
                    self.cut = bool(np.isfinite(effort))
                    return
                self.steps += 1
                idle = 0 if step() else idle + 1
                if not idle and descent.states is not None:
                    self.offer(reduced.lift(descent.states))
                self.bound = max(self.bound, descent.prices.bound)
            if descent.states is not None and idle > IDLE and np.isfinite(effort):
                return
            if descent.states is None and self.least is None and round_index >= min(LEAST, rounds // 2):
                self._peak()
                if self.least is not None:
                    descent.offer(reduced.lower(self.least))

    def _peak(self) -> None:
        """Minimises the peak of memory."""
        self.least = least_peak(self.problem, self.deadline)
        if self.least is not None:
            self.offer(self.least)

    def solution(self) -> Solution:
        """The best solution so far."""
        states = self.states if self.states is not None else self.least
        if states is None:
            states = np.zeros(len(self.problem.costs), dtype=np.int64)
        value, peak = self.problem.value(states), self.problem.peak(states)
        bound = min(self.bound, value)  # rounding may raise the bound above the value
        return Solution(self.problem, states, value, bound, peak, self.steps, self.cut, self.interrupted)


def _likely_states(reduced: Reduced, likely: Mapping[int, int]) -> Iterator[Ints]:
    """The best states of a reduced problem in which these nodes have these states; nothing if that is forbidden."""
    pairs = enumerate(zip(reduced.nodes, reduced.kept, strict=True))
    states = {i: np.flatnonzero(kept == likely[node]) for i, (node, kept) in pairs if node in likely}
    with contextlib.suppress(ProblemError):
        if states:
            one = {i: int(found[0]) for i, found in states.items() if found.size}
            yield solve(reduced.problem.restricted(one), effort=EFFORT).states
