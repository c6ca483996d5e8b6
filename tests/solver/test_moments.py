import numpy as np
import pytest

from gshard.solver.moments import fullest_moments
from random_problems import random_problem


@pytest.mark.parametrize("seed", range(100))
def test_the_peak_of_what_is_left_is_the_peak(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, nodes=4)
    spans = [(load.node, tuple(row), load.bytes) for load, row in zip(problem.loads, problem.rows.tolist())]
    left = fullest_moments(spans, len(problem.moments))
    assert len(left) <= len(problem.moments)
    for _ in range(20):
        usage = problem.usage(rng.integers(0, problem.states))
        if usage.size:
            assert usage[left].max() == usage.max()
