import numpy as np
import pytest

from gshard.core.errors import GShardError
from gshard.solver.problem import Load, Problem, ProblemError
from random_problems import random_problem


@pytest.mark.parametrize("seed", range(40))
def test_value_and_peak_are_what_they_say(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    states = rng.integers(0, problem.states)
    value = sum(cost[s] for cost, s in zip(problem.costs, states))
    value += sum(table[states[u], states[v]] for (u, v), table in zip(problem.ends, problem.tables))
    assert problem.value(states) == value
    used = [
        sum(load.bytes[states[load.node]] for load in problem.loads if load.start <= t < load.end) for t in range(20)
    ]
    assert problem.peak(states) == max(used)
    assert problem.usage(states).tolist() == [used[t] for t in problem.moments]


def test_moments_are_local_maxima_of_what_is_alive():
    one = [1.0]
    problem = Problem.of([one] * 4, (), [(0, 0, 10, one), (1, 2, 5, one), (2, 3, 5, one), (3, 5, 6, one)], limit=9)
    assert problem.moments.tolist() == [3, 5]
    assert problem.rows.tolist() == [[0, 2], [0, 1], [0, 1], [1, 2]]


def test_parallel_edges_are_added_and_self_edges_are_costs():
    table = np.arange(6.0).reshape(2, 3)
    problem = Problem.of([[1, 2], [0, 0, 0]], [(0, 1, table), (1, 0, 10 * table.T), (0, 0, [[5, 99], [99, 7]])])
    assert problem.costs[0].tolist() == [6, 9]
    np.testing.assert_array_equal(problem.tables[0], 11 * table)
    assert problem.ends.tolist() == [[0, 1]]


def test_an_empty_problem_is_one():
    problem = Problem.of([])
    assert problem.value([]) == problem.peak([]) == 0
    assert "0 nodes" in str(problem)


BAD = [
    (dict(costs=[[]]), "shape"),
    (dict(costs=[[np.nan]]), "NaN"),
    (dict(costs=[[-1.0]]), "below zero"),
    (dict(costs=[[0], [0, 0]], edges=[(0, 1, [[0], [0]])]), "table"),
    (dict(costs=[[0]], edges=[(0, 3, [[0]])]), "no node 3"),
    (dict(costs=[[0]], loads=[(0, 0, 1, [1, 2])]), "load"),
    (dict(costs=[[0]], loads=[(0, 0, 1, [0.5])]), "whole"),
    (dict(costs=[[0]], loads=[(0, 0, 1, [2.0**54])]), "larger units"),
    (dict(costs=[[0]], limit=-1.0), "limit"),
    (dict(costs=[[0]], names=["a", "b"]), "names"),
]


@pytest.mark.parametrize("given, message", BAD)
def test_what_is_wrong_is_said(given, message):
    with pytest.raises(ProblemError, match=message):
        Problem.of(**given)


def test_states_are_checked():
    problem = Problem.of([[0, 1]], names=["weights"])
    with pytest.raises(GShardError, match="weights"):
        problem.value([2])
    with pytest.raises(ProblemError, match="2 states"):
        problem.peak([0, 0])
    assert isinstance(Load(0, 0, 1, np.ones(1)), tuple)
