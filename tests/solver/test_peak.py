import itertools

import numpy as np
import pytest

from gshard.solver.problem import ProblemError
from gshard.solver.solve import least_peak
from random_problems import random_problem


@pytest.mark.parametrize("seed", range(60))
def test_the_least_peak_is_bounded_and_mostly_found(seed):
    problem = random_problem(np.random.default_rng(seed), nodes=6)
    everything = itertools.product(*(range(s) for s in problem.states))
    best = min((problem.peak(x) for x in everything if np.isfinite(problem.value(x))), default=np.inf)
    try:
        states, bound = least_peak(problem, seed=0)
    except ProblemError:
        assert best == np.inf
        return
    assert bound <= best
    if states is not None:
        assert np.isfinite(problem.value(states))
        assert problem.peak(states) >= best
        assert problem.peak(states) <= 1.3 * best + 1
