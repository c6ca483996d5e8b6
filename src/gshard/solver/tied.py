"""Tied: a problem in which all nodes of a class have one state.

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
    """The problem of one node for each class: its states ``s`` cost what ``s[classes]`` cost in the whole problem.

    Args:
        problem: without loads.
        classes: int64 [nodes], numbers from 0; nodes of one class have as many states.
    """
    costs: dict[int, Floats] = {}
    for k, cost in zip(classes.tolist(), problem.costs, strict=True):
        costs[k] = costs[k] + cost if k in costs else cost
    often: Counter[tuple[int, int, int]] = Counter()
    tables = {id(table): table for table in problem.tables}
    for (u, v), table in zip(classes[problem.ends].tolist(), problem.tables, strict=True):
        often[u, v, id(table)] += 1
    edges = [(u, v, times * tables[which]) for (u, v, which), times in often.items()]
    return Problem.of([costs[k] for k in range(len(costs))], edges)
