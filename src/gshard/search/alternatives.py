"""Lists other shardings of a value than a searched plan has, and what each of them costs.

The messages of a solution bound the cost of each state of each node. For the few that are printed, gshard solves the
problem with only that state allowed; the cost is exact if the solver proves it optimal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from gshard.core.errors import ArgumentError
from gshard.core.number_text import significant
from gshard.core.program import Value
from gshard.core.sharding import Sharding
from gshard.planning.graph import Graph
from gshard.planning.layer_stacks import schedules_of
from gshard.search.find import Best
from gshard.solver.solve import Solution, solve

_SHOWN = 4  # the cheapest alternatives of a value
_EFFORT = 0.1  # of the solver, for each further solution
_PROVEN = 1e-4  # a gap that counts as none, to the printed digits
_TRIES, _ENTRIES = 16, 5e6  # limits on further solutions: their number, and the entries of all their tables


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another sharding of a value than that of the plan."""

    sharding: str  # the sharding as text
    # how much longer a call takes with it, in the model, with the best choices for everything else; ``inf`` if no
    # allowed solution was found
    seconds: float
    proven: bool = False  # whether ``seconds`` is exact; otherwise it is a lower bound

    def __str__(self) -> str:
        if not np.isfinite(self.seconds):
            return f"{self.sharding}: no"
        return f"{self.sharding}: {'' if self.proven else 'at least '}+{significant(self.seconds * 1e3, 3)} ms"


def tries(solution: Solution) -> Iterator[int]:
    """An iterator with one element for each further solution that the limits allow."""
    entries = sum(table.size for table in solution.problem.tables)
    return iter(range(int(min(_TRIES, _ENTRIES // max(entries, 1)))))


def alternatives(
    graph: Graph, solution: Solution, v: Value, chosen: Sharding, budget: Iterator[int]
) -> list[Alternative]:
    """The other shardings of a value, the cheapest first."""
    group = graph.groups.of[v]
    extra = np.maximum(solution.alternatives(group) - solution.bound, 0.0)
    states = [i for i, s in enumerate(graph.states[group]) if s != chosen]
    texts = {i: graph.states[group][i].format(graph.mesh, v.shape, v.dtype_name) for i in states}
    rows = []
    for i in sorted(states, key=lambda i: (extra[i], texts[i]))[:_SHOWN]:
        seconds, proven = float(extra[i]), False
        if np.isfinite(seconds) and next(budget, None) is not None:
            forced = _with_state(solution, group, i)
            proven = forced.gap <= _PROVEN
            seconds = max(seconds, forced.value - solution.value if proven else forced.bound - solution.value)
        rows.append(Alternative(texts[i], seconds, proven))
    return sorted(rows, key=lambda row: (row.seconds, row.sharding))


def _with_state(solution: Solution, node: int, state: int) -> Solution:
    """The best solution that the solver finds with this state of a node."""
    return solve(solution.problem.restricted({node: state}), effort=_EFFORT)


def text_of_alternatives(best: Best, values: Mapping[tuple[str, str], Sequence[tuple[Value, str]]]) -> list[str]:
    """Lists for values their shardings, others, and what these cost."""
    graph, solution, plan, rows = best.graph, best.solution, best.chosen.plan, list[str]()
    reason, hint = "the search ended before it solved the problem", "Search again with a larger budget_seconds."
    if graph is not None:
        reason = "the problem that was solved has another form of the program, without the plan's pipelines or rewrites"
        hint = "found.with_mark(...) searches again with one more mark."
    in_problem = graph is not None and all(v in graph.groups.of for named in values.values() for v, _ in named)
    if graph is None or solution is None or not in_problem or schedules_of(plan.program):
        what = f"what else was possible is not known: {reason}."
        raise ArgumentError(what, got=f"{best.chosen.name}, {best.seconds:.1f} s", hint=hint)
    budget = tries(solution)
    for (alike, text), named in values.items():
        v, name = named[0]
        others = alternatives(graph, solution, v, plan.shardings[v], budget)
        first = f"{alike}: {text}  x{len(named)}" if len(named) > 1 else f"{name}: {text}"
        rows.append("\n    instead ".join([first, *map(str, others)]))
    return rows
