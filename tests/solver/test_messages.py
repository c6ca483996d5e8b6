import numpy as np
import pytest

from gshard.solver.flat import Flat
from gshard.solver.messages import Messages
from gshard.solver.problem import Problem, ProblemError
from gshard.solver.reduce import _Work
from random_problems import exhaustive, exhaustive_alternatives, random_problem


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


def test_beliefs_bound_what_each_state_costs():
    loose = 0
    for seed in range(60):
        try:
            problem = consistent(seed, memory=False, density=0.7)
        except ProblemError:
            continue
        flat = Flat(problem)
        messages = Messages(flat, np.arange(len(problem.costs)))
        for number in range(20):
            bound, _ = messages.sweep(flat.cost, forward=number % 2 == 0)
        messages.sweep(flat.cost, forward=True)
        beliefs = np.split(messages.belief, flat.first[1:-1])
        for belief, true in zip(beliefs, exhaustive_alternatives(problem), strict=True):
            assert (bound + belief - belief.min() <= true + 1e-6).all()
            loose += (bound + belief - belief.min() < true - 1).sum()
    assert loose < 300
