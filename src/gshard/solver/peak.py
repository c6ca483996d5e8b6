"""Minimises the peak of memory, for problems without a known solution that fits.

It uses the same messages and forests, with prices of memory only: allowed choices cost nothing. The prices of moments
are weights that sum to one and grow where most memory is used (multiplicative weights; Plotkin, Shmoys and Tardos
1995), so that the bound of the priced problem is a bound of the peak.
"""

from __future__ import annotations

import time

import numpy as np

from gshard.solver.flat import Flat
from gshard.solver.forest import Forest
from gshard.solver.messages import Messages
from gshard.solver.problem import Ints, Problem
from gshard.solver.reduce import reduce
from gshard.solver.walk import Walk

ROUNDS = 60
TRIES = 40
REPAIRS = 400  # changes in one try


def least_peak(problem: Problem, seed: int, deadline: float = np.inf) -> tuple[Ints | None, float]:
    """The states of the lowest peak found (None if only forbidden states were found), and a lower bound of all peaks.

    >>> least_peak(Problem.of([[0, 0], [0, 0]], loads=[(0, 0, 2, [8, 4]), (1, 1, 2, [5, 9])]), seed=0)
    (array([1, 0]), 9.0)
    """
    reduced = reduce(_memory_only(problem))
    flat, generator = Flat(reduced.problem), np.random.default_rng(seed)
    messages = Messages(flat, generator.permutation(flat.size.size))
    weights = np.full(len(flat.problem.moments), 1.0 / max(1, len(flat.problem.moments)))
    best: Ints | None = None
    best_peak, bound = np.inf, 0.0
    for round_index in range(ROUNDS):
        if round_index and time.monotonic() > deadline:
            break
        costs = flat.priced(weights)
        messages.sweep(costs, forward=True)
        sweep_bound, states = messages.sweep(costs, forward=False, choose=True)
        bound = max(bound, sweep_bound)
        states = Forest(flat, generator).improve(costs, states)
        usage = flat.usage(states)
        peak = float(usage.max(initial=0.0))
        if np.isfinite(flat.value(states)) and peak < best_peak:
            best, best_peak = states, peak
        weights *= np.exp(3.0 / (1.0 + round_index / 10.0) * (usage / max(peak, 1.0) - 1.0))
        weights /= max(weights.sum(), 1e-300)
    for _ in range(TRIES):
        if best is None or best_peak <= bound + 1.0:
            break
        walk = Walk(flat, best)
        flat.limit = best_peak - 1.0
        if time.monotonic() > deadline or not walk.repair(REPAIRS):
            break
        best, best_peak = walk.states, float(walk.usage.max(initial=0.0))
    # Bytes are whole numbers, and so is every peak.
    return (None if best is None else reduced.lift(best)), min(float(np.ceil(bound)), best_peak)


def _memory_only(problem: Problem) -> Problem:
    """The problem with costs of 0 for allowed choices, and a limit of 0, so that no state is removed for its bytes."""
    return Problem(
        costs=tuple(np.where(np.isfinite(cost), 0.0, np.inf) for cost in problem.costs),
        ends=problem.ends,
        tables=tuple(np.where(np.isfinite(table), 0.0, np.inf) for table in problem.tables),
        loads=problem.loads,
        limit=0.0,
        names=problem.names,
    )
