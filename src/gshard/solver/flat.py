"""Stores a problem in long vectors, so that NumPy processes all nodes at once.

The states of all nodes stand one after the other: node i has ``first[i]:first[i + 1]``. The cost of a state at an edge,
given the state of the other node, is one entry of the tables, whose index is computed.

    >>> flat = Flat(Problem.of([[0, 3], [1, 0]], [(0, 1, [[0, 9], [8, 0]])]))
    >>> flat.given(np.array([0, 1])).tolist()       # node 0 if node 1 is in state 1, node 1 if node 0 is in state 0
    [9.0, 3.0, 1.0, 9.0]
"""

from __future__ import annotations

import numpy as np

from gshard.solver.problem import Floats, Ints, Problem, accumulated, offsets

PADDING = 10_000  # padding entries of a batch: about as expensive as one more batch
LARGE = 256  # entries of a table above which tables are copied one by one
BATCH = 40_000  # entries of a batch of several edges, so that it stays in the processor's cache
HELD = 256  # moments whose bytes are kept, because repairs return to the same ones


class Flat:
    """The arrays of a problem."""

    def __init__(self, problem: Problem):
        self.problem = problem  # the problem
        self.limit = np.inf if problem.limit is None else problem.limit  # bytes; ``inf`` without a limit
        self.size = problem.states  # int64 [nodes], the number of states
        self.first = problem.first  # int64 [nodes + 1], the index of each node's first state
        self.owner = np.repeat(np.arange(self.size.size), self.size)  # int64 [all states], the node of each state
        self.cost = problem.cost  # float64 [all states]
        u, v = problem.ends[:, 0], problem.ends[:, 1]
        # table: float64, all tables, row by row, equal ones once; table_first: int64 [edges], where each table begins
        self.table_first, self.table = problem.table_first, problem.table
        self._sides(u, v)
        self._loads()

    def _sides(self, u: Ints, v: Ints) -> None:
        """For each state of each end of each edge: its entry for state 0 of the other end, and the step to the next."""
        node, other = np.concatenate([u, v]), np.concatenate([v, u])
        begin = np.concatenate([self.table_first] * 2)
        row = np.concatenate([self.size[v], np.ones_like(v)])  # from a state to the next of the same end
        step = np.concatenate([np.ones_like(u), self.size[v]])  # to the next of the other end
        order = np.argsort(node, kind="stable")
        node, other, begin, row, step = node[order], other[order], begin[order], row[order], step[order]
        count = self.size[node]
        state = ragged(count)
        self._target = np.repeat(self.first[node], count) + state
        self._entry = np.repeat(begin, count) + state * np.repeat(row, count)
        self._step, self._other = np.repeat(step, count), np.repeat(other, count)
        edges = np.bincount(node, minlength=self.size.size)
        self.neighbours_first = offsets(edges)
        self.neighbours = other
        self._side_first = offsets(edges * self.size)

    def _loads(self) -> None:
        loads, rows = self.problem.loads, self.problem.rows
        node = np.array([load.node for load in loads], dtype=np.int64)
        order = np.argsort(node, kind="stable")
        self._held: dict[int, tuple[Ints, Floats, Ints]] = {}
        self.load_node, self.load_rows = node[order], rows[order]
        self.load_first = offsets(np.bincount(node, minlength=self.size.size))
        self.bytes = np.concatenate([np.zeros(0), *(loads[k].bytes for k in order.tolist())])
        count = self.size[self.load_node]
        self._bytes_first = offsets(count)
        self._bytes_load = np.repeat(np.arange(count.size), count)
        self._bytes_target = self.first[self.load_node][self._bytes_load] + ragged(count)

    def given(self, states: Ints) -> Floats:
        """float64 [all states]: the cost of each state of each node, given the states of its neighbours."""
        entries = self.table[self._entry + self._step * states[self._other]]
        return self.cost + np.bincount(self._target, entries, self.cost.size)

    def given_at(self, node: int, states: Ints) -> Floats:
        """float64 [states of the node]: as ``given``, for one node."""
        part = slice(self._side_first[node], self._side_first[node + 1])
        entries = self.table[self._entry[part] + self._step[part] * states[self._other[part]]]
        return self.cost[self.first[node] : self.first[node + 1]] + entries.reshape(-1, self.size[node]).sum(0)

    def given_outside(self, costs: Floats, states: Ints, inside: np.ndarray) -> Floats:
        """As ``given`` with other costs, for nodes ``inside`` and without the edges between two of them."""
        counts = inside[self.owner[self._target]] & ~inside[self._other]
        entries = self.table[self._entry[counts] + self._step[counts] * states[self._other[counts]]]
        return costs + np.bincount(self._target[counts], entries, self.cost.size)

    def value(self, states: Ints) -> float:
        return self.problem.value(states)

    def usage(self, states: Ints) -> Floats:
        """float64 [moments]: the bytes at each moment."""
        amounts = self.bytes[self._bytes_first[:-1] + states[self.load_node]]
        return accumulated(self.load_rows, amounts, len(self.problem.moments))

    def bytes_of(self, node: int) -> Floats:
        """float64 [loads of the node, its states]."""
        a, b = self.load_first[node], self.load_first[node + 1]
        return self.bytes[self._bytes_first[a] : self._bytes_first[b]].reshape(b - a, self.size[node])

    def bytes_at(self, moment: int) -> tuple[Ints, Floats, Ints]:
        """The memory at a moment, for all states of the nodes that hold some."""
        if moment not in self._held:
            if len(self._held) >= HELD:
                self._held.clear()
            loads = (self.load_rows[:, 0] <= moment) & (moment < self.load_rows[:, 1])
            is_alive = loads[self._bytes_load]
            total: Floats = np.bincount(self._bytes_target[is_alive], self.bytes[is_alive], self.cost.size).astype(
                np.float64
            )
            nodes = np.unique(self.load_node[loads])
            count = self.size[nodes]
            states = np.repeat(self.first[nodes], count) + ragged(count)
            self._held[moment] = states, total[states], np.repeat(np.cumsum(count) - count, count)
        return self._held[moment]

    def priced(self, prices: Floats) -> Floats:
        """float64 [all states]: the costs plus the bytes of each state at the price of a byte at each moment."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        weight = total[self.load_rows[:, 1]] - total[self.load_rows[:, 0]]
        return self.cost + np.bincount(self._bytes_target, self.bytes * weight[self._bytes_load], self.cost.size)

    def padded(self, edges: Ints, a: Ints, b: Ints) -> tuple[Floats, Ints, Ints, Ints, Ints]:
        """Tables of edges between nodes ``a`` and ``b``, padded to one shape by repeating the last state of a node."""
        rows, columns = np.arange(int(self.size[a].max())), np.arange(int(self.size[b].max()))
        row, column = (np.minimum(some, self.size[x][:, None] - 1) for some, x in ((rows, a), (columns, b)))
        if rows.size * columns.size >= LARGE:
            tables = self._large(edges, a, rows.size, columns.size)
        else:
            swap = self.problem.ends[edges, 0] != a
            row_step, column_step = np.where(swap, 1, self.size[b]), np.where(swap, self.size[a], 1)
            entry = (self.table_first[edges] + row.T * row_step)[:, :, None] + column * column_step[:, None]
            tables = self.table[entry]
        states_a, states_b = self.first[a][:, None] + row, self.first[b][:, None] + column
        end = self.cost.size
        into_a = np.where(rows < self.size[a][:, None], states_a, end)
        into_b = np.where(columns < self.size[b][:, None], states_b, end)
        return tables, states_a, states_b, into_a, into_b

    def _large(self, edges: Ints, a: Ints, rows: int, columns: int) -> Floats:
        """The tables of ``padded``, copied one after the other."""
        tables = np.empty((rows, edges.size, columns))
        for k, edge in enumerate(edges.tolist()):
            u, v = self.problem.ends[edge]
            first, size = self.table_first[edge], (self.size[u], self.size[v])
            table = self.table[first : first + size[0] * size[1]].reshape(size)
            table = table if u == a[k] else table.T
            height, width = table.shape
            tables[:height, k, :width] = table
            tables[:height, k, width:] = table[:, -1:]
            tables[height:, k] = tables[height - 1, k]
        return tables

    def best(self, values: Floats) -> Ints:
        """int64 [nodes]: the cheapest state of each node, the first of equals."""
        least = np.repeat(np.minimum.reduceat(values, self.first[:-1]), self.size) if values.size else values
        at = np.flatnonzero(values == least)
        return at[np.unique(self.owner[at], return_index=True)[1]] - self.first[:-1]


def least(tables: Floats, costs: Floats) -> Floats:
    """float64 [edges, states of b]: the minimum of tables plus costs over the states of a.

    Args:
        tables: float64 [states of a, edges, states of b], from ``Flat.padded``.
        costs: float64 [edges, states of a].
    """
    return (costs.T[:, :, None] + tables).min(0)  # type: ignore[no-any-return]


def grouped(level: Ints, a: Ints, b: Ints) -> list[Ints]:
    """Groups edges by level, then by the shape of their tables as long as padding stays small; highest level first."""
    groups: list[Ints] = []
    order = np.lexsort((b, a, np.maximum(a, b), level))[::-1]
    levels, rows, columns = level[order].tolist(), a[order].tolist(), b[order].tolist()
    begin, most_a, most_b, used = 0, 0, 0, 0
    for k in range(order.size):
        area = rows[k] * columns[k]
        new_a, new_b, new_used = max(most_a, rows[k]), max(most_b, columns[k]), used + area
        padded = (k + 1 - begin) * new_a * new_b
        if k > begin and (padded - new_used > PADDING or padded > BATCH or levels[k] != levels[begin]):
            groups.append(order[begin:k])
            begin, new_a, new_b, new_used = k, rows[k], columns[k], area
        most_a, most_b, used = new_a, new_b, new_used
    return [*groups, order[begin:]] if order.size else []


def ragged(counts: Ints) -> Ints:
    """int64 [sum]: 0, 1, ... for each count, one after the other: [2, 3] gives 0 1 0 1 2."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - counts, counts)
