"""Descent: alternates rounds of messages and prices with random restarts from the best solution.

A round sends messages at the present prices, chooses states by them, settles a forest, brings the rest into memory
and notes the bound; then prices follow. A leap goes out from the best states: at prices that are each node's own,
some dearer and some cheaper at random, forests are chosen again; what comes of it is repaired and descends, and is
kept where it is no worse. Rounds give the bound and the region, leaps the best in it; neither is much without the
other.
"""

from __future__ import annotations

import numpy as np

from gshard.solver.flat import Flat
from gshard.solver.forest import Forest
from gshard.solver.messages import Messages
from gshard.solver.prices import Prices, paid
from gshard.solver.problem import Floats, Ints, Problem
from gshard.solver.walk import Walk

SWEEPS = 4  # pairs of sweeps, each with prices of its own, in a round
FREE_ROUNDS = 3  # before memory is looked at
NEAR = 1.15  # of the limit: what is fuller is not worth repairing
REPAIRS = 300  # changes in one repair
PASSES = 3  # of a descent
STUCK = 30  # leaps that bring nothing, after which another place is tried
NOISE = (0.03, 0.1, 0.3, 1.0)


class Descent:
    """The search for the best states of a reduced problem.

    Attributes:
        flat: the problem.
        prices: of memory; they hold the best bound.
        states, value: the best that fits, None and ``inf`` before there is one.
    """

    def __init__(self, problem: Problem, seed: int):
        self.flat = Flat(problem)
        self.generator = np.random.default_rng(seed)
        self.messages = Messages(self.flat, self.generator.permutation(self.flat.size.size))
        self.prices = Prices(self.flat)
        self.states: Ints | None = None
        self.value = np.inf
        self.rounds = 0
        # Where else leaps go out from, what that costs, how many brought nothing; at first there is no such place.
        self._other, self._other_value, self._stuck = np.zeros(0, dtype=np.int64), np.inf, STUCK + 1

    def offer(self, states: Ints) -> bool:
        """Takes states as a place to go down from. True if the best is better now."""
        found = self._settled(states)
        return found is not None and self._better(*found)

    def round(self) -> bool:
        """Messages and prices, then a forest. True if the best is better now."""
        self.rounds += 1
        for left in range(SWEEPS - 1, -1, -1):
            costs = self.prices.costs()
            self.messages.sweep(costs, forward=True)
            # Prices follow what states take of memory; without a limit only the last ones are looked at.
            choose = not left or bool(np.isfinite(self.flat.limit))
            bound, states = self.messages.sweep(costs, forward=False, choose=choose)
            self.prices.learn(bound)
            if not choose:
                continue
            usage = self.flat.usage(states)
            if self.prices.values.any():
                self.prices.follow(usage, bound)
            elif self.rounds >= FREE_ROUNDS and usage.max(initial=0.0) > self.flat.limit:
                value = self.flat.value(states)
                self.prices.start(usage, value if 0 < value < np.inf else max(bound, 1.0))
        states = Forest(self.flat, self.generator).improve(costs, states)
        if self.flat.usage(states).max(initial=0.0) > NEAR * self.flat.limit:
            return False
        found = self._settled(states)
        if found is None:
            return False
        return self._better(*found)

    def leap(self) -> bool:
        """Forests at prices of each node's own, from the best or from another place. True if the best is better now."""
        if self.states is None:
            return False
        other = self.generator.random() < 0.5
        if other and self._stuck > STUCK:
            return self._jump()
        costs, begin = self._noisy_costs(), self._other if other else self.states
        states = Forest(self.flat, self.generator).improve(costs, begin)
        if self.generator.random() < 0.5:
            states = Forest(self.flat, self.generator).improve(costs, states)
        found = self._settled(states)
        if other:
            self._stuck += 1
        if found is None:
            return False
        if other and found[1] <= self._other_value:
            self._stuck = 0 if found[1] < self._other_value else self._stuck
            self._other, self._other_value = found
        return self._better(*found)

    def _jump(self) -> bool:
        """Another place for leaps to go out from: what messages choose at noisy costs. True if it is the best."""
        costs, sent = self._noisy_costs(), self.messages.sent.copy()
        for _ in range(SWEEPS):
            self.messages.sweep(costs, forward=True)
            _, states = self.messages.sweep(costs, forward=False, choose=True)
        self.messages.sent[:] = sent
        found = self._settled(Forest(self.flat, self.generator).improve(costs, states))
        if found is None:
            return False
        (self._other, self._other_value), self._stuck = found, 0
        return self._better(*found)

    def _noisy_costs(self) -> Floats:
        """Costs at the best prices, times a random number for each node and one for all; random costs of each state.

        The first helps where memory is what binds, the second where messages do not agree.
        """
        flat, random = self.flat, self.generator
        own = np.exp(
            random.normal(0.0, random.choice(NOISE), flat.size.size) + random.normal(0.0, random.choice(NOISE))
        )
        costs = flat.cost + (flat.priced(self.prices.best) - flat.cost) * own[flat.owner]
        if random.random() < 0.5:
            costs += random.exponential(self.value / flat.size.size * 10 ** random.uniform(-2, 1), costs.size)
        return costs

    def _settled(self, states: Ints) -> tuple[Ints, float] | None:
        """States repaired and gone down from, with their value, or None if they could not be made to fit."""
        if not np.isfinite(self.flat.value(states)):
            return None
        walk = Walk(self.flat, states)
        if walk.over > 0 and not walk.repair(REPAIRS):
            return None
        walk.descend(PASSES)
        return walk.states, self.flat.value(walk.states)

    def _better(self, states: Ints, value: float) -> bool:
        better = value < self.value
        if value <= self.value:
            self.states, self.value = states, value
        return better

    def alternatives(self) -> list[Floats]:
        """For each node and state a value that no solution with it is below: min-marginals of the last messages."""
        flat, prices = self.flat, self.prices
        costs = flat.priced(prices.best)
        self.messages.sweep(costs, forward=True)
        bound, _ = self.messages.sweep(costs, forward=False)
        prices.bound = max(prices.bound, bound - paid(prices.best, flat.limit))
        # In a further sweep, the sum of the messages to a state is above the least of its node by no more than
        # solutions with that state are above the bound before.
        self.messages.sweep(costs, forward=True)
        belief = self.messages.belief
        least = np.minimum.reduceat(belief, flat.first[:-1]) if belief.size else belief
        values = np.maximum(bound - paid(prices.best, flat.limit) + belief - np.repeat(least, flat.size), prices.bound)
        return np.split(values, flat.first[1:-1])
