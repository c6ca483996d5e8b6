"""Makes a problem in which all nodes of a class have one state.

>>> import numpy as np
>>> p = Problem.of([[0, 3], [1, 0], [9, 9]], [(0, 1, [[0, 5], [5, 0]]), (1, 2, [[1, 2], [3, 4]])])
>>> small = tied(p, np.array([0, 0, 1]))
>>> [cost.tolist() for cost in small.costs], small.value([1, 0]) == p.value([1, 1, 0])
([[1.0, 3.0], [9.0, 9.0]], True)
"""

from __future__ import annotations

from collections import Counter

from gshard.solver.problem import Floats, Ints, Problem


def tied(problem: Problem, classes: Ints) -> Problem:
    """The problem with one node for each class. Its states ``s`` cost as much as ``s[classes]`` in the whole problem.

    Args:
        problem: a problem without loads.
        classes: int64 [nodes], numbers from 0; nodes of one class have equally many states.
    """
    costs: dict[int, Floats] = {}
    for group, cost in zip(classes.tolist(), problem.costs, strict=True):
        costs[group] = costs[group] + cost if group in costs else cost
    count_of: Counter[tuple[int, int, int]] = Counter()
    tables = {id(table): table for table in problem.tables}
    for (u, v), table in zip(classes[problem.ends].tolist(), problem.tables, strict=True):
        count_of[u, v, id(table)] += 1
    edges = [(u, v, times * tables[table_id]) for (u, v, table_id), times in count_of.items()]
    return Problem.of([costs[group] for group in range(len(costs))], edges)
