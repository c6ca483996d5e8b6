import numpy as np
import pytest

from gshard.solver.problem import Problem, ProblemError
from gshard.solver.reduce import _Work, reduce
from random_problems import exhaustive, random_problem


@pytest.mark.parametrize("seed", range(300))
def test_the_optimum_stays_and_is_lifted(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, memory=seed % 2 == 0)
    best = exhaustive(problem)
    try:
        small = reduce(problem)
    except ProblemError:
        assert best == np.inf
        return
    assert exhaustive(small.problem) == best
    sizes = small.problem.states
    for _ in range(10):
        states = rng.integers(0, sizes)
        value = small.problem.value(states)
        if np.isfinite(value):
            lifted = small.lift(states)
            assert problem.value(lifted) == value
            if small.problem.fits(states):
                assert problem.fits(lifted)
    assert len(small.problem.tables) <= len(problem.tables)


RULES = ["settle", "fewer_loads", "fewer_states"]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_alone_keeps_the_optimum_and_does_something(rule):
    fewer = 0
    for seed in range(100):
        problem = random_problem(np.random.default_rng(seed))
        best = exhaustive(problem)
        try:
            work = _Work(problem)
            getattr(work, rule)()
        except ProblemError:
            assert best == np.inf
            continue
        small = work.result()
        assert exhaustive(small.problem) == best
        before, after = problem, small.problem
        fewer += after.states.sum() < before.states.sum() or len(after.loads) < len(before.loads)
    assert fewer > 30


def test_a_chain_of_functions_becomes_one_node_with_all_their_loads():
    same = np.where(np.eye(3, dtype=bool), 0, np.inf)
    problem = Problem.of(
        [[0, 1, 2]] * 5,
        [(i, i + 1, same) for i in range(4)],
        [(i, i, i + 3, [9 - i, 5, 1 + i]) for i in range(5)],
        limit=17,
    )
    small = reduce(problem)
    assert len(small.problem.costs) <= 2
    assert exhaustive(small.problem) == exhaustive(problem)


def test_what_is_contradictory_is_an_error_that_names_the_node():
    never = [[np.inf, np.inf], [np.inf, np.inf]]
    with pytest.raises(ProblemError, match=r"second|first"):
        reduce(Problem.of([[0, 0], [0, 0]], [(0, 1, never)], names=["first", "second"]))
    with pytest.raises(ProblemError, match="node 0"):
        reduce(Problem.of([[np.inf]]))


def test_starts_are_lowered_to_the_same_solution():
    kept = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, memory=False, forbidden=0.0)
        small = reduce(problem)
        states = small.lift(rng.integers(0, small.problem.states))
        kept += problem.value(small.lift(small.lower(states))) == problem.value(states)
    assert kept == 60
