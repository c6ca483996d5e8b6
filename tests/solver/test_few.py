"""A problem solved again with the few most promising states of each node."""

import numpy as np
import pytest

from gshard.solver import few
from gshard.solver.descent import Descent
from gshard.solver.few import best_of_few
from gshard.solver.problem import Problem


def large(seed, nodes=60, states=40, forbidden=0.0):
    """Nodes in a ring, each with an edge to two others, of random costs; the first states are always allowed."""
    rng = np.random.default_rng(seed)
    costs, edges = [rng.random(states) for _ in range(nodes)], []
    for i in range(nodes):
        for k in (1, 7):
            table = np.where(rng.random((states, states)) < forbidden, np.inf, 3 * rng.random((states, states)))
            table[np.diag_indices(states)] = 3.0
            edges.append((i, (i + k) % nodes, table))
    return Problem.of(costs, edges)


def test_rounds_over_few_states_spare_more_than_another_round_over_all():
    found = []
    for seed in range(3):
        problem = large(seed)
        descent, rounds = Descent(problem, 0), Descent(problem, 0)
        rounds.round()
        for _ in range(2):
            descent.round()
            best_of_few(descent)
            rounds.round()
        assert descent.states is not None
        assert problem.value(descent.states) == pytest.approx(descent.value)
        assert descent.value >= rounds.prices.bound
        found.append((descent.value, rounds.value))
    assert sum(few for few, _ in found) < sum(value for _, value in found)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_so_far_is_never_lost(seed, monkeypatch):
    """Also where states forbid each other, and where a single state of each ranking is kept."""
    monkeypatch.setattr(few, "FEW", 1 + seed % 3)
    problem = large(seed, nodes=20, states=8, forbidden=0.3)
    descent = Descent(problem, seed)
    assert not best_of_few(descent)  # there is nothing yet to begin at
    descent.round()
    before = descent.value
    better = best_of_few(descent)
    assert better == (descent.value < before)
    assert descent.value <= before
    assert descent.states is None or problem.value(descent.states) == pytest.approx(descent.value)
