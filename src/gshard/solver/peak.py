"""Peak: minimises the fullest moment of memory, for problems without a known fitting solution.

The same messages and forests, at prices only: whatever is allowed costs nothing. Prices of moments are weights that
sum to one and grow where most is used (multiplicative weights; Plotkin, Shmoys and Tardos 1995), so that the priced
bound is one of the peak.
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
    """States of the least peak found, None if all that were found are forbidden, and a bound that no peak is below.

    >>> least_peak(Problem.of([[0, 0], [0, 0]], loads=[(0, 0, 2, [8, 4]), (1, 1, 2, [5, 9])]), seed=0)
    (array([1, 0]), 9.0)
    """
    small = reduce(_memory_only(problem))
    flat, generator = Flat(small.problem), np.random.default_rng(seed)
    messages = Messages(flat, generator.permutation(flat.size.size))
    weights = np.full(len(flat.problem.moments), 1.0 / max(1, len(flat.problem.moments)))
    found: Ints | None = None
    least, bound = np.inf, 0.0
    for number in range(ROUNDS):
        if number and time.monotonic() > deadline:
            break
        costs = flat.priced(weights)
        messages.sweep(costs, forward=True)
        low, states = messages.sweep(costs, forward=False, choose=True)
        bound = max(bound, low)
        states = Forest(flat, generator).improve(costs, states)
        usage = flat.usage(states)
        peak = float(usage.max(initial=0.0))
        if np.isfinite(flat.value(states)) and peak < least:
            found, least = states, peak
        weights *= np.exp(3.0 / (1.0 + number / 10.0) * (usage / max(peak, 1.0) - 1.0))
        weights /= max(weights.sum(), 1e-300)
    for _ in range(TRIES):
        if found is None or least <= bound + 1.0:
            break
        walk = Walk(flat, found)
        flat.limit = least - 1.0
        if time.monotonic() > deadline or not walk.repair(REPAIRS):
            break
        found, least = walk.states, float(walk.usage.max(initial=0.0))
    # Bytes are whole numbers, and so is every peak.
    return (None if found is None else small.lift(found)), min(float(np.ceil(bound)), least)


def _memory_only(problem: Problem) -> Problem:
    """The problem in which what is allowed costs nothing, and no memory is enough: no state goes for its bytes."""
    return Problem(
        costs=tuple(np.where(np.isfinite(cost), 0.0, np.inf) for cost in problem.costs),
        ends=problem.ends,
        tables=tuple(np.where(np.isfinite(table), 0.0, np.inf) for table in problem.tables),
        loads=problem.loads,
        limit=0.0,
        names=problem.names,
    )
