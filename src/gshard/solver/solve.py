"""Solve: finds good states of a problem, and a bound on their distance from the best.

    >>> p = Problem.of([[0, 3], [1, 0]], [(0, 1, [[0, 9], [9, 0]])], loads=[(0, 0, 2, [8, 4])], limit=6)
    >>> found = solve(p)
    >>> found.states.tolist(), found.value, found.gap
    ([1, 1], 3.0, 0.0)
    >>> solve(Problem.of([[1, 2]], loads=[(0, 0, 2, [8, 4])], limit=3)).fits
    False

The steps: ``reduce`` what can be reduced; write down all that is left, if that is little (``exact``); else rounds of
messages and prices, and leaps (``descent``). Without ``budget_seconds`` how many follows from the sizes alone, and
the answer is the same at every call and in every process.
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

TOLERANCE = 1e-6  # a gap that is none
WORK = 1e8  # entries of tables that rounds go through if no time is given
LEAST, MOST = 60, 400  # rounds, likewise
BURN = 15  # rounds before the first leap, for prices to become what they are; at most a third of the time
LEAPS, MORE_LEAPS = 2, 10  # after each round; more when so many rounds raised the bound by no more than that part of it
PATIENCE, RISE = 10, 1e-4
IDLE = 300  # steps that bring nothing better, after which no more are made if no time was given
ALTERNATIVES = 10  # rounds for what alternatives cost, where the best is known without
ENDLESS = 1 << 60


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """States, and what is known of them.

    Attributes:
        problem: what was solved.
        states: int64 [nodes].
        value: what they cost. ``inf`` where nothing was found that is allowed.
        bound: no states that fit cost less.
        peak: bytes at the fullest moment.
        prices: what a byte would be worth at each of ``problem.moments``.
        steps: rounds and leaps that it took.
        peak_bound: no states have a lower peak; 0 where it was not looked for.
        cut: whether the time was over before all steps that follow from the sizes were made.
        interrupted: whether Ctrl-C ended it.
    """

    problem: Problem
    states: Ints
    value: float
    bound: float
    peak: float
    prices: Floats
    steps: int = 0
    peak_bound: float = 0.0
    cut: bool = False
    interrupted: bool = False
    _alternatives: tuple[Floats, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the states are allowed and memory suffices."""
        return bool(np.isfinite(self.value)) and (self.problem.limit is None or self.peak <= self.problem.limit)

    @property
    def gap(self) -> float:
        """How much of the value could at most be saved, as a part of it; 1 where nothing fits."""
        if not self.fits:
            return 1.0
        return max(0.0, self.value - self.bound) / self.value if self.value > 0 else 0.0

    def alternatives(self, node: int) -> Floats:
        """For each state of a node, a value that no solution with it is below: what insisting on it costs at least.

        It is at least the bound. A state that cannot be is ``inf``; all are, where memory is known to suffice for none.
        Of a solution on the way (``on_better``) nothing but the bound is known.
        """
        return self._alternatives[node] if self._alternatives else np.full(self.problem.states[node], self.bound)

    def fullest(self) -> tuple[int, list[tuple[int, float]]]:
        """The moment at which most is used, and the nodes that hold it then with their bytes, the largest first."""
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
    """The best states that can be found, which an interrupt (Ctrl-C) ends early.

    Args:
        problem: costs, tables, loads.
        budget_seconds: of time; a step that has begun is ended, and ``reduce`` is one. Without, the number of steps
            follows from the sizes of the problem.
        start: states to begin from; the answer is no worse than the best of those that fit.
        on_better: is called with each solution that is better than those before.
        tolerance: the gap at which to stop.
        seed: of the random numbers.
        effort: scales the number of steps, where no time is given.
        most_seconds: after which these steps end, too; ``reduce`` is cut by ``core.deadline`` only.

    Returns:
        a solution; one whose ``fits`` is False, with the least peak that was found, where nothing fits.

    Raises:
        ProblemError: some node has no state that its neighbours allow.
        OutOfTime: the deadline (``core.deadline``) was over before there was anything to return.
    """
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
    """The best so far of the whole problem, while its reduction is searched."""

    def __init__(self, problem: Problem, on_better: Callable[[Solution], None] | None, seed: int):
        self.problem, self.on_better, self.seed = problem, on_better, seed
        self.states: Ints | None = None  # the best that fits
        self.value, self.bound, self.steps = np.inf, 0.0, 0
        self.least: Ints | None = None  # those of the least peak, where nothing fits
        self.peak_bound = 0.0
        self.small: Reduced | None = None
        self.descent: Descent | None = None
        self.cut = self.interrupted = False

    def offer(self, states: Ints) -> None:
        """Takes states that fit and are better than those before."""
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
            small = self.small = reduce(self.problem)
        except DoesNotFit:
            self._peak(deadline)
            self.peak_bound = max(self.peak_bound, float(self.problem.limit or 0.0) + 1.0)
            return
        descent = self.descent = Descent(small.problem, self.seed)
        outcome = exact(small.problem)
        for states in [] if outcome is None else outcome:
            self.offer(small.lift(states))
            self.bound = small.problem.value(states)
        for given in start:
            if descent.offer(small.lower(given)) and descent.states is not None:
                self.offer(small.lift(descent.states))
        if outcome is None:
            self._descend(descent, small, deadline, tolerance, effort if by_size else None)
        else:
            for _ in range(ALTERNATIVES):
                descent.round()
        if self.states is None and not self._proven():
            self._peak(deadline)

    def _descend(
        self, descent: Descent, small: Reduced, deadline: float, tolerance: float, effort: float | None
    ) -> None:
        """Rounds and leaps; so many as follow from the sizes, times ``effort``, or as there is time for."""
        entries = sum(table.size for table in small.problem.tables) + descent.flat.cost.size
        rounds = ENDLESS if effort is None else int(min(MOST, max(LEAST, effort * WORK / entries)))
        last, stale, idle, begin = 0.0, 0, 0, time.monotonic()
        halfway, burnt = (begin + deadline) / 2, (2 * begin + deadline) / 3
        for number in range(rounds):
            burning = number < BURN and time.monotonic() < burnt
            leaps = 0 if burning else LEAPS if stale < PATIENCE else MORE_LEAPS
            for step in [descent.round] + [descent.leap] * leaps:
                check_deadline()
                if self.value - self.bound <= tolerance * self.bound:
                    return
                if time.monotonic() > deadline:
                    self.cut = effort is not None
                    return
                self.steps += 1
                idle += 1
                if step() and descent.states is not None:
                    self.offer(small.lift(descent.states))
                    idle = 0
                self.bound = max(self.bound, descent.prices.bound)
            enough = effort is not None and idle > effort * IDLE and stale > PATIENCE
            if enough and descent.states is not None:
                return
            last, stale = (self.bound, 0) if self.bound > last * (1 + RISE) else (last, stale + 1)
            if descent.states is None and (number in (LEAST, 4 * LEAST) or time.monotonic() > halfway):
                halfway = np.inf
                self._peak(deadline)
                if self._proven():
                    return

    def _proven(self) -> bool:
        """Whether nothing can fit."""
        return self.problem.limit is not None and self.peak_bound > self.problem.limit

    def _peak(self, deadline: float) -> None:
        """Looks for what takes least memory; where that fits, the search goes on from it."""
        states, bound = least_peak(self.problem, self.seed, deadline)
        self.peak_bound = max(self.peak_bound, bound)
        if states is not None:
            self.least = states
            self.offer(states)
            if self.descent is not None and self.small is not None:
                self.descent.offer(self.small.lower(states))

    def solution(self, final: bool = False) -> Solution:
        """The best so far. The final one has prices and alternatives."""
        states = self.states if self.states is not None else self.least
        prices = np.zeros(len(self.problem.moments))
        alternatives: tuple[Floats, ...] = ()
        if final and self.small is not None and self.descent is not None:
            values = self.descent.alternatives()
            self.bound = max(self.bound, self.descent.prices.bound)
            if states is None:
                states = self.small.lift(np.zeros(len(self.small.nodes), dtype=np.int64))
            prices[self.small.moments[self.small.problem.moments]] = self.descent.prices.best
            least = min(self.bound, self.value)
            lifted = self.small.lift_alternatives(values, least)
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
            bound=min(self.bound, self.value),  # rounding may have put it above
            peak=self.problem.peak(states),
            prices=prices,
            steps=self.steps,
            peak_bound=self.peak_bound,
            cut=self.cut,
            interrupted=self.interrupted,
            _alternatives=alternatives,
        )
