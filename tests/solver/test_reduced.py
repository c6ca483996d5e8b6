import numpy as np
import pytest

from gshard.solver.problem import ProblemError
from gshard.solver.reduce import reduce
from random_problems import exhaustive, exhaustive_alternatives, random_problem


@pytest.mark.parametrize("seed", range(100))
def test_alternatives_of_the_smaller_problem_are_lifted_to_lower_bounds(seed):
    problem = random_problem(np.random.default_rng(seed), memory=seed % 2 == 0)
    try:
        small = reduce(problem)
    except ProblemError:
        return
    lifted = small.lift_alternatives(exhaustive_alternatives(small.problem), exhaustive(small.problem))
    for found, true in zip(lifted, exhaustive_alternatives(problem), strict=True):
        assert (found <= true).all()
        assert found.min() == true.min()  # that of the best state is exact
