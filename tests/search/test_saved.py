import numpy as np
import pytest

from gshard.search.saved import load_problem, save_problem
from gshard.solver.problem import Problem
from random_problems import random_problem


@pytest.mark.parametrize("seed", range(10))
def test_a_saved_problem_is_read_as_it_was(seed, tmp_path):
    problem = random_problem(np.random.default_rng(seed), memory=seed % 2 == 0)
    problem = Problem.of(
        problem.costs,
        [(int(u), int(v), t) for (u, v), t in zip(problem.ends, problem.tables)],
        problem.loads,
        problem.limit,
        [f"n{i}" for i in range(len(problem.costs))],
    )
    save_problem(problem, tmp_path / "saved")
    again = load_problem(tmp_path / "saved")
    assert str(again) == str(problem)
    assert again.names == problem.names
    assert again.limit == problem.limit
    for a, b in zip([*problem.costs, *problem.tables], [*again.costs, *again.tables], strict=True):
        np.testing.assert_array_equal(a, b)
    for x, y in zip(problem.loads, again.loads, strict=True):
        assert x[:3] == y[:3]
        np.testing.assert_array_equal(x.bytes, y.bytes)


def test_an_empty_problem_can_be_saved(tmp_path):
    save_problem(Problem.of([]), tmp_path / "empty")
    assert load_problem(tmp_path / "empty").value([]) == 0
