"""The search of a problem, and bounds that do not change it."""

import numpy as np
import pytest

from gshard.solver.descent import Descent
from gshard.solver.reduce import reduce
from random_problems import layered


def problem_of(seed):
    return reduce(layered(seed, layers=8, width=5, memory=False)).problem


@pytest.mark.parametrize("seed", range(8))
def test_a_bound_ahead_is_that_of_rounds_and_changes_none(seed):
    problem = problem_of(seed)
    plain, looking, bounds = Descent(problem, 0), Descent(problem, 0), [0.0]
    for _ in range(6):
        plain.round()
        looking.round()
        assert (looking.prices.bound, looking.value) == (plain.prices.bound, plain.value)
        np.testing.assert_array_equal(looking.states, plain.states)
        looking.bound_ahead(2 * plain.value, 3)
        bounds.append(plain.prices.bound)
    for k in range(1, 6):
        assert Descent(problem, 0).bound_ahead(bounds[k], k) == bounds[k]
        assert Descent(problem, 0).bound_ahead(bounds[1], k) == bounds[1]
        # What no round can reach: the first round after which the bound rises too slowly, or the last one.
        slow = (j for j in range(1, k) if bounds[j] + (k - j) * (bounds[j] - bounds[j - 1]) < 1.5 * bounds[k])
        assert Descent(problem, 0).bound_ahead(1.5 * bounds[k], k) == bounds[next(slow, k)]
