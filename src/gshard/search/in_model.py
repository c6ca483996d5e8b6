"""In model: prices a plan in the simplified model that has a bound.

A search solves a problem whose costs simplify the full price (``device.cost``): it leaves out that collectives share
messages, which kernels are fused once everything is placed, and copies that the compiler makes. So its bound says
nothing of a full price. To tell how near a plan is to the best, the plan is priced in the same problem: every value and
equation in the state that the plan gives it, and what a plan leaves open (copies at loops, shared windows) in the best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gshard.core.plan import Plan
from gshard.core.sharding import Sharding
from gshard.planning.graph import Graph
from gshard.solver.problem import ProblemError
from gshard.solver.solve import solve

_EFFORT = 0.1


def in_model(graph: Graph, plan: Plan) -> float | None:
    """Seconds that a plan takes in a problem; None if the problem has no such plan.

    Args:
        graph: the problem, of the program that was searched.
        plan: of the same program.
    """
    chosen = _states_of(graph, plan)
    if chosen is None:
        return None
    costs = list(graph.problem.costs)
    for node, state in chosen.items():
        costs[node] = np.where(np.arange(costs[node].size) == state, costs[node], np.inf)
    try:
        found = solve(dataclasses.replace(graph.problem, costs=tuple(costs), limit=None), effort=_EFFORT)
    except ProblemError:
        return None
    return found.value if np.isfinite(found.value) else None


def _states_of(graph: Graph, plan: Plan) -> dict[int, int] | None:
    """The states of all nodes that a plan says something of, by node."""
    if plan.program.block is not graph.program.block or plan.rings:
        return None
    chosen: dict[int, int] = {}

    def take(node: int, states: Sequence[Any], wanted: Any) -> bool:
        if wanted not in states:
            return False
        state = list(states).index(wanted)
        return chosen.setdefault(node, state) == state

    def read(given: Mapping[Any, Sharding], v: Any) -> Sharding:
        return given.get(v, plan.shardings[v])

    said = all(take(k, graph.states[k], plan.shardings[v]) for v, k in graph.groups.of.items())
    said = said and all(
        take(node, states, read(plan.shared_reshards, v)) for v, (node, states) in graph.shared_reshards.items()
    )
    said = said and all(take(node, states, read(plan.leaves, v)) for v, (node, states) in graph.leaves.items())
    for (e, component), (node, ways) in graph.strategies.items():
        own = {f: atoms for f, atoms in plan.splits.get(e, {}).items() if f in component.factors and atoms}
        bare = [{f: atoms for f, atoms in way.items() if atoms} for way in ways]
        said = said and take(node, bare, own)
    return chosen if said else None
