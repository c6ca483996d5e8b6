import numpy as np
import pytest

from gshard.solver.descent import Walk
from gshard.solver.messages import Flat
from random_problems import random_problem


def allowed(problem, rng):
    """Random states of which none is forbidden, or None if none are met."""
    for _ in range(50):
        states = rng.integers(0, problem.states)
        if np.isfinite(problem.value(states)):
            return states
    return None


@pytest.mark.parametrize("seed", range(60))
def test_everything_is_kept_up_to_date(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    flat = Flat(problem)
    walk = Walk(flat, rng.integers(0, problem.states))
    for _ in range(10):
        node = int(rng.integers(len(problem.costs)))
        state = int(rng.integers(problem.states[node]))
        before, fits = walk.usage.copy(), walk.fits(node, state)
        walk.change(node, state)
        added = walk.usage > before
        assert fits == (not (walk.usage[added] > flat.limit).any())
        np.testing.assert_array_equal(walk.costs, flat.given(walk.states))
        np.testing.assert_array_equal(walk.usage, flat.usage(walk.states))


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
