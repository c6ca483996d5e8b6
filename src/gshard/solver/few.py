"""Solves a problem again with only the few most promising states of each node, which takes a small part of the time.

A round of messages goes through all entries of all tables. If nodes have hundreds of states, nearly all of these are in
no good solution, and the tables of the states that messages rank first are smaller by orders of magnitude. Many rounds
over these states cost less than one round over all, and find better solutions.

States are ranked in two ways: by the messages from all neighbours, and by their cost if all neighbours keep the states
of the best solution so far. The best solution is always included, so the result costs no more.
"""

from __future__ import annotations

import numpy as np

from gshard.solver.descent import Descent
from gshard.solver.exact import exact
from gshard.solver.flat import ragged
from gshard.solver.problem import Ints, Problem
from gshard.solver.reduce import reduce

FEW = 12  # states of each node and ranking; with so few, ``reduce`` still compares all pairs
LARGE = 1_000_000  # entries above which a round takes longer than all rounds over a few states
_ROUNDS = 8  # rounds of messages over the few states
_ENOUGH = 1e-4  # of the cost: a smaller gap over the few states is not worth another round


def entries(problem: Problem) -> int:
    """The entries of all tables.

    >>> entries(Problem.of([[0, 3], [1, 0, 2]], [(0, 1, [[0, 9, 1], [9, 0, 1]])]))
    6
    """
    return sum(table.size for table in problem.tables)


def best_of_few(descent: Descent) -> bool:
    """Offers the best states among the most promising few to a search. True if the best solution improves."""
    if descent.states is None:
        return False
    flat, problem = descent.flat, descent.flat.problem
    rank, best = ragged(flat.size), flat.first[:-1] + descent.states
    chosen = np.zeros(flat.cost.size, dtype=bool)
    chosen[best] = True
    for values in (descent.messages.belief, flat.given(descent.states)):
        order = np.lexsort((values, flat.owner))
        chosen[order[rank < FEW]] = True
    kept = np.split(rank[chosen], np.cumsum(np.add.reduceat(chosen.astype(np.int64), flat.first[:-1]))[:-1])
    reduced = reduce(
        Problem(
            costs=tuple(cost[node_states] for cost, node_states in zip(problem.costs, kept)),
            ends=problem.ends,
            tables=tuple(
                table[np.ix_(kept[u], kept[v])] for table, (u, v) in zip(problem.tables, problem.ends.tolist())
            ),
        )
    )
    start = [int(np.searchsorted(node_states, state)) for node_states, state in zip(kept, descent.states.tolist())]
    solution = _solved(reduced.problem, reduced.lower(start))
    if solution is None:
        return False
    return descent.offer(
        np.array([node_states[k] for node_states, k in zip(kept, reduced.lift(solution).tolist())], dtype=np.int64)
    )


def _solved(problem: Problem, begin: Ints) -> Ints | None:
    """Good states of a small problem, starting from some states; None if no allowed states were found."""
    if found := exact(problem):
        return found[0]
    inner = Descent(problem, 0)
    inner.offer(begin)
    for _ in range(_ROUNDS):
        inner.round()
        if inner.value - inner.prices.bound <= _ENOUGH * inner.value:
            break
    return inner.states
