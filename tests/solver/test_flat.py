import numpy as np
import pytest

from gshard.solver.flat import Flat
from random_problems import random_problem


@pytest.mark.parametrize("seed", range(40))
def test_flat_says_what_the_problem_says(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    flat, states = Flat(problem), rng.integers(0, problem.states)
    assert flat.value(states) == problem.value(states)
    np.testing.assert_array_equal(flat.usage(states), problem.usage(states))
    given = flat.given(states)
    prices = rng.random(len(problem.moments))
    priced = flat.priced(prices)
    for i, size in enumerate(problem.states):
        np.testing.assert_array_equal(flat.given_at(i, states), given[flat.first[i] : flat.first[i + 1]])
        for s in range(size):
            other = states.copy()
            other[i] = s
            edges = [t[other[u], other[v]] for (u, v), t in zip(problem.ends, problem.tables) if i in (u, v)]
            assert given[flat.first[i] + s] == problem.costs[i][s] + sum(edges)
            held = [
                load.bytes[s] * prices[a:b].sum() for load, (a, b) in zip(problem.loads, problem.rows) if load.node == i
            ]
            np.testing.assert_allclose(priced[flat.first[i] + s], problem.costs[i][s] + sum(held), rtol=1e-12)
    for moment in range(len(problem.moments)):
        of, held, first = flat.bytes_at(moment)
        now = np.unique(first + states[flat.owner[of]])
        assert held[now].sum() == problem.usage(states)[moment]
