"""The search of a problem, and bounds that do not change it."""

import numpy as np
import pytest

from gshard.solver.descent import Descent
from gshard.solver.problem import Problem
from gshard.solver.reduce import reduce
from random_problems import layered


def problem_of(seed: int) -> Problem:
    return reduce(layered(seed, layers=8, width=5, memory=False)).problem


@pytest.mark.parametrize("seed", range(8))
def test_a_bound_ahead_is_that_of_as_many_rounds_and_changes_none(seed):
    problem = problem_of(seed)
    plain, looking = Descent(problem, 0), Descent(problem, 0)
    for _ in range(3):
        ahead = looking.bound_ahead(np.inf, 2)
        assert looking.bound_ahead(np.inf, 2) == ahead
        plain.round()
        looking.round()
        assert (looking.prices.bound, looking.value) == (plain.prices.bound, plain.value)
        np.testing.assert_array_equal(looking.states, plain.states)
    assert Descent(problem, 0).bound_ahead(np.inf, 3) == plain.prices.bound


def test_it_ends_with_the_first_bound_that_is_enough():
    rising = [seed for seed in range(20) if len(set(bounds_of(problem_of(seed)))) == 3]
    assert rising
    for seed in rising:
        first, second, last = bounds_of(problem_of(seed))
        search = Descent(problem_of(seed), 0)
        assert search.bound_ahead(first, 6) == first
        assert search.bound_ahead((first + second) / 2, 6) == second
        assert search.bound_ahead(2 * last, 3) == last < 2 * last


def bounds_of(problem: Problem) -> list[float]:
    return [Descent(problem, 0).bound_ahead(np.inf, rounds) for rounds in (1, 2, 3)]
