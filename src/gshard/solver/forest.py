"""Chooses the states of many nodes (a forest) again at once, exactly, while the others keep theirs.

A random set of nodes that form no cycle among themselves, to which no node can be added; dynamic programming from
its leaves to its roots and back. Where messages agree about everything but ties, this settles the ties; where single
changes are stuck, it goes on (Hamze and de Freitas, From Fields to Trees, UAI 2004).
"""

from __future__ import annotations

import numpy as np

from gshard.solver.flat import Flat, grouped, least
from gshard.solver.problem import Floats, Ints


class Forest:
    """One random maximal induced forest of a problem.

    Attributes:
        inside: bool [nodes].
    """

    def __init__(self, flat: Flat, generator: np.random.Generator):
        self.flat = flat
        self.inside = _induced_forest(flat, generator)
        ends = flat.problem.ends
        edges = np.flatnonzero(self.inside[ends].all(1))
        round_, child, parent = _peeled(ends[edges], flat.size.size)
        groups = grouped(-round_, flat.size[child], flat.size[parent])  # leaves first
        self._groups = [(edges[g], child[g], parent[g]) for g in groups]

    def improve(self, costs: Floats, states: Ints) -> Ints:
        """The best states of the nodes inside, those of the others given; never worse where what is given is allowed.

        Args:
            costs: float64 [all states], of nodes.
            states: of all nodes.
        """
        flat = self.flat
        belief = np.append(flat.given_outside(costs, states, self.inside), 0.0)
        sums = []
        for edges, child, parent in self._groups:
            tables, a, b, _, into = flat.padded(edges, child, parent)
            np.add.at(belief, into.ravel(), least(tables, belief[a], 0).ravel())
            sums.append((tables, a, child, parent))
        found = np.where(self.inside, flat.best(belief[:-1]), states)
        for tables, a, child, parent in reversed(sums):
            found[child] = (belief[a] + tables[:, found[parent], np.arange(child.size)]).argmin(0)
        return found


def _induced_forest(flat: Flat, generator: np.random.Generator) -> np.ndarray:
    """Nodes in random order, each taken unless two of its neighbours are in one tree already."""
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
    """Of each edge of a forest: the round in which it is taken off with a leaf, the leaf, and the other end."""
    round_, child, parent = (np.zeros(len(ends), dtype=np.int64) for _ in range(3))
    left, number = np.arange(len(ends)), 0
    while left.size:
        u, v = ends[left, 0], ends[left, 1]
        leaf = np.bincount(ends[left].ravel(), minlength=nodes) == 1
        off = leaf[u] | leaf[v]
        taken = left[off]
        child[taken] = np.where(leaf[u], u, v)[off]
        parent[taken] = np.where(leaf[u], v, u)[off]
        round_[taken] = number
        left, number = left[~off], number + 1
    return round_, child, parent
