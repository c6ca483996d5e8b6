import dataclasses
import sys

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_matrix

from gshard.solver.descent import Descent
from gshard.solver.problem import Problem, ProblemError
from gshard.solver.solve import least_peak, solve
from random_problems import exhaustive, layered, random_problem


@pytest.mark.parametrize("seed", range(300))
@pytest.mark.one_in(3)
def test_it_is_the_exhaustive_optimum(seed):
    problem = random_problem(np.random.default_rng(seed), nodes=7, memory=seed % 3 != 0)
    best = exhaustive(problem)
    try:
        found = solve(problem)
    except ProblemError:
        assert exhaustive(dataclasses.replace(problem, limit=None)) == np.inf
        return
    assert found.fits == np.isfinite(best)
    if found.fits:
        assert found.value == problem.value(found.states) == best
        assert (found.bound, found.gap, found.peak) == (best, 0, problem.peak(found.states))


def highs(problem):
    """The optimum by an integer program: a column for each state of a node and each pair of states of an edge."""
    first = np.concatenate([[0], np.cumsum(problem.states)])
    cost = list(np.concatenate(problem.costs))
    rows, columns, values, lower, upper = [], [], [], [], []

    def row(entries, low, high):
        for column, value in entries:
            rows.append(len(lower)), columns.append(column), values.append(value)
        lower.append(low), upper.append(high)

    for i, size in enumerate(problem.states):
        row([(first[i] + s, 1) for s in range(size)], 1, 1)
    bound = [1.0 if np.isfinite(c) else 0.0 for c in cost]
    for (u, v), table in zip(problem.ends, problem.tables):
        at = len(cost) + np.arange(table.size).reshape(table.shape)
        cost += table.ravel().tolist()
        bound += [1.0 if np.isfinite(c) else 0.0 for c in table.ravel()]
        for s in range(table.shape[0]):
            row([(k, 1) for k in at[s]] + [(first[u] + s, -1)], 0, 0)
        for s in range(table.shape[1]):
            row([(k, 1) for k in at[:, s]] + [(first[v] + s, -1)], 0, 0)
    for moment in range(len(problem.moments) if problem.limit is not None else 0):
        alive = [load for load, (a, b) in zip(problem.loads, problem.rows) if a <= moment < b]
        row([(first[load.node] + s, x) for load in alive for s, x in enumerate(load.bytes)], -np.inf, problem.limit)
    matrix = coo_matrix((values, (rows, columns)), (len(lower), len(cost))).tocsr()
    result = milp(
        np.where(np.isfinite(cost), cost, 0.0),
        integrality=(np.arange(len(cost)) < first[-1]).astype(int),
        bounds=(0, np.array(bound)),
        constraints=LinearConstraint(matrix, lower, upper),
        options={"mip_rel_gap": 1e-6, "time_limit": 60},
    )
    return result.fun if result.status == 0 else np.inf


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.one_in(3)
def test_highs_finds_nothing_better(seed):
    problem = layered(seed, memory=seed % 2 == 0)
    best, found = highs(problem), solve(problem)
    assert found.fits
    assert found.bound <= best + 1e-6
    assert best - 1e-6 <= found.value <= 1.001 * best


def test_larger_problems_are_solved_with_a_small_gap():
    for seed in range(3):
        problem = layered(seed, layers=30, width=6, states=6, room=1.0)
        found = solve(problem, effort=0.1)
        assert found.fits
        assert 0 < found.bound <= found.value
        assert found.gap < 0.05


def test_a_start_is_never_beaten_by_the_answer():
    problem = layered(1, layers=8)
    good = solve(problem)
    again = solve(problem, 0.0, start=[np.zeros(len(problem.costs), dtype=int), good.states])
    assert again.value <= good.value
    assert again.bound <= good.value


def test_an_interrupt_gives_the_best_so_far(monkeypatch):
    problem, rounds, run = layered(2, layers=20, width=6), [], Descent.round

    def stop(descent):
        rounds.append(descent)
        if len(rounds) == 9:
            raise KeyboardInterrupt
        return run(descent)

    monkeypatch.setattr(Descent, "round", stop)
    found = solve(problem)
    assert found.interrupted
    assert found.fits
    assert found.bound <= found.value


def test_an_interrupt_before_there_is_anything_is_one(monkeypatch):
    def interrupt(problem):
        raise KeyboardInterrupt

    problem = layered(2)
    states = solve(problem).states
    # By the module itself: gshard.search is the function, for attributes.
    monkeypatch.setattr(sys.modules[solve.__module__], "reduce", interrupt)
    with pytest.raises(KeyboardInterrupt):
        solve(problem)
    assert solve(problem, start=[states]).value == problem.value(states)


def test_time_is_kept():
    problem = layered(3, layers=40, width=8, states=8)
    found = solve(problem, 0.3, tolerance=0.0, effort=np.inf)
    more = solve(problem, 1.5, tolerance=0.0, effort=np.inf)
    assert found.fits
    assert more.fits
    assert more.steps > found.steps


def test_where_nothing_fits_the_least_peak_is_told():
    loads = [(0, 0, 4, [80, 60]), (1, 2, 6, [50, 40]), (2, 3, 5, [7, 0])]
    problem = Problem.of([[0, 9], [0, 9], [0, 9]], loads=loads, limit=90)
    found = solve(problem)
    assert not found.fits
    assert (found.gap, found.peak) == (1, 100)
    assert solve(Problem.of(problem.costs, loads=loads, limit=100)).value == 27


def test_what_hardly_fits_is_found():
    for seed in range(10):
        problem = layered(seed, layers=6)
        peak = problem.peak(least_peak(problem))
        assert solve(dataclasses.replace(problem, limit=1.02 * peak)).fits
        nothing = solve(dataclasses.replace(problem, limit=0.5 * peak))
        assert not nothing.fits
        assert nothing.peak <= 1.05 * peak


def test_where_memory_is_all_that_counts():
    problem = layered(0, layers=10)
    free = dataclasses.replace(
        problem,
        costs=tuple(np.zeros_like(cost) for cost in problem.costs),
        tables=tuple(np.where(np.isfinite(table), 0.0, np.inf) for table in problem.tables),
        limit=1.05 * problem.peak(least_peak(problem)),
    )
    found = solve(free)
    assert found.fits
    assert found.value == found.gap == 0


@pytest.mark.parametrize("given", [[], [[5.0]], [[1.0, 0.5]] * 3])
def test_the_smallest_problems(given):
    found = solve(Problem.of(given))
    assert found.value == sum(min(c) for c in given)
    assert found.fits
    assert found.gap == 0
