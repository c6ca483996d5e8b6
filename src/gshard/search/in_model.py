"""Prices a plan in the simplified model that has a bound.

A search solves a problem whose costs simplify the full price (``device.cost``). The model leaves out that collectives
share messages, the fusion of kernels once everything is placed, and copies that the compiler makes. So its bound says
nothing about the full price. To compare a plan with the bound, gshard prices the plan in the same problem: every value
and equation has the state of the plan, and everything that a plan leaves open (copies at loops, shared windows) is
chosen best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gshard.core.plan import Plan
from gshard.planning.graph import Graph
from gshard.solver.problem import ProblemError
from gshard.solver.solve import solve

_EFFORT = 0.1


def in_model(graph: Graph, plan: Plan) -> float | None:
    """The seconds of a plan in a problem; None if the problem has no such plan."""
    chosen = _states_of(graph, plan)
    if chosen is None:
        return None
    try:
        found = solve(dataclasses.replace(graph.problem.restricted(chosen), limit=None), effort=_EFFORT)
    except ProblemError:
        return None
    return found.value if np.isfinite(found.value) else None


def _states_of(graph: Graph, plan: Plan) -> dict[int, int] | None:
    """The states of all nodes that a plan decides, by node; None if the problem lacks one of them."""
    if plan.program.block is not graph.program.block or plan.rings:
        return None
    chosen: dict[int, int] = {}

    def choose(node: int, states: Sequence[Any], wanted: Any) -> bool:
        """Chooses the wanted state of a node. False if it is not a state, or contradicts an earlier choice."""
        if wanted not in states:
            return False
        state = list(states).index(wanted)
        return chosen.setdefault(node, state) == state

    for v, group in graph.groups.of.items():
        if not choose(group, graph.states[group], plan.shardings[v]):
            return None
    for v, (node, states) in graph.shared_reshards.items():
        if not choose(node, states, plan.shared_reshards.get(v, plan.shardings[v])):
            return None
    for v, (node, states) in graph.leaves.items():
        if not choose(node, states, plan.leaves.get(v, plan.shardings[v])):
            return None
    for (e, component), (node, splits) in graph.strategies.items():
        split = {f: atoms for f, atoms in plan.splits.get(e, {}).items() if f in component.factors and atoms}
        without_empty = [{f: atoms for f, atoms in other.items() if atoms} for other in splits]
        if not choose(node, without_empty, split):
            return None
    return chosen
