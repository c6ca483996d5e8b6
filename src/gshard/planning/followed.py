"""Followed: the best solution in which every value has its propagated sharding.

Where a problem is too large to be solved exactly, messages may stop far from its best states. The plan that follows the
marks is never far: what is left of the problem is small, since reshards and splits depend on few values each.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gshard.planning.graph import Graph
from gshard.planning.propagated import Propagated
from gshard.solver.descent import Descent
from gshard.solver.exact import exact
from gshard.solver.few import LARGE, best_of_few, entries
from gshard.solver.problem import Ints, ProblemError
from gshard.solver.reduce import reduce
from gshard.solver.reduced import Reduced

_ROUNDS = 3  # of messages, where what is left is too large to be solved exactly


def followed(graph: Graph, propagated: Propagated, small: Reduced) -> Ints | None:
    """States of a reduced problem in which values are sharded as propagation says, and all else costs least.

    Args:
        graph: the problem.
        propagated: what follows from the marks.
        small: the problem, reduced. Where a sharding is no longer among its states, all that are left are free.

    Returns:
        int64 [nodes of ``small.problem``]; None if that is not allowed.
    """
    known: dict[int, int] = {}
    for k, (group, states) in enumerate(zip(graph.groups.members, graph.states, strict=True)):
        wanted = {propagated.shardings[v] for v in group if v in propagated.shardings}
        if (state := next((i for i, s in enumerate(states) if s in wanted), None)) is not None:
            known[k] = state
    costs = []
    for node, kept, cost in zip(small.nodes, small.kept, small.problem.costs, strict=False):
        there = kept == known.get(node, -1)
        costs.append(np.where(there, cost, np.inf) if there.any() else cost)
    costs += small.problem.costs[len(costs) :]
    try:
        rest = reduce(dataclasses.replace(small.problem, costs=tuple(costs)))
    except ProblemError:  # a mark inside allows nothing of it
        return None
    if (chosen := exact(rest.problem)) is not None:
        return rest.lift(chosen[0]) if chosen else None
    descent = Descent(rest.problem, 0)
    is_large = entries(rest.problem) >= LARGE
    for _ in range(1 if is_large else _ROUNDS):
        descent.round()
    if is_large:
        best_of_few(descent)
    return None if descent.states is None else rest.lift(descent.states)
