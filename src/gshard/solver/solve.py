"""Finds good states of a problem, and a bound on their distance from the best.

    >>> p = Problem.of([[0, 3], [1, 0]], [(0, 1, [[0, 9], [9, 0]])], loads=[(0, 0, 2, [8, 4])], limit=6)
    >>> found = solve(p)
    >>> found.states.tolist(), found.value, found.gap
    ([1, 1], 3.0, 0.0)
    >>> solve(Problem.of([[1, 2]], loads=[(0, 0, 2, [8, 4])], limit=3)).fits
    False

The steps are: ``reduce`` the problem; enumerate the rest if it is small (``exact``); otherwise alternate rounds of
messages and prices, and leaps (``descent``). Without ``budget_seconds``, the number of steps depends on the sizes only,
and the answer is the same at every call and in every process.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from gshard.core.deadline import OutOfTime, check_deadline
from gshard.solver.descent import Descent
from gshard.solver.exact import exact
from gshard.solver.peak import least_peak
from gshard.solver.problem import Floats, Ints, Problem
from gshard.solver.reduce import reduce
from gshard.solver.reduced import DoesNotFit, Reduced

TOLERANCE = 1e-6  # a gap that counts as none
WORK = 1e8  # entries of tables that rounds go through, if no time is given
LEAST, MOST = 60, 400  # the fewest and the most rounds, if no time is given
BURN = 15  # rounds before the first leap, in which prices settle; at most a third of the time
LEAPS, MORE_LEAPS = 2, 10  # leaps after each round; more after PATIENCE rounds that raised the bound by at most RISE
PATIENCE, RISE = 10, 1e-4
IDLE = 300  # steps without a better solution after which the search ends, if no time is given
ALTERNATIVES = 10  # rounds for the costs of alternatives, if the best solution is found without rounds
ENDLESS = 1 << 60


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """States, with their cost and bounds."""

    problem: Problem  # the problem
    states: Ints  # int64 [nodes]
    value: float  # the cost of the states; ``inf`` if no allowed states were found
    bound: float  # no states that fit cost less
    peak: float  # bytes at the fullest moment
    prices: Floats  # float64 [moments], the price of a byte at each moment
    steps: int = 0  # the number of rounds and leaps
    peak_bound: float = 0.0  # no states have a lower peak; 0 if the search did not minimise the peak
    cut: bool = False  # whether the time was over before all planned steps
    interrupted: bool = False  # whether Ctrl-C ended the search
    _alternatives: tuple[Floats, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the states are allowed and within the limit of memory."""
        return bool(np.isfinite(self.value)) and (self.problem.limit is None or self.peak <= self.problem.limit)

    @property
    def gap(self) -> float:
        """The largest share of the value that other states could save; 1 if the states do not fit."""
        if not self.fits:
            return 1.0
        return max(0.0, self.value - self.bound) / self.value if self.value > 0 else 0.0

    def alternatives(self, node: int) -> Floats:
        """float64 [states]: for each state of a node, a lower bound on the value of solutions with that state.

        It is at least ``bound``. It is ``inf`` for an impossible state, and for all states if no solution can fit. For
        an intermediate solution (``on_better``), only ``bound`` is known.
        """
        return self._alternatives[node] if self._alternatives else np.full(self.problem.states[node], self.bound)

    def fullest(self) -> tuple[int, list[tuple[int, float]]]:
        """The moment of the peak, and the nodes that hold memory then with their bytes, the largest first."""
        usage = self.problem.usage(self.states)
        moment = int(self.problem.moments[usage.argmax()]) if usage.size else 0
        held: dict[int, float] = {}
        for load in self.problem.loads:
            if load.start <= moment < load.end:
                held[load.node] = held.get(load.node, 0.0) + float(load.bytes[self.states[load.node]])
        return moment, sorted(((i, b) for i, b in held.items() if b), key=lambda entry: (-entry[1], entry[0]))

    def __str__(self) -> str:
        if self.fits:
            return f"{self.value:.6g}, bound {self.bound:.6g} (gap {self.gap:.2%}); peak {self.peak:,.0f}"
        if not np.isfinite(self.value):
            return "nothing was found that is allowed"
        moment, held = self.fullest()
        names = ", ".join(f"{self.problem.name(i)} {size:,.0f}" for i, size in held[:5])
        proof = "" if self.peak_bound <= (self.problem.limit or 0) else f" and none is below {self.peak_bound:,.0f}"
        return (
            f"nothing was found that fits {self.problem.limit:,.0f} bytes: the least peak is {self.peak:,.0f}{proof}; "
            f"at moment {moment} it is held by {names}"
        )


def solve(
    problem: Problem,
    budget_seconds: float | None = None,
    start: Sequence[Sequence[int] | Ints] = (),
    on_better: Callable[[Solution], None] | None = None,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    effort: float = 1.0,
    most_seconds: float = np.inf,
) -> Solution:
    """Searches for the best states. An interrupt (Ctrl-C) ends the search early."""
    search = _Search(problem, on_better, seed)
    by_size = budget_seconds is None
    deadline = time.monotonic() + (most_seconds if budget_seconds is None else budget_seconds)
    try:
        search.run(start, deadline, tolerance, effort, by_size)
    except (KeyboardInterrupt, OutOfTime) as end:
        if search.states is None:
            raise
        search.interrupted, search.cut = isinstance(end, KeyboardInterrupt), True
    return search.solution(final=True)


class _Search:
    """The search in the reduced problem, with the best solution of the whole problem so far."""

    def __init__(self, problem: Problem, on_better: Callable[[Solution], None] | None, seed: int):
        self.problem, self.on_better, self.seed = problem, on_better, seed
        self.states: Ints | None = None  # the best states that fit
        self.value, self.bound, self.steps = np.inf, 0.0, 0
        self.least: Ints | None = None  # the states of the lowest peak, if none fit
        self.peak_bound = 0.0
        self.reduced: Reduced | None = None
        self.descent: Descent | None = None
        self.cut = self.interrupted = False

    def offer(self, states: Ints) -> None:
        """Keeps states that fit and are better than all before."""
        value = self.problem.value(states)
        if value < self.value and self.problem.fits(states):
            self.states, self.value = states, value
            if self.on_better is not None:
                self.on_better(self.solution())

    def run(
        self, start: Sequence[Sequence[int] | Ints], deadline: float, tolerance: float, effort: float, by_size: bool
    ) -> None:
        for states in start:
            self.offer(np.array(states, dtype=np.int64))
        try:
            reduced = self.reduced = reduce(self.problem)
        except DoesNotFit:
            self._peak(deadline)
            self.peak_bound = max(self.peak_bound, float(self.problem.limit or 0.0) + 1.0)
            return
        descent = self.descent = Descent(reduced.problem, self.seed)
        outcome = exact(reduced.problem)
        for states in [] if outcome is None else outcome:
            self.offer(reduced.lift(states))
            self.bound = reduced.problem.value(states)
        for given in start:
            if descent.offer(reduced.lower(given)) and descent.states is not None:
                self.offer(reduced.lift(descent.states))
        if outcome is None:
            self._descend(descent, reduced, deadline, tolerance, effort if by_size else None)
        else:
            for _ in range(ALTERNATIVES):
                descent.round()
        if self.states is None and not self._proven():
            self._peak(deadline)

    def _descend(
        self, descent: Descent, reduced: Reduced, deadline: float, tolerance: float, effort: float | None
    ) -> None:
        """Runs rounds and leaps: a number that depends on the sizes, times ``effort``; without it, as time allows."""
        entries = sum(table.size for table in reduced.problem.tables) + descent.flat.cost.size
        rounds = ENDLESS if effort is None else int(min(MOST, max(LEAST, effort * WORK / entries)))
        began = time.monotonic()
        halfway = (began + deadline) / 2
        end_of_burn_in = (2 * began + deadline) / 3
        last_bound = 0.0
        rounds_without_rise = steps_without_gain = 0
        for round_index in range(rounds):
            is_burn_in = round_index < BURN and time.monotonic() < end_of_burn_in
            if is_burn_in:
                leaps = 0
            else:
                leaps = LEAPS if rounds_without_rise < PATIENCE else MORE_LEAPS
            for step in [descent.round] + [descent.leap] * leaps:
                check_deadline()
                if self.value - self.bound <= tolerance * self.bound:
                    return
                if time.monotonic() > deadline:
                    self.cut = effort is not None
                    return
                self.steps += 1
                steps_without_gain += 1
                if step() and descent.states is not None:
                    self.offer(reduced.lift(descent.states))
                    steps_without_gain = 0
                self.bound = max(self.bound, descent.prices.bound)
            is_enough = effort is not None and steps_without_gain > effort * IDLE and rounds_without_rise > PATIENCE
            if is_enough and descent.states is not None:
                return
            if self.bound > last_bound * (1 + RISE):
                last_bound = self.bound
                rounds_without_rise = 0
            else:
                rounds_without_rise += 1
            if descent.states is None and (round_index in (LEAST, 4 * LEAST) or time.monotonic() > halfway):
                halfway = np.inf
                self._peak(deadline)
                if self._proven():
                    return

    def _proven(self) -> bool:
        """Whether it is proven that nothing can fit."""
        return self.problem.limit is not None and self.peak_bound > self.problem.limit

    def _peak(self, deadline: float) -> None:
        """Minimises the peak of memory. If that fits, the search goes on from it."""
        states, bound = least_peak(self.problem, self.seed, deadline)
        self.peak_bound = max(self.peak_bound, bound)
        if states is not None:
            self.least = states
            self.offer(states)
            if self.descent is not None and self.reduced is not None:
                self.descent.offer(self.reduced.lower(states))

    def solution(self, final: bool = False) -> Solution:
        """The best solution so far. The final one has prices and alternatives."""
        states = self.states if self.states is not None else self.least
        prices = np.zeros(len(self.problem.moments))
        alternatives: tuple[Floats, ...] = ()
        if final and self.reduced is not None and self.descent is not None:
            values = self.descent.alternatives()
            self.bound = max(self.bound, self.descent.prices.bound)
            if states is None:
                states = self.reduced.lift(np.zeros(len(self.reduced.nodes), dtype=np.int64))
            prices[self.reduced.moments[self.reduced.problem.moments]] = self.descent.prices.best
            least = min(self.bound, self.value)
            lifted = self.reduced.lift_alternatives(values, least)
            alternatives = tuple(np.maximum(value, least) for value in lifted)
        elif final:
            alternatives = tuple(np.full(cost.size, np.inf) for cost in self.problem.costs)
        if states is None:
            states = np.zeros(len(self.problem.costs), dtype=np.int64)
        value = self.problem.value(states)
        return Solution(
            problem=self.problem,
            states=states,
            value=value,
            bound=min(self.bound, self.value),  # rounding may raise the bound above the value
            peak=self.problem.peak(states),
            prices=prices,
            steps=self.steps,
            peak_bound=self.peak_bound,
            cut=self.cut,
            interrupted=self.interrupted,
            _alternatives=alternatives,
        )
