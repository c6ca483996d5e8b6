import numpy as np
import pytest

from gshard.solver.descent import Descent, Prices, paid
from gshard.solver.messages import Flat
from gshard.solver.problem import Problem, ProblemError
from gshard.solver.reduce import reduce
from random_problems import exhaustive, random_problem


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.one_in(3)
def test_the_bound_of_a_priced_problem_is_one_of_the_problem(seed):
    problem = random_problem(np.random.default_rng(seed), nodes=7, states=5)
    best = exhaustive(problem)
    try:
        descent = Descent(reduce(problem).problem, seed=0)
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


def test_prices_rise_where_there_is_no_room_and_fall_where_there_is():
    problem = Problem.of([[0, 1], [0, 1]], loads=[(0, 0, 2, [9, 1]), (1, 3, 5, [2, 1])], limit=4)
    prices = Prices(Flat(problem))
    prices.start(np.array([9.0, 2.0]), 10.0)
    first = prices.values
    assert first[0] > first[1] > 0
    prices.follow(np.array([9.0, 2.0]), 1.0)
    assert prices.values[0] > first[0]
    assert prices.values[1] < first[1]
    prices.follow(np.array([4.0, 4.0]), 1.0)  # just full: nearly as before
    assert prices.values[0] > first[0]
