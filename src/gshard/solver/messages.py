"""Passes messages between nodes, which rank states and give a lower bound, on a problem in long vectors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gshard.solver.problem import Floats, Ints, Problem, accumulated, offsets

# Stores a problem in long vectors, so that NumPy processes all nodes at once.

PADDING = 10_000  # padding entries of a batch: about as expensive as one more batch
BATCH = 40_000  # entries of a batch of several edges, so that it stays in the processor's cache


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

    def usage(self, states: Ints) -> Floats:
        """float64 [moments]: the bytes at each moment."""
        amounts = self.bytes[self._bytes_first[:-1] + states[self.load_node]]
        return accumulated(self.load_rows, amounts, len(self.problem.moments))

    def bytes_of(self, node: int) -> Floats:
        """float64 [loads of the node, its states]."""
        a, b = self.load_first[node], self.load_first[node + 1]
        return self.bytes[self._bytes_first[a] : self._bytes_first[b]].reshape(b - a, self.size[node])

    def bytes_at(self, moment: int) -> tuple[Ints, Floats, Ints]:
        """The memory at a moment, for all states of the nodes that hold some.

        Returns:
            int64 [states], the indices of the states; float64 [states], their bytes; and int64 [states], where in these
            arrays the states of the same node begin.
        """
        loads = (self.load_rows[:, 0] <= moment) & (moment < self.load_rows[:, 1])
        is_alive = loads[self._bytes_load]
        total = np.bincount(self._bytes_target[is_alive], self.bytes[is_alive], self.cost.size)
        nodes = np.unique(self.load_node[loads])
        count = self.size[nodes]
        states = np.repeat(self.first[nodes], count) + ragged(count)
        return states, total[states].astype(np.float64), np.repeat(np.cumsum(count) - count, count)

    def priced(self, prices: Floats) -> Floats:
        """float64 [all states]: the costs plus the bytes of each state at the price of a byte at each moment."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        weight = total[self.load_rows[:, 1]] - total[self.load_rows[:, 0]]
        return self.cost + np.bincount(self._bytes_target, self.bytes * weight[self._bytes_load], self.cost.size)

    def padded(self, edges: Ints, a: Ints, b: Ints) -> tuple[Floats, Ints, Ints, Ints, Ints]:
        """Tables of edges between nodes ``a`` and ``b``, padded to one shape by repeating the last state of a node."""
        rows, columns = np.arange(int(self.size[a].max())), np.arange(int(self.size[b].max()))
        row, column = (np.minimum(some, self.size[x][:, None] - 1) for some, x in ((rows, a), (columns, b)))
        swap = self.problem.ends[edges, 0] != a
        row_step, column_step = np.where(swap, 1, self.size[b]), np.where(swap, self.size[a], 1)
        tables = self.table[(self.table_first[edges] + row.T * row_step)[:, :, None] + column * column_step[:, None]]
        states_a, states_b = self.first[a][:, None] + row, self.first[b][:, None] + column
        end = self.cost.size
        into_a = np.where(rows < self.size[a][:, None], states_a, end)
        into_b = np.where(columns < self.size[b][:, None], states_b, end)
        return tables, states_a, states_b, into_a, into_b

    def best(self, values: Floats) -> Ints:
        """int64 [nodes]: the cheapest state of each node, the first of equals."""
        least = np.repeat(np.minimum.reduceat(values, self.first[:-1]), self.size) if values.size else values
        at = np.flatnonzero(values == least)
        return at[np.unique(self.owner[at], return_index=True)[1]] - self.first[:-1]


def least(tables: Floats, costs: Floats) -> Floats:
    """float64 [edges, b]: the minimum over a of tables [a, edges, b] (``Flat.padded``) plus costs [edges, a]."""
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


ROUNDING = 1e-11  # by which a bound is lowered, relative to the magnitudes of its terms


class Side(NamedTuple):
    """One end of each edge of a batch."""

    nodes: Ints  # int64 [edges], the nodes
    states: Ints  # int64 [edges, states], indices of their states; padding repeats the last
    into: Ints  # the same, but padding points behind all states
    received: Floats  # float64 [edges, states], the messages to them
    share: Floats  # float64 [edges, 1], the share of a node's sum that it gives each edge in a sweep


class Batch(NamedTuple):
    """Edges into one level."""

    tables: Floats  # float64 [states of the earlier node, edges, states of the later node]
    turned: Floats  # the same with the later node first: numpy finds least entries fastest along the first axis
    early: Side
    late: Side


class Messages:
    """The messages of a problem, between sweeps in the order of ``rank`` (int [nodes]).

    Some state of every neighbour must allow each state, as ``reduce`` guarantees. A random order has few levels,
    however long the paths of the problem are.
    """

    def __init__(self, flat: Flat, rank: Ints):
        self.flat = flat
        ends = flat.problem.ends
        swap = rank[ends[:, 0]] > rank[ends[:, 1]]
        early, late = np.where(swap, ends[:, 1], ends[:, 0]), np.where(swap, ends[:, 0], ends[:, 1])
        level = _levels(rank, early, late)
        self.levels = int(level.max(initial=-1)) + 1
        n = flat.size.size
        self._later, self._earlier = np.bincount(early, minlength=n), np.bincount(late, minlength=n)
        self.share = 1.0 / np.maximum(1, np.maximum(self._later, self._earlier))
        groups = grouped(level[late], flat.size[early], flat.size[late])
        padded = [flat.padded(edges, early[edges], late[edges]) for edges in groups]
        self.sent = np.zeros(sum(states.size for _, a, b, _, _ in padded for states in (a, b)))
        self.into = np.concatenate([np.zeros(0, dtype=np.int64), *(x.ravel() for p in padded for x in p[3:])])
        self.batches: list[list[Batch]] = [[] for _ in range(self.levels)]
        at = 0
        for edges, (tables, a, b, into_a, into_b) in zip(groups, padded):
            middle, end = at + a.size, at + a.size + b.size
            u, v = early[edges], late[edges]
            of_u = Side(u, a, into_a, self.sent[at:middle].reshape(a.shape), self.share[u][:, None])
            of_v = Side(v, b, into_b, self.sent[middle:end].reshape(b.shape), self.share[v][:, None])
            self.batches[level[v[0]]].append(Batch(tables, np.ascontiguousarray(tables.T), of_u, of_v))
            at = end
        self.nodes: list[list[tuple[Ints, Ints]]] = [[] for _ in range(self.levels)]
        for nodes in grouped(level, flat.size, np.ones_like(flat.size)):
            states = np.arange(int(flat.size[nodes].max()))[:, None]
            self.nodes[level[nodes[0]]].append((nodes, flat.first[nodes] + np.minimum(states, flat.size[nodes] - 1)))

    def sums(self, costs: Floats) -> Floats:
        """float64 [all states + 1]: the cost of each state plus all messages to it."""
        return np.append(costs, 0.0) + np.bincount(self.into, self.sent, costs.size + 1)

    def sweep(self, costs: Floats, forward: bool, choose: bool = False) -> tuple[float, Ints]:
        """One sweep, in order or backwards, with costs (float64 [all states]) that may change from sweep to sweep.

        If ``choose``, it also chooses states, each by the choices of the neighbours visited before and the messages of
        those visited later.
        """
        flat, belief = self.flat, self.sums(costs)
        chosen = np.zeros(flat.size.size, dtype=np.int64)
        corrections = np.append(costs, 0.0) * 0.0  # corrections of messages by the choices so far
        sent = [0.0, 0.0]  # sum, and sum of magnitudes

        def send(level: int) -> None:
            """Updates the messages into a level, or from it backwards, and the sums of their receivers."""
            for batch in self.batches[level]:
                tables, sender, receiver = batch.tables, batch.early, batch.late
                if not forward:
                    tables, sender, receiver = batch.turned, batch.late, batch.early
                new = least(tables, belief[sender.states] * sender.share - sender.received)
                lowest = new.min(1)
                new -= lowest[:, None]
                sent[0] += lowest.sum()
                sent[1] += np.abs(lowest).sum()
                np.add.at(belief, receiver.into.ravel(), (new - receiver.received).ravel())
                receiver.received[...] = new
                if choose:
                    correction = tables[chosen[sender.nodes], np.arange(sender.nodes.size)] - new
                    np.add.at(corrections, receiver.into.ravel(), correction.ravel())

        def select(level: int) -> None:
            for nodes, states in self.nodes[level] if choose else ():
                chosen[nodes] = (belief[states] + corrections[states]).argmin(0)

        for level in range(self.levels) if forward else range(self.levels - 1, -1, -1):
            for work in (send, select) if forward else (select, send):
                work(level)
        best = np.minimum.reduceat(belief[:-1], flat.first[:-1]) if costs.size else costs
        node_terms = best * (1.0 - self.share * (self._later if forward else self._earlier))
        bound = node_terms.sum() + sent[0]
        return float(bound - ROUNDING * (np.abs(node_terms).sum() + sent[1])), chosen


def _levels(rank: Ints, early: Ints, late: Ints) -> Ints:
    """int64 [nodes]: the length of the longest path to each node along edges in order."""
    level = np.zeros(rank.size, dtype=np.int64)
    while True:  # a round for each level
        new = level.copy()
        np.maximum.at(new, late, level[early] + 1)
        if (new == level).all():
            return level
        level = new
