import numpy as np
import pytest

from gshard.solver.descent import Forest
from gshard.solver.messages import Flat
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


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_maximal_induced_forest(seed):
    rng = np.random.default_rng(seed)
    n = 40
    pairs = {tuple(sorted(p)) for p in rng.integers(0, n, (70, 2)).tolist() if p[0] != p[1]}
    problem = Problem.of([[0, 1]] * n, [(u, v, rng.random((2, 2))) for u, v in sorted(pairs)])
    inside = Forest(Flat(problem), rng).inside

    def acyclic(nodes):
        left = [p for p in pairs if nodes[p[0]] and nodes[p[1]]]
        degree = {}
        while left:
            degree = {i: sum(i in p for p in left) for p in left for i in p}
            fewer = [p for p in left if degree[p[0]] > 1 and degree[p[1]] > 1]
            if len(fewer) == len(left):
                return False
            left = fewer
        return True

    assert acyclic(inside)
    for i in np.flatnonzero(~inside):
        assert not acyclic(inside | (np.arange(n) == i))
