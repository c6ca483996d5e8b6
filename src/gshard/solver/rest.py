"""Solves the rest of a problem exactly, once the bound is close to the best solution.

The lower bound of most states exceeds the value of the best solution, so no better solution contains them. If messages
nearly agree, few nodes have more than one state left, and ``exact`` finds the best of these.
"""

from __future__ import annotations

import numpy as np

from gshard.solver.descent import Descent
from gshard.solver.exact import exact
from gshard.solver.problem import Ints, Problem
from gshard.solver.reduce import reduce


def best_of_rest(descent: Descent, tolerance: float) -> Ints | None:
    """States that no others improve on; None if too many choices are left."""
    flat, found = descent.flat, descent.states
    assert found is not None
    best, problem, sent = found.copy(), flat.problem, descent.messages.sent.copy()
    possible = np.concatenate(descent.alternatives()) <= descent.value * (1 + tolerance)
    descent.messages.sent[:] = sent
    possible[flat.first[:-1] + best] = True
    has_choice = np.add.reduceat(possible.astype(np.int64), flat.first[:-1]) > 1
    nodes, edges = np.flatnonzero(has_choice), np.flatnonzero(has_choice[problem.ends].all(1))
    states = {i: np.flatnonzero(possible[flat.first[i] : flat.first[i + 1]]) for i in nodes.tolist()}
    given, ends = flat.given_outside(flat.cost, best, has_choice), problem.ends[edges]
    rest = reduce(
        Problem(
            costs=tuple(given[flat.first[i] + node_states] for i, node_states in states.items()),
            ends=np.searchsorted(nodes, ends),
            tables=tuple(problem.tables[k][np.ix_(states[u], states[v])] for k, (u, v) in zip(edges, ends.tolist())),
        )
    )
    chosen = exact(rest.problem)
    if not chosen:
        return None
    for (i, node_states), state in zip(states.items(), rest.lift(chosen[0]).tolist()):
        best[i] = node_states[state]
    return best
