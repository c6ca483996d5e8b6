import numpy as np
import pytest

from gshard.solver.messages import Flat, grouped, ragged
from random_problems import random_problem


@pytest.mark.parametrize("seed", range(40))
def test_flat_says_what_the_problem_says(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    flat, states = Flat(problem), rng.integers(0, problem.states)
    assert flat.value(states) == problem.value(states)
    np.testing.assert_array_equal(flat.usage(states), problem.usage(states))
    given = flat.given(states)
    prices = rng.random(len(problem.moments))
    priced = flat.priced(prices)
    for i, size in enumerate(problem.states):
        np.testing.assert_array_equal(flat.given_at(i, states), given[flat.first[i] : flat.first[i + 1]])
        for s in range(size):
            other = states.copy()
            other[i] = s
            edges = [t[other[u], other[v]] for (u, v), t in zip(problem.ends, problem.tables) if i in (u, v)]
            assert given[flat.first[i] + s] == problem.costs[i][s] + sum(edges)
            held = [
                load.bytes[s] * prices[a:b].sum() for load, (a, b) in zip(problem.loads, problem.rows) if load.node == i
            ]
            np.testing.assert_allclose(priced[flat.first[i] + s], problem.costs[i][s] + sum(held), rtol=1e-12)
    for moment in range(len(problem.moments)):
        of, held, first = flat.bytes_at(moment)
        now = np.unique(first + states[flat.owner[of]])
        assert held[now].sum() == problem.usage(states)[moment]


@pytest.mark.parametrize("seed", range(20))
def test_given_outside_leaves_out_what_is_inside(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    flat, states = Flat(problem), rng.integers(0, problem.states)
    inside = rng.random(len(problem.costs)) < 0.5
    found = flat.given_outside(flat.cost, states, inside)
    for i in np.flatnonzero(inside):
        for s in range(problem.states[i]):
            total = problem.costs[i][s]
            for (u, v), table in zip(problem.ends, problem.tables):
                if u == i and not inside[v]:
                    total += table[s, states[v]]
                if v == i and not inside[u]:
                    total += table[states[u], s]
            assert found[flat.first[i] + s] == total


def test_padded_tables_repeat_the_last_state():
    for seed in range(20):
        problem = random_problem(np.random.default_rng(seed), density=1.0, memory=False)
        if not problem.tables:
            continue
        flat = Flat(problem)
        swap = np.arange(len(problem.tables)) % 2 == 0
        a = np.where(swap, problem.ends[:, 1], problem.ends[:, 0])
        b = np.where(swap, problem.ends[:, 0], problem.ends[:, 1])
        tables, of_a, _, into_a, _ = flat.padded(np.arange(len(problem.tables)), a, b)
        for e, table in enumerate(problem.tables):
            oriented = table.T if swap[e] else table
            rows, columns = oriented.shape
            np.testing.assert_array_equal(tables[:rows, e, :columns], oriented)
            assert (tables[rows:, e, :columns] == oriented[-1]).all()
            assert (tables[:, e, columns:] == tables[:, e, columns - 1 : columns]).all()
            assert (into_a[e, :rows] == of_a[e, :rows]).all()
            assert (into_a[e, rows:] == flat.cost.size).all()


def test_groups_hold_every_edge_once_and_one_level_each():
    rng = np.random.default_rng(0)
    level, a, b = rng.integers(0, 5, 500), rng.integers(1, 40, 500), rng.integers(1, 40, 500)
    groups = grouped(level, a, b)
    assert sorted(np.concatenate(groups).tolist()) == list(range(500))
    assert all(len(set(level[g])) == 1 for g in groups)
    order = [int(level[g[0]]) for g in groups]
    assert order == sorted(order, reverse=True)
    assert len(groups) < 60
    assert grouped(level[:0], a[:0], b[:0]) == []


def test_ragged():
    assert ragged(np.array([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert ragged(np.array([], dtype=np.int64)).tolist() == []
