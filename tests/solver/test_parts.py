"""The parts of the solver, each against what it must compute or bound, on random problems."""

import itertools

import numpy as np
import pytest

from gshard.core.errors import GShardError
from gshard.solver.descent import Descent, Forest, Walk, paid
from gshard.solver.messages import Flat, Messages
from gshard.solver.problem import Load, Problem, ProblemError
from gshard.solver.reduce import _Work, reduce
from gshard.solver.solve import exact, least_peak
from random_problems import exhaustive, random_problem


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


BAD = [
    (dict(costs=[[]]), "shape"), (dict(costs=[[np.nan]]), "NaN"), (dict(costs=[[-1.0]]), "below zero"),
    (dict(costs=[[0], [0, 0]], edges=[(0, 1, [[0], [0]])]), "table"),
    (dict(costs=[[0]], edges=[(0, 3, [[0]])]), "no node 3"), (dict(costs=[[0]], loads=[(0, 0, 1, [1, 2])]), "load"),
    (dict(costs=[[0]], loads=[(0, 0, 1, [0.5])]), "whole"),
    (dict(costs=[[0]], loads=[(0, 0, 1, [2.0**54])]), "larger units"), (dict(costs=[[0]], limit=-1.0), "limit"),
]  # fmt: skip


@pytest.mark.parametrize("given, message", BAD)
def test_what_is_wrong_is_said(given, message):
    with pytest.raises(ProblemError, match=message):
        Problem.of(**given)


def test_states_are_checked():
    problem = Problem.of([[0, 1]])
    with pytest.raises(GShardError, match="Node 0"):
        problem.value([2])
    with pytest.raises(ProblemError, match="2 states"):
        problem.peak([0, 0])
    assert isinstance(Load(0, 0, 1, np.ones(1)), tuple)


@pytest.mark.parametrize("seed", range(60))
def test_the_least_peak_is_mostly_found(seed):
    problem = random_problem(np.random.default_rng(seed), nodes=6)
    everything = itertools.product(*(range(s) for s in problem.states))
    best = min((problem.peak(x) for x in everything if np.isfinite(problem.value(x))), default=np.inf)
    try:
        states = least_peak(problem)
    except ProblemError:
        assert best == np.inf
        return
    if states is not None:
        assert np.isfinite(problem.value(states))
        assert problem.peak(states) >= best
        assert problem.peak(states) <= 1.3 * best + 1


@pytest.mark.parametrize("seed", range(200))
def test_it_is_the_optimum(seed):
    problem = random_problem(np.random.default_rng(seed), memory=seed % 2 == 0)
    best, found = exhaustive(problem), exact(problem)
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


RULES = ["settle", "fewer_loads"]


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


def test_a_chain_of_functions_becomes_one_node_and_what_is_contradictory_names_it():
    same, never = np.where(np.eye(3, dtype=bool), 0, np.inf), np.full((2, 2), np.inf)
    loads = [(i, i, i + 3, [9 - i, 5, 1 + i]) for i in range(5)]
    problem = Problem.of([[0, 1, 2]] * 5, [(i, i + 1, same) for i in range(4)], loads, limit=17)
    small = reduce(problem)
    assert len(small.problem.costs) <= 2
    assert exhaustive(small.problem) == exhaustive(problem)
    with pytest.raises(ProblemError, match=r"node [01]"):
        reduce(Problem.of([[0, 0], [0, 0]], [(0, 1, never)]))
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


def rest_fixed(problem, states, inside):
    costs = [
        c if inside[i] else np.where(np.arange(c.size) == states[i], c, np.inf) for i, c in enumerate(problem.costs)
    ]
    return Problem.of(costs, [(int(u), int(v), t) for (u, v), t in zip(problem.ends, problem.tables)])


@pytest.mark.parametrize("seed", range(100))
def test_what_is_inside_is_the_best_given_the_rest(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, memory=False, density=0.6, forbidden=0.0 if seed % 2 else 0.1)
    flat, states = Flat(problem), rng.integers(0, problem.states)
    forest = Forest(flat, rng)
    found = forest.improve(flat.cost, states)
    assert (found[~forest.inside] == states[~forest.inside]).all()
    best = exhaustive(rest_fixed(problem, states, forest.inside))
    assert problem.value(found) == best or not np.isfinite(best)
    assert best <= problem.value(states)


def consistent(seed, **given):
    """A random problem whose states are all allowed by some state of each neighbour, not reduced further."""
    problem = random_problem(np.random.default_rng(seed), **given)
    work = _Work(problem)
    for _ in range(200):
        for i, near in enumerate(work.tables_of):
            for table in list(near.values()):
                ok = np.isfinite(table).any(1)
                if ok.size == work.cost[i].size:
                    work._restrict(i, ok)
    return work.result().problem


@pytest.mark.parametrize("seed", range(150))
def test_the_bound_is_below_the_optimum_and_never_falls(seed):
    try:
        problem = consistent(seed, memory=False, density=0.7)
    except ProblemError:
        return
    best, flat = exhaustive(problem), Flat(problem)
    messages = Messages(flat, np.random.default_rng(seed).permutation(len(problem.costs)))
    last = -np.inf
    for number in range(30):
        bound, _ = messages.sweep(flat.cost, forward=number % 2 == 0)
        assert bound <= best
        assert bound >= last - 1e-6
        last = bound


@pytest.mark.parametrize("seed", range(40))
def test_on_a_tree_bound_and_choice_are_exact(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 9))
    sizes = rng.integers(1, 5, n)
    edges = []
    for i in range(1, n):
        j = int(rng.integers(0, i))
        edges.append((j, i, rng.integers(0, 40, (sizes[j], sizes[i]))))
    problem = Problem.of([rng.integers(0, 50, s) for s in sizes], edges)
    flat = Flat(problem)
    messages = Messages(flat, rng.permutation(n))
    for _ in range(40):
        messages.sweep(flat.cost, forward=True)
        bound, states = messages.sweep(flat.cost, forward=False, choose=True)
    best = exhaustive(problem)
    assert bound == pytest.approx(best, abs=1e-6)
    assert problem.value(states) == best


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.one_in(3)
def test_the_bound_of_a_priced_problem_is_one_of_the_problem(seed):
    problem = random_problem(np.random.default_rng(seed), nodes=7, states=5)
    best = exhaustive(problem)
    try:
        descent = Descent(reduce(problem).problem)
    except ProblemError:
        return
    if not descent.flat.size.size:
        return
    for _ in range(12):
        descent.round()
        assert descent.prices.bound <= best
        if descent.states is not None:
            assert descent.value >= best


def test_a_full_memory_is_paid_for():
    assert paid(np.array([2.0, 3.0]), 4.0) == pytest.approx(20.0)
    assert paid(np.array([2.0, 3.0]), 4.0) > 20.0  # for rounding
    assert paid(np.zeros(2), np.inf) == 0.0


def allowed(problem, rng):
    for _ in range(50):
        states = rng.integers(0, problem.states)
        if np.isfinite(problem.value(states)):
            return states
    return None


def test_descent_is_to_a_place_where_no_single_change_helps_and_all_still_fits():
    moved = stuck = walks = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, nodes=8, forbidden=0.05)
        states = allowed(problem, rng)
        if states is None or not problem.fits(states):
            continue
        walk = Walk(Flat(problem), states)
        walk.descend(20)
        assert problem.fits(walk.states)
        value = problem.value(walk.states)
        assert value <= problem.value(states)
        moved += value < problem.value(states)
        single = []
        for i, size in enumerate(problem.states):
            for s in range(size):
                other = walk.states.copy()
                other[i] = s
                if problem.fits(other):
                    single.append(problem.value(other))
        stuck += min(single) >= value
        walks += 1
    assert moved > 20
    assert stuck >= 0.95 * walks  # not where memory became free after a node had been blocked


def test_repair_makes_things_fit_where_that_is_possible_by_single_changes():
    repaired = tried = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, nodes=8, forbidden=0.0, tight=0.6)
        states = allowed(problem, rng)
        if states is None or problem.fits(states):
            continue
        walk, tried = Walk(Flat(problem), states), tried + 1
        if walk.repair(100):
            repaired += 1
            assert problem.fits(walk.states)
        else:
            assert walk.over > 0 or not problem.fits(walk.states)
    assert repaired > 0.7 * tried > 20
