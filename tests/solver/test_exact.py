import numpy as np
import pytest

from gshard.solver.problem import Problem
from gshard.solver.solve import exact
from random_problems import exhaustive, random_problem


@pytest.mark.parametrize("seed", range(200))
def test_it_is_the_optimum(seed):
    problem = random_problem(np.random.default_rng(seed), memory=seed % 2 == 0)
    best, found = exhaustive(problem), exact(problem)
    assert found is not None
    if np.isinf(best):
        assert found == []
    else:
        assert problem.fits(found[0])
        assert problem.value(found[0]) == best


def test_a_long_ladder_is_eliminated_and_a_dense_graph_is_too_much():
    rng = np.random.default_rng(0)
    ladder = [(i, i + k, rng.integers(0, 99, (5, 5))) for i in range(98) for k in (1, 2)]
    (found,) = exact(Problem.of([rng.integers(0, 99, 5) for _ in range(100)], ladder))
    assert found.shape == (100,)
    dense = [(i, j, rng.random((9, 9))) for i in range(20) for j in range(i)]
    assert exact(Problem.of([rng.random(9)] * 20, dense)) is None
    assert exact(Problem.of([[0, 1]] * 30, loads=[(i, 0, 1, [1, 2]) for i in range(30)], limit=40)) is None
