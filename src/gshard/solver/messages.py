"""Messages: passes messages between nodes (TRW-S), which rank states and give a lower bound.

Sequential tree-reweighted message passing (TRW-S; Kolmogorov, Convergent Tree-Reweighted Message Passing for Energy
Minimization, PAMI 2006). Nodes have an order. A sweep goes through them in it, or against it; each node sums its
cost and what its neighbours sent, and sends on to those that come later the least it can cost them, by each of their
states. The bound never falls from sweep to sweep as long as costs do not change.

Nodes that are not neighbours can be processed together. Here a node stands in the level after the
last of its earlier neighbours, and all edges into a level are one numpy operation, or few: tables of unlike shapes
are padded by states that repeat the last one, which changes no minimum.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gshard.solver.flat import Flat, grouped, least
from gshard.solver.problem import Floats, Ints

ROUNDING = 1e-11  # by which a bound is lowered, of the numbers that it is the sum of


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Edges into one level. The last axis is the edge; a is the state of the earlier end, b of the later.

    Attributes:
        tables: [a, b, edges].
        early, late: the nodes, [edges].
        early_states, late_states: where their states stand, [a, edges] and [b, edges]; padding repeats the last.
        early_into, late_into: the same, padding pointing behind all states.
        to_early, to_late: the messages, by the states of their receiver.
        early_share, late_share: of its sum, what a node gives each edge in a sweep.
    """

    tables: Floats
    early: Ints
    late: Ints
    early_states: Ints
    late_states: Ints
    early_into: Ints
    late_into: Ints
    to_early: Floats
    to_late: Floats
    early_share: Floats
    late_share: Floats


class Messages:
    """The messages of a problem, between sweeps.

    Args:
        flat: the problem; each state must be allowed by some state of every neighbour, as ``reduce`` leaves it.
        rank: int [nodes], the order. One at random has few levels, however long the ways through the problem are.

    Attributes:
        belief: float64 [all states], after a sweep: the cost of each state and what all neighbours sent.
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
            self.batches[level[v[0]]].append(
                Batch(tables, u, v, a, b, into_a, into_b, *to, self.share[u], self.share[v])
            )
            at = end
        self.nodes: list[list[tuple[Ints, Ints]]] = [[] for _ in range(self.levels)]
        for nodes in grouped(level, flat.size, np.ones_like(flat.size)):
            states = np.arange(int(flat.size[nodes].max()))[:, None]
            self.nodes[level[nodes[0]]].append((nodes, flat.first[nodes] + np.minimum(states, flat.size[nodes] - 1)))
        self.belief = flat.cost

    def sums(self, costs: Floats) -> Floats:
        """float64 [all states + 1]: the cost of each state and all messages to it."""
        return np.append(costs, 0.0) + np.bincount(self.into, self.sent, costs.size + 1)

    def sweep(self, costs: Floats, forward: bool, choose: bool = False) -> tuple[float, Ints]:
        """One sweep.

        Args:
            costs: float64 [all states], of the nodes; they may change from sweep to sweep.
            forward: in the order, or against it.
            choose: also choose states on the way, each by the choices of the neighbours before it and the messages of
                those after it.

        Returns:
            the bound for these costs, and the states (all 0 if not asked for).
        """
        flat, belief = self.flat, self.sums(costs)
        chosen = np.zeros(flat.size.size, dtype=np.int64)
        apart = np.append(costs, 0.0) * 0.0 if choose else None  # what choices say where messages say otherwise
        sent = np.zeros(2)  # sum, and sum of magnitudes
        levels = range(self.levels) if forward else range(self.levels - 1, -1, -1)
        for level in levels:
            if forward:
                for batch in self.batches[level]:
                    self._send(batch, belief, True, sent)
                    if apart is not None:
                        told = batch.tables[chosen[batch.early], :, np.arange(batch.early.size)].T - batch.to_late
                        np.add.at(apart, batch.late_into.ravel(), told.ravel())
            if apart is not None:
                for nodes, states in self.nodes[level]:
                    chosen[nodes] = (belief[states] + apart[states]).argmin(0)
            if not forward:
                for batch in self.batches[level]:
                    self._send(batch, belief, False, sent)
                    if apart is not None:
                        told = batch.tables[:, chosen[batch.late], np.arange(batch.late.size)] - batch.to_early
                        np.add.at(apart, batch.early_into.ravel(), told.ravel())
        self.belief = belief[:-1]
        least = np.minimum.reduceat(belief[:-1], flat.first[:-1]) if costs.size else costs
        own = least * (1.0 - self.share * (self._later if forward else self._earlier))
        bound = own.sum() + sent[0]
        return float(bound - ROUNDING * (np.abs(own).sum() + sent[1])), chosen

    def _send(self, batch: Batch, belief: Floats, forward: bool, sent: Floats) -> None:
        """New messages along the edges of a batch, and what they change in the sums of their receivers."""
        if forward:
            out = belief[batch.early_states] * batch.early_share - batch.to_early
            new = least(batch.tables, out, 0)
            old, into = batch.to_late, batch.late_into
        else:
            out = belief[batch.late_states] * batch.late_share - batch.to_late
            new = least(batch.tables, out, 1)
            old, into = batch.to_early, batch.early_into
        lowest = new.min(0)
        new = new - lowest
        sent += lowest.sum(), np.abs(lowest).sum()
        np.add.at(belief, into.ravel(), (new - old).ravel())
        old[...] = new


def _levels(rank: Ints, early: Ints, late: Ints) -> Ints:
    """Of each node, the length of the longest way to it along edges in the order."""
    level = np.zeros(rank.size, dtype=np.int64)
    while True:  # a round for each level
        new = level.copy()
        np.maximum.at(new, late, level[early] + 1)
        if (new == level).all():
            return level
        level = new
