"""Every choice: all that there is to choose from in a small program."""

import dataclasses
import itertools

import numpy as np

from gshard.solver.problem import ProblemError
from gshard.solver.solve import solve


def every_choice(graph):
    """The states of each plan: every combination of shardings that is allowed, with the splits that cost least."""
    for chosen in itertools.product(*(range(len(states)) for states in graph.states)):
        costs = list(graph.problem.costs)
        for k, state in enumerate(chosen):
            costs[k] = np.where(np.arange(costs[k].size) == state, costs[k], np.inf)
        try:
            yield solve(dataclasses.replace(graph.problem, costs=tuple(costs))).states
        except ProblemError:
            continue
