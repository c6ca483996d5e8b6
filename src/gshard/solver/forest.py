"""Chooses the states of many nodes (a forest) at once, exactly, while the others keep theirs.

The forest is a random maximal set of nodes without cycles among themselves. Dynamic programming runs from its leaves to
its roots and back. If messages agree except for ties, this resolves the ties; if changes of single nodes are stuck, it
improves further (Hamze and de Freitas, From Fields to Trees, UAI 2004).
"""

from __future__ import annotations

import numpy as np

from gshard.solver.flat import Flat, grouped, least
from gshard.solver.problem import Floats, Ints


class Forest:
    """A random maximal induced forest of a problem."""

    def __init__(self, flat: Flat, generator: np.random.Generator):
        self.flat = flat
        self.inside = _induced_forest(flat, generator)  # bool [nodes], the nodes of the forest
        ends = flat.problem.ends
        edges = np.flatnonzero(self.inside[ends].all(1))
        round_, child, parent = _peeled(ends[edges], flat.size.size)
        groups = grouped(-round_, flat.size[child], flat.size[parent])  # leaves first
        self._groups = [(edges[g], child[g], parent[g]) for g in groups]

    def improve(self, costs: Floats, states: Ints) -> Ints:
        """The best states of the nodes inside, given those of the others. No worse than allowed given states.

        Args:
            costs: float64 [all states], the costs of nodes.
            states: int64 [nodes], the present states.
        """
        flat = self.flat
        belief = np.append(flat.given_outside(costs, states, self.inside), 0.0)
        steps = []
        for edges, child, parent in self._groups:
            tables, a, b, _, into = flat.padded(edges, child, parent)
            np.add.at(belief, into.ravel(), least(tables, belief[a]).ravel())
            steps.append((tables, a, child, parent))
        best_states = np.where(self.inside, flat.best(belief[:-1]), states)
        for tables, a, child, parent in reversed(steps):
            best_states[child] = (belief[a] + tables[:, np.arange(child.size), best_states[parent]].T).argmin(1)
        return best_states


def _induced_forest(flat: Flat, generator: np.random.Generator) -> np.ndarray:
    """Adds nodes in random order, each unless two of its neighbours are in one tree already."""
    n = flat.size.size
    tree, inside = list(range(n)), [False] * n
    first, near = flat.neighbours_first.tolist(), flat.neighbours.tolist()
    for i in generator.permutation(n).tolist():
        roots = []
        for j in near[first[i] : first[i + 1]]:
            if inside[j]:
                while tree[j] != j:
                    tree[j] = tree[tree[j]]
                    j = tree[j]
                if j in roots:
                    break
                roots.append(j)
        else:
            inside[i] = True
            for root in roots:
                tree[root] = i
    return np.array(inside, dtype=bool)


def _peeled(ends: Ints, nodes: int) -> tuple[Ints, Ints, Ints]:
    """For each edge of a forest: the round in which it is removed with a leaf, the leaf, and the other node."""
    round_, child, parent = (np.zeros(len(ends), dtype=np.int64) for _ in range(3))
    remaining, round_index = np.arange(len(ends)), 0
    while remaining.size:
        u, v = ends[remaining, 0], ends[remaining, 1]
        leaf = np.bincount(ends[remaining].ravel(), minlength=nodes) == 1
        is_removed = leaf[u] | leaf[v]
        removed = remaining[is_removed]
        child[removed] = np.where(leaf[u], u, v)[is_removed]
        parent[removed] = np.where(leaf[u], v, u)[is_removed]
        round_[removed] = round_index
        remaining, round_index = remaining[~is_removed], round_index + 1
    return round_, child, parent
