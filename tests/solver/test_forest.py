import numpy as np
import pytest

from gshard.solver.flat import Flat
from gshard.solver.forest import Forest
from gshard.solver.problem import Problem
from random_problems import exhaustive, random_problem


def rest_fixed(problem, states, inside):
    """The problem with all nodes that are not inside held in their states."""
    costs = [
        c if inside[i] else np.where(np.arange(c.size) == states[i], c, np.inf) for i, c in enumerate(problem.costs)
    ]
    return Problem.of(costs, [(int(u), int(v), t) for (u, v), t in zip(problem.ends, problem.tables)])


@pytest.mark.parametrize("seed", range(100))
def test_what_is_inside_is_the_best_given_the_rest(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, memory=False, density=0.6, forbidden=0.0 if seed % 2 else 0.1)
    flat, states = Flat(problem), rng.integers(0, problem.states)
    forest = Forest(flat, rng)
    found = forest.improve(flat.cost, states)
    assert (found[~forest.inside] == states[~forest.inside]).all()
    best = exhaustive(rest_fixed(problem, states, forest.inside))
    assert problem.value(found) == best or not np.isfinite(best)
    assert best <= problem.value(states)
