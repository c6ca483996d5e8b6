"""Passes messages between nodes, which rank states and give a lower bound.

This is sequential tree-reweighted message passing (TRW-S; Kolmogorov, Convergent Tree-Reweighted Message Passing for
Energy Minimization, PAMI 2006). Nodes have an order. A sweep visits them in this order, or backwards. Each node adds
its cost and the messages from its neighbours, and sends to each later neighbour the least cost for each state of that
neighbour. While costs do not change, the bound never falls from sweep to sweep.

Nodes that are not neighbours can be processed together. A node is in the level after the last of its earlier
neighbours, and all edges into a level are one numpy operation, or a few: tables of different shapes are padded by
repeating the last state, which changes no minimum.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gshard.solver.flat import Flat, grouped, least
from gshard.solver.problem import Floats, Ints

ROUNDING = 1e-11  # by which a bound is lowered, relative to the magnitudes of its terms


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Edges into one level; a is the state of the earlier node, b that of the later."""

    tables: Floats  # float64 [a, edges, b]
    turned: Floats  # float64 [b, edges, a], the same: numpy finds least entries fastest along the first axis
    early: Ints  # early, late: int64 [edges], the nodes
    late: Ints
    # early_states, late_states: int64 [edges, a] and [edges, b], indices of their states; padding repeats the last
    early_states: Ints
    late_states: Ints
    early_into: Ints  # early_into, late_into: the same, but padding points behind all states
    late_into: Ints
    to_early: Floats  # to_early, to_late: float64, the messages, by the states of their receiver
    to_late: Floats
    # early_share, late_share: float64 [edges, 1], the share of a node's sum that it gives each edge in a sweep
    early_share: Floats
    late_share: Floats


class Messages:
    """The messages of a problem, between sweeps.

    Args:
        flat: the problem. Some state of every neighbour must allow each state, as ``reduce`` guarantees.
        rank: int [nodes], the order. A random order has few levels, however long the paths of the problem are.
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
            to = self.sent[at:middle].reshape(a.shape), self.sent[middle:end].reshape(b.shape)
            turned, shares = np.ascontiguousarray(tables.T), (self.share[u][:, None], self.share[v][:, None])
            self.batches[level[v[0]]].append(Batch(tables, turned, u, v, a, b, into_a, into_b, *to, *shares))
            at = end
        self.nodes: list[list[tuple[Ints, Ints]]] = [[] for _ in range(self.levels)]
        for nodes in grouped(level, flat.size, np.ones_like(flat.size)):
            states = np.arange(int(flat.size[nodes].max()))[:, None]
            self.nodes[level[nodes[0]]].append((nodes, flat.first[nodes] + np.minimum(states, flat.size[nodes] - 1)))
        # float64 [all states], after a sweep: the cost of each state plus the messages of all neighbours
        self.belief = flat.cost

    def sums(self, costs: Floats) -> Floats:
        """float64 [all states + 1]: the cost of each state plus all messages to it."""
        return np.append(costs, 0.0) + np.bincount(self.into, self.sent, costs.size + 1)

    def sweep(self, costs: Floats, forward: bool, choose: bool = False) -> tuple[float, Ints]:
        """One sweep.

        Args:
            costs: float64 [all states]. They may change from sweep to sweep.
            forward: visit nodes in order; otherwise backwards.
            choose: also choose states, each by the choices of the neighbours visited before and the messages of those
                visited later.
        """
        flat, belief = self.flat, self.sums(costs)
        chosen = np.zeros(flat.size.size, dtype=np.int64)
        corrections = np.append(costs, 0.0) * 0.0 if choose else None  # corrections of messages by the choices so far
        sent = [0.0, 0.0]  # sum, and sum of magnitudes
        levels = range(self.levels) if forward else range(self.levels - 1, -1, -1)
        for level in levels:
            if forward:
                for batch in self.batches[level]:
                    self._send(batch, belief, True, sent)
                    if corrections is not None:
                        correction = batch.tables[chosen[batch.early], np.arange(batch.early.size)] - batch.to_late
                        np.add.at(corrections, batch.late_into.ravel(), correction.ravel())
            if corrections is not None:
                for nodes, states in self.nodes[level]:
                    chosen[nodes] = (belief[states] + corrections[states]).argmin(0)
            if not forward:
                for batch in self.batches[level]:
                    self._send(batch, belief, False, sent)
                    if corrections is not None:
                        correction = batch.turned[chosen[batch.late], np.arange(batch.late.size)] - batch.to_early
                        np.add.at(corrections, batch.early_into.ravel(), correction.ravel())
        self.belief = belief[:-1]
        least = np.minimum.reduceat(belief[:-1], flat.first[:-1]) if costs.size else costs
        node_terms = least * (1.0 - self.share * (self._later if forward else self._earlier))
        bound = node_terms.sum() + sent[0]
        return float(bound - ROUNDING * (np.abs(node_terms).sum() + sent[1])), chosen

    def _send(self, batch: Batch, belief: Floats, forward: bool, sent: list[float]) -> None:
        """Updates the messages of a batch, and the sums of their receivers."""
        if forward:
            out = belief[batch.early_states] * batch.early_share - batch.to_early
            new = least(batch.tables, out)
            old, into = batch.to_late, batch.late_into
        else:
            out = belief[batch.late_states] * batch.late_share - batch.to_late
            new = least(batch.turned, out)
            old, into = batch.to_early, batch.early_into
        lowest = new.min(1)
        new = new - lowest[:, None]
        sent[0] += lowest.sum()
        sent[1] += np.abs(lowest).sum()
        np.add.at(belief, into.ravel(), (new - old).ravel())
        old[...] = new


def _levels(rank: Ints, early: Ints, late: Ints) -> Ints:
    """int64 [nodes]: the length of the longest path to each node along edges in order."""
    level = np.zeros(rank.size, dtype=np.int64)
    while True:  # a round for each level
        new = level.copy()
        np.maximum.at(new, late, level[early] + 1)
        if (new == level).all():
            return level
        level = new
