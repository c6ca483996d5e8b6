"""Rest: enumerates the states that can still be in a better solution, once the bound is close.

With most states at least costs more than the best that was found: they are in nothing better. Where messages nearly
agree, few nodes are left with more than one state, and of these the best is found exactly.
"""

from __future__ import annotations

import numpy as np

from gshard.solver.descent import Descent
from gshard.solver.exact import exact
from gshard.solver.problem import Ints, Problem
from gshard.solver.reduce import reduce


def best_of_rest(descent: Descent, tolerance: float) -> Ints | None:
    """States than which no others are better, or None if too much is left to be chosen.

    Args:
        descent: a search that has found states of a problem without a limit of memory.
        tolerance: a part of the value: what is above the best by no more is not taken as worse.
    """
    flat, found = descent.flat, descent.states
    assert found is not None
    best, problem, sent = found.copy(), flat.problem, descent.messages.sent.copy()
    left = np.concatenate(descent.alternatives()) <= descent.value * (1 + tolerance)
    descent.messages.sent[:] = sent
    left[flat.first[:-1] + best] = True
    inside = np.add.reduceat(left.astype(np.int64), flat.first[:-1]) > 1
    nodes, edges = np.flatnonzero(inside), np.flatnonzero(inside[problem.ends].all(1))
    states = {i: np.flatnonzero(left[flat.first[i] : flat.first[i + 1]]) for i in nodes.tolist()}
    given, ends = flat.given_outside(flat.cost, best, inside), problem.ends[edges]
    rest = reduce(
        Problem(
            costs=tuple(given[flat.first[i] + own] for i, own in states.items()),
            ends=np.searchsorted(nodes, ends),
            tables=tuple(problem.tables[k][np.ix_(states[u], states[v])] for k, (u, v) in zip(edges, ends.tolist())),
        )
    )
    chosen = exact(rest.problem)
    if not chosen:
        return None
    for (i, own), state in zip(states.items(), rest.lift(chosen[0]).tolist()):
        best[i] = own[state]
    return best
