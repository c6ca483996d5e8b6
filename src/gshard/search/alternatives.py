"""Alternatives: other shardings of a value in a searched plan, and what forcing one of them costs.

The messages of a solution bound from below what each state of each node costs (``Solution.alternatives``). For the few
alternatives that are printed, the problem is solved again with nothing else allowed. Where that ends with a proof, the
cost is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from gshard.core.program import Value
from gshard.core.sharding import Sharding
from gshard.planning.graph import Graph
from gshard.solver.problem import Ints, ProblemError
from gshard.solver.solve import Solution, solve

_SHOWN = 4  # of each value, those that cost least
_EFFORT = 0.1  # for solving again
_PROVEN = 1e-4  # a gap that is none to the digits that are shown
_TRIES, _ENTRIES = 16, 5e6  # how often, at most, and entries of tables of all that is solved again


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another sharding of a value than the one that was found.

    Attributes:
        sharding: as text.
        seconds: how much longer a call takes with it, in the model, whatever else is chosen; ``inf`` where nothing was
            found that is allowed.
        proven: whether that is what it takes; else it takes at least that.
    """

    sharding: str
    seconds: float
    proven: bool = False

    def __str__(self) -> str:
        if not np.isfinite(self.seconds):
            return f"{self.sharding}: no"
        return f"{self.sharding}: {'' if self.proven else 'at least '}+{self.seconds * 1e3:.3g} ms"


def tries(solution: Solution) -> Iterator[int]:
    """As many numbers as solutions may be looked for again."""
    entries = sum(table.size for table in solution.problem.tables)
    return iter(range(int(min(_TRIES, _ENTRIES // max(entries, 1)))))


def alternatives(
    graph: Graph, solution: Solution, v: Value, chosen: Sharding, budget: Iterator[int]
) -> list[Alternative]:
    """What else a value could be, the cheapest first.

    Args:
        graph: what there is to choose from.
        solution: of its problem.
        v: the value.
        chosen: its sharding, which is left out.
        budget: one is taken for each time that the problem is solved again.
    """
    k = graph.groups.of[v]
    more = np.maximum(solution.alternatives(k) - solution.bound, 0.0)
    states = [i for i, s in enumerate(graph.states[k]) if s != chosen]
    texts = {i: graph.states[k][i].format(graph.mesh, v.shape, v.dtype_name) for i in states}
    rows = []
    for i in sorted(states, key=lambda i: (more[i], texts[i]))[:_SHOWN]:
        seconds, proven = float(more[i]), False
        if np.isfinite(seconds) and next(budget, None) is not None:
            again = _with_state(solution, k, i)
            proven = again.gap <= _PROVEN
            seconds = max(seconds, again.value - solution.value if proven else again.bound - solution.value)
        rows.append(Alternative(texts[i], seconds, proven))
    return sorted(rows, key=lambda row: (row.seconds, row.sharding))


@dataclasses.dataclass(frozen=True, eq=False)
class SearchChoice:
    """What a search chose, and from what, as ``explanation.value_costs`` compares it.

    Attributes:
        graph: the problem.
        solution: of it.
        counted: the unit of its costs, in words.
    """

    graph: Graph
    solution: Solution
    counted: str

    @property
    def states(self) -> Ints:
        """int64 [nodes], those that were chosen."""
        return self.solution.states

    @property
    def cost(self) -> float:
        """What they cost."""
        return self.solution.value

    def tied_to(self, node: int) -> list[int]:
        """The node itself: a search plans each layer by itself."""
        return [node]

    def with_state(self, node: int, state: int) -> Ints | None:
        """The states that cost least where a node has this one; None if none were found that fit."""
        if self.states[node] == state:
            return self.states
        try:
            found = _with_state(self.solution, node, state)
        except ProblemError:
            return None
        return found.states if found.fits else None


def _with_state(solution: Solution, node: int, state: int) -> Solution:
    """The best that can be found with one state of a node."""
    costs = list(solution.problem.costs)
    costs[node] = np.where(np.arange(costs[node].size) == state, costs[node], np.inf)
    return solve(dataclasses.replace(solution.problem, costs=tuple(costs)), effort=_EFFORT)
