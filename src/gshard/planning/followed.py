"""Solves a planning problem with every value in its propagated sharding.

If a problem is too large for an exact solution, messages may end far from its best states. The plan that follows the
marks is never far from the best, and the rest of its problem is small: reshards and splits depend on few values each.
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

_ROUNDS = 3  # rounds of messages, if the rest of the problem is too large for an exact solution


def followed(graph: Graph, propagated: Propagated, small: Reduced) -> Ints | None:
    """The cheapest states of a reduced problem in which values have their propagated shardings."""
    state_of_group: dict[int, int] = {}
    for group_index, (group, states) in enumerate(zip(graph.groups.members, graph.states, strict=True)):
        wanted = {propagated.shardings[v] for v in group if v in propagated.shardings}
        if (state := next((i for i, s in enumerate(states) if s in wanted), None)) is not None:
            state_of_group[group_index] = state
    costs = []
    for node, kept, cost in zip(small.nodes, small.kept, small.problem.costs, strict=False):
        is_propagated = kept == state_of_group.get(node, -1)
        costs.append(np.where(is_propagated, cost, np.inf) if is_propagated.any() else cost)
    costs += small.problem.costs[len(costs) :]
    try:
        rest = reduce(dataclasses.replace(small.problem, costs=tuple(costs)))
    except ProblemError:  # a mark inside of the program allows none of them
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
