"""Makes a problem smaller without changing its best solution, and lifts solutions to the whole problem."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gshard.core.time_budget import check_deadline
from gshard.solver.problem import Floats, Ints, Load, Problem, ProblemError, accumulated

# Computes on the cost tables of one node or edge: allowed entries, sums, merged and best states.


def all_states(cost: Floats) -> Ints:
    """int64 [states]: the numbers of all states."""
    return np.arange(cost.size)


def finite_states(cost: Floats) -> np.ndarray | None:
    """bool [states]: the allowed states; None if all are."""
    finite = np.isfinite(cost)
    return None if finite.all() else finite


def allowed_entries(table: Floats) -> tuple[np.ndarray | None, np.ndarray | None, bool, Ints | None, Ints | None]:
    """Finds the allowed entries of a table."""
    allowed = np.isfinite(table)
    count = np.count_nonzero(allowed)
    if count == table.size:
        return None, None, _is_sum(table), None, None
    rows, columns = np.asarray(allowed.any(1)), np.asarray(allowed.any(0))
    by_column = allowed.argmax(0) if count == table.shape[1] else None
    by_row = allowed.argmax(1) if count == table.shape[0] else None
    return None if rows.all() else rows, None if columns.all() else columns, False, by_column, by_row


def _is_sum(table: Floats) -> bool:
    if 1 in table.shape or table[0, 0] + table[-1, -1] != table[0, -1] + table[-1, 0]:
        return 1 in table.shape
    return bool((table + table[0, 0] == table[:1] + table[:, :1]).all())


def row_and_column_costs(table: Floats) -> tuple[Floats, Floats]:
    """The costs of rows and of columns that add up to a table."""
    least = int(table[:, 0].argmin())  # the least row in every column, so that no cost becomes negative
    return table[:, 0] - table[least, 0], table[least]


def merged_costs(cost: Floats, table: Floats, choice: Ints) -> Floats:
    """The costs of the chosen states, plus their entries in a table."""
    merged: Floats = cost[choice] + table[choice, np.arange(choice.size)]
    return merged


def best_costs(cost: Floats, *tables: Floats) -> Floats:
    """The least cost of a node for its neighbours' states."""
    total = cost.reshape(-1, *[1] * len(tables))
    for axis, table in enumerate(tables):
        total = total + table.reshape(-1, *[table.shape[1] if a == axis else 1 for a in range(len(tables))])
    return np.asarray(total.min(0))


def best_state(cost: Floats, *rows: Floats) -> int:
    """The state of the least cost, with these costs at the neighbours' states."""
    for row in rows:
        cost = cost + row
    return int(cost.argmin())


# Represents a reduced problem, and lifts its solutions to the whole problem.


class DoesNotFit(ProblemError):
    """No choice of states is within the limit of memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An eliminated node, and how its state follows from those of others."""

    node: int  # the node
    kept: Ints  # its remaining states at that time, increasing
    given: tuple[int, ...]  # the nodes from which its state follows; none, one or two
    given_kept: tuple[Ints, ...]  # their remaining states at that time
    # int [states of the given node], the index in ``kept`` of the only state that it allows; None if it may have
    # several
    choice: Ints | None
    # the cost of its states, and its tables with the given nodes, if it may have several states
    costs: tuple[Floats, ...] = ()

    def best(self, given: Sequence[int]) -> int:
        """The index in ``kept`` of the best state, for the indices of the states of the given nodes."""
        if self.choice is not None:
            return self.choice.item(*given)
        cost, *tables = self.costs
        return best_state(cost, *(table[:, k] for table, k in zip(tables, given)))


@dataclasses.dataclass(frozen=True, eq=False)
class Reduced:
    """A reduced problem, with the steps that made it."""

    whole: Problem  # the original problem
    # the reduced problem. Its last node may have a single state, with the cost and bytes of everything that is decided.
    problem: Problem
    nodes: tuple[int, ...]  # for each node of ``problem``, the node of ``whole``; -1 for the node of what is decided
    kept: tuple[Ints, ...]  # for each node of ``problem``, the remaining states of that node
    steps: tuple[Step, ...]  # the steps of the reduction, in order

    def lift(self, states: Sequence[int] | Ints) -> Ints:
        """The states of all nodes of ``whole``, with the same value."""
        states_of_nodes = [0] * len(self.whole.costs)
        for node, kept, state in zip(self.nodes, self.kept, states):
            if node >= 0:
                states_of_nodes[node] = int(kept[state])
        places: dict[int, dict[int, int]] = {}  # by identity of ``kept``: the index of each state in it
        for step in reversed(self.steps):
            for kept in step.given_kept:
                if id(kept) not in places:
                    places[id(kept)] = {state: k for k, state in enumerate(kept.tolist())}
            indices = [places[id(kept)][states_of_nodes[j]] for j, kept in zip(step.given, step.given_kept)]
            states_of_nodes[step.node] = step.kept.item(step.best(indices))
        return np.array(states_of_nodes, dtype=np.int64)

    def lower(self, states: Sequence[int] | Ints) -> Ints:
        """The states of ``problem`` for a solution of ``whole``; the first state of a node whose own was removed."""
        indices = []
        for node, kept in zip(self.nodes, self.kept):
            index = int(np.searchsorted(kept, states[node])) if node >= 0 else 0
            indices.append(index if index < kept.size and (node < 0 or kept[index] == states[node]) else 0)
        return np.array(indices, dtype=np.int64)


# Computes functions of equal arrays once.


class Done:
    """Interned arrays and the results of functions of them, as long as this object is kept."""

    def __init__(self) -> None:
        self._ones: dict[tuple[object, ...], list[np.ndarray]] = {}
        self._found: dict[tuple[object, ...], Any] = {}

    def one(self, array: Any) -> Any:
        """The first array that had these contents; any other object unchanged."""
        if not isinstance(array, np.ndarray):
            return array
        data = array.tobytes()
        equal = self._ones.setdefault((array.shape, array.dtype, hash(data)), [])
        for other in equal:
            if other is array or other.tobytes() == data:
                return other
        equal.append(array)
        return array

    def __call__(self, work: Callable[..., Any], *arrays: Any) -> Any:
        """``work(*arrays)``: an interned array, or a tuple that may contain some."""
        key = (work, *map(id, arrays))
        try:
            return self._found[key]
        except KeyError:
            found = work(*arrays)
        self._found[key] = tuple(map(self.one, found)) if isinstance(found, tuple) else self.one(found)
        return self._found[key]


TABLE = 4096  # the most entries of a table that replaces a node with two neighbours
GROWTH = 100_000  # the most entries that a merge may add to the tables


def reduce(problem: Problem) -> Reduced:
    """Applies all rules until none applies."""
    work = _Work(problem)
    work.settle()
    while work.fewer_loads():
        work.settle()
    return work.result()


class _Work:
    """The problem while it shrinks. All containers are ordered."""

    def __init__(self, problem: Problem):
        n = len(problem.costs)
        self.whole = problem  # the original problem
        done = self.done = Done()  # computes functions of equal arrays once
        given = {id(array): array for array in (*problem.costs, *problem.tables)}
        interned = {i: done.one(array) for i, array in given.items()}
        self.transposed: dict[int, Floats] = {}  # the transposes of tables, by identity
        # for each node, float64 [remaining states]
        self.cost: list[Floats] = [interned[id(cost)] for cost in problem.costs]
        self.kept: list[Ints] = [done(all_states, cost) for cost in self.cost]  # for each node, its remaining states
        # for each node, the tables of its edges by neighbour, with its own states first
        self.tables_of: list[dict[int, Floats]] = [{} for _ in range(n)]
        # for each node, the bytes of its states by range of moments
        self.loads: list[dict[tuple[int, int], Floats]] = [{} for _ in range(n)]
        self.alive = [True] * n  # whether each node remains
        self.constant = 0.0  # the cost of what is decided
        self.by_memory = False  # whether a state was removed for its bytes
        self.fixed = np.zeros(len(problem.moments))  # float64 [moments], the bytes of what is decided
        self.steps: list[Step] = []  # the reduction so far
        for (u, v), table in zip(problem.ends.tolist(), problem.tables):
            self._set_table(u, v, interned[id(table)])
        if problem.limit is not None:
            for load, (first, last) in zip(problem.loads, problem.rows.tolist()):
                self._add_load(load.node, (first, last), load.bytes)
        # edges whose tables changed
        self.edges: dict[tuple[int, int], None] = dict.fromkeys(map(tuple, problem.ends.tolist()))
        self.nodes: dict[int, None] = dict.fromkeys(range(n))  # nodes at which something changed
        for i in range(n):
            self._restrict(i, done(finite_states, self.cost[i]))

    def settle(self) -> None:
        """Applies the rules for edges and nodes at which something changed."""
        while self.edges or self.nodes:
            check_deadline()
            if self.edges:
                (i, j), _ = self.edges.popitem()
                if self.alive[i] and self.alive[j] and j in self.tables_of[i]:
                    self._edge(i, j)
            else:
                i, _ = self.nodes.popitem()
                if self.alive[i]:
                    self._node(i)

    def fewer_loads(self) -> bool:
        """Removes loads of moments that cannot exceed the limit, and states that cannot fit. True if any changed."""
        limit = self.whole.limit
        if limit is None:
            return False
        spans = [(i, rows, amount) for i, loads in enumerate(self.loads) for rows, amount in loads.items()]
        rows = np.array([span for _, span, _ in spans], dtype=np.int64).reshape(-1, 2)
        most = self.fixed + accumulated(rows, [amount.max() for _, _, amount in spans], self.fixed.size)
        room = limit - self.fixed - accumulated(rows, [amount.min() for _, _, amount in spans], self.fixed.size)
        tight = np.concatenate([[0], np.cumsum(most > limit)])
        self.fixed[most <= limit] = 0.0
        changed = False
        for i, (first, last), _ in spans:
            if tight[first] == tight[last]:
                del self.loads[i][first, last]
                self.nodes[i] = None
                changed = True
        if (room < 0).any():  # nothing fits, and no single state is the cause
            return changed
        for i, (first, last), amount in spans:
            current = self.loads[i].get((first, last))
            if current is not None and current.size == amount.size:
                fits = self.done.one(amount - amount.min() <= room[first:last].min())
                changed |= not fits.all()
                self.by_memory |= not fits.all()
                self._restrict(i, None if fits.all() else fits)
        return changed

    def result(self) -> Reduced:
        remaining = [i for i, alive in enumerate(self.alive) if alive]
        new_index = {i: k for k, i in enumerate(remaining)}
        ends = sorted((new_index[i], new_index[j]) for i in remaining for j in self.tables_of[i] if i < j)
        nodes, kept, costs = list(remaining), [self.kept[i] for i in remaining], [self.cost[i] for i in remaining]
        spans = [(new_index[i], span, amount) for i in remaining for span, amount in self.loads[i].items()]
        if self.constant or self.fixed.any():
            nodes.append(-1)
            kept.append(np.zeros(1, dtype=np.int64))
            costs.append(np.array([self.constant]))
            steps = np.flatnonzero(np.diff(self.fixed)) + 1
            for a, b in zip([0, *steps.tolist()], [*steps.tolist(), self.fixed.size]):
                if b > a:
                    spans.append((len(remaining), (a, b), self.fixed[a : a + 1]))
        loads = tuple(Load(node, first, last, amount) for node, (first, last), amount in spans if amount.any())
        reduced = Problem(
            costs=tuple(costs),
            ends=np.array(ends, dtype=np.int64).reshape(-1, 2),
            tables=tuple(self.tables_of[remaining[a]][remaining[b]] for a, b in ends),
            loads=loads,
            limit=self.whole.limit if loads else None,
        )
        return Reduced(self.whole, reduced, tuple(nodes), tuple(kept), tuple(self.steps))

    def _edge(self, i: int, j: int) -> None:
        allowed_rows, allowed_columns, is_sum, by_column, by_row = self.done(allowed_entries, self.tables_of[i][j])
        for node, allowed in ((i, allowed_rows), (j, allowed_columns)):
            if allowed is not None:
                self._restrict(node, allowed)
                self.edges[i, j] = None
                return
        if is_sum:
            self._remove_sum_edge(i, j)
            return
        merges = []
        if by_column is not None:  # each state of j allows one of i
            merges.append((len(self.tables_of[i]), i, j, by_column))
        if by_row is not None:
            merges.append((len(self.tables_of[j]), j, i, by_row))
        for _, node, into, choice in sorted(merges, key=lambda way: way[:3]):
            # The entries that the merge adds to the tables.
            others = sum(table.shape[1] for k, table in self.tables_of[node].items() if k != into)
            added = (self.cost[into].size - self.cost[node].size) * others
            if added - self.tables_of[node][into].size <= GROWTH:
                self._merge(node, into, choice)
                return

    def _node(self, i: int) -> None:
        tables = self.tables_of[i]
        if self.cost[i].size == 1:
            for j in list(tables):
                self._remove_sum_edge(i, j)
            for (first, last), amount in self.loads[i].items():
                self.fixed[first:last] += amount[0]
            self._eliminate(i)
        elif not self.loads[i] and len(tables) <= 2:
            if len(tables) < 2 or math.prod(self.cost[j].size for j in tables) <= TABLE:
                self._eliminate(i)

    def _eliminate(self, i: int) -> None:
        """Eliminates a node with at most two neighbours: it takes its best state for each of theirs."""
        given = tuple(self.tables_of[i])
        costs = self.cost[i], *self.tables_of[i].values()
        best = self.done(best_costs, *costs)
        self.steps.append(Step(i, self.kept[i], given, tuple(self.kept[j] for j in given), None, costs))
        for j in given:
            del self.tables_of[j][i]
            self.nodes[j] = None
        if not given:
            self.constant += float(best)
        elif len(given) == 1:
            self._add_cost(given[0], best)
        else:
            self._add_table(given[0], given[1], best)
        self._remove_node(i)

    def _merge(self, i: int, j: int, choice: Ints) -> None:
        """Merges node i into j: its state is ``choice`` of j's state."""
        table = self.tables_of[i].pop(j)
        del self.tables_of[j][i]
        self.steps.append(Step(i, self.kept[i], (j,), (self.kept[j],), choice))
        self._add_cost(j, self.done(merged_costs, self.cost[i], table, choice))
        for k, other in self.tables_of[i].items():
            del self.tables_of[k][i]
            self._add_table(j, k, self.done(operator.getitem, other, choice))
        for rows, amount in self.loads[i].items():
            self._add_load(j, rows, amount[choice])
        self.nodes[j] = None
        self._remove_node(i)

    def _remove_sum_edge(self, i: int, j: int) -> None:
        """Removes an edge whose table is the sum of a cost of i and a cost of j."""
        table = self.tables_of[i].pop(j)
        del self.tables_of[j][i]
        of_row, of_column = self.done(row_and_column_costs, table)
        if self.cost[i].size > 1:
            self.cost[i] = self.done(np.add, self.cost[i], of_row)
        self._add_cost(j, of_column)
        self.nodes[i] = self.nodes[j] = None

    def _add_cost(self, j: int, more: Floats) -> None:
        self.cost[j] = self.done(np.add, self.cost[j], more)
        self._restrict(j, self.done(finite_states, self.cost[j]))

    def _add_table(self, j: int, k: int, more: Floats) -> None:
        self._set_table(j, k, self.done(np.add, self.tables_of[j][k], more) if k in self.tables_of[j] else more)
        self.edges[j, k] = None
        self.nodes[j] = self.nodes[k] = None

    def _set_table(self, i: int, j: int, table: Floats) -> None:
        turned = self.transposed.get(id(table))
        if turned is None:
            turned = self.transposed[id(table)] = self.done.one(np.ascontiguousarray(table.T))
        self.tables_of[i][j], self.tables_of[j][i] = table, turned

    def _add_load(self, i: int, rows: tuple[int, int], amount: Floats) -> None:
        if rows[1] > rows[0]:
            self.loads[i][rows] = self.loads[i][rows] + amount if rows in self.loads[i] else amount

    def _remove_node(self, i: int) -> None:
        self.alive[i] = False
        self.tables_of[i], self.loads[i] = {}, {}

    def _restrict(self, i: int, allowed: np.ndarray | None) -> None:
        if allowed is None or allowed.all():
            return
        allowed = self.done.one(allowed)
        if not allowed.any():
            if self.by_memory:
                raise DoesNotFit(f"No state of node {i} leaves the others enough memory.")
            raise ProblemError(f"No state of node {i} is allowed by what its neighbours may be.")
        self.cost[i], self.kept[i] = (
            self.done(operator.getitem, values, allowed) for values in (self.cost[i], self.kept[i])
        )
        self.loads[i] = {rows: amount[allowed] for rows, amount in self.loads[i].items()}
        self.nodes[i] = None
        for j in self.tables_of[i]:
            self._set_table(i, j, self.done(operator.getitem, self.tables_of[i][j], allowed))
            self.edges[i, j] = None
