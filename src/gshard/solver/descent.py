"""Alternates rounds of messages and prices with random restarts from the best solution.

A round sends messages at the present prices, chooses states by them, improves a forest, repairs the result until it
fits, and notes the bound; then it updates the prices. A leap starts from the best states: it chooses forests again at
perturbed prices, some higher and some lower at random, repairs the result and descends, and keeps it if it is no worse.
Rounds give the bound and the region of good states, leaps the best states in it.
"""

from __future__ import annotations

import numpy as np

from gshard.solver.flat import Flat
from gshard.solver.forest import Forest
from gshard.solver.messages import Messages
from gshard.solver.prices import Prices, paid
from gshard.solver.problem import Floats, Ints, Problem
from gshard.solver.walk import Walk

SWEEPS = 4  # pairs of sweeps in a round, each with its own prices
FREE_ROUNDS = 3  # rounds before memory has a price
NEAR = 1.15  # of the limit: states with a higher peak are not repaired
REPAIRS = 300  # changes in one repair
PASSES = 3  # passes of a descent
STUCK = 30  # leaps without gain after which another starting point is tried
NOISE = (0.03, 0.1, 0.3, 1.0)


class Descent:
    """The search for the best states of a reduced problem."""

    def __init__(self, problem: Problem, seed: int):
        self.flat = Flat(problem)  # the problem
        self.generator = np.random.default_rng(seed)
        self.messages = Messages(self.flat, self.generator.permutation(self.flat.size.size))
        self.prices = Prices(self.flat)  # the prices of memory, with the best bound
        self.states: Ints | None = None  # int64 [nodes], the best states that fit; None before there are any
        self.value = np.inf  # their cost; ``inf`` before there are any
        self.rounds = 0
        # Another starting point of leaps, its value, and the leaps from it without gain. At first there is none.
        self._other, self._other_value, self._stuck = np.zeros(0, dtype=np.int64), np.inf, STUCK + 1

    def offer(self, states: Ints) -> bool:
        """Repairs and descends from given states. True if the best solution improves."""
        found = self._settled(states)
        return found is not None and self._better(*found)

    def round(self) -> bool:
        """Runs messages and prices, then a forest. True if the best solution improves."""
        self.rounds += 1
        for pairs_left in range(SWEEPS - 1, -1, -1):
            costs = self.prices.costs()
            self.messages.sweep(costs, forward=True)
            # Prices follow the memory of the chosen states. Without a limit, only the last states matter.
            chooses = not pairs_left or bool(np.isfinite(self.flat.limit))
            bound, states = self.messages.sweep(costs, forward=False, choose=chooses)
            self.prices.learn(bound)
            if not chooses:
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

    def bound_ahead(self, enough: float, rounds: int) -> float:
        """The bound after at most so many rounds, of a problem without a limit of memory.

        The rounds end as soon as the bound is ``enough``, or if the remaining ones would have to raise it by more than
        the last one did. Only their messages are sent, and then forgotten: the search continues as without this call.
        """
        sent, bound = self.messages.sent.copy(), self.prices.bound
        for rounds_left in range(rounds - 1, -1, -1):
            before = bound
            for _ in range(SWEEPS):
                self.messages.sweep(self.flat.cost, forward=True)
                bound = max(bound, self.messages.sweep(self.flat.cost, forward=False)[0])
            if bound >= enough or bound + rounds_left * (bound - before) < enough:
                break
        self.messages.sent[:] = sent
        return bound

    def leap(self) -> bool:
        """Chooses forests at perturbed costs, from the best or another starting point. True if the best improves."""
        if self.states is None:
            return False
        from_other = self.generator.random() < 0.5
        if from_other and self._stuck > STUCK:
            return self._jump()
        costs, origin = self._noisy_costs(), self._other if from_other else self.states
        states = Forest(self.flat, self.generator).improve(costs, origin)
        if self.generator.random() < 0.5:
            states = Forest(self.flat, self.generator).improve(costs, states)
        found = self._settled(states)
        if from_other:
            self._stuck += 1
        if found is None:
            return False
        if from_other and found[1] <= self._other_value:
            self._stuck = 0 if found[1] < self._other_value else self._stuck
            self._other, self._other_value = found
        return self._better(*found)

    def _jump(self) -> bool:
        """Makes another starting point for leaps, from messages at perturbed costs. True if the best improves."""
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
        """Costs at the best prices, times random numbers for each node and for all, plus random costs of states.

        The factors help where memory limits the choice, the random costs where messages do not agree.
        """
        flat, random = self.flat, self.generator
        factors = np.exp(
            random.normal(0.0, random.choice(NOISE), flat.size.size) + random.normal(0.0, random.choice(NOISE))
        )
        costs = flat.cost + (flat.priced(self.prices.best) - flat.cost) * factors[flat.owner]
        if random.random() < 0.5:
            costs += random.exponential(self.value / flat.size.size * 10 ** random.uniform(-2, 1), costs.size)
        return costs

    def _settled(self, states: Ints) -> tuple[Ints, float] | None:
        """Repairs states and descends. Returns the states and their value, or None if they could not be repaired."""
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
        """float64 [states] for each node: lower bounds with each state, the min-marginals of the last messages."""
        flat, prices = self.flat, self.prices
        costs = flat.priced(prices.best)
        self.messages.sweep(costs, forward=True)
        bound, _ = self.messages.sweep(costs, forward=False)
        prices.bound = max(prices.bound, bound - paid(prices.best, flat.limit))
        # After one more sweep, the belief of a state exceeds the least belief of its node by at most as much as the
        # value of any solution with that state exceeds the bound before.
        self.messages.sweep(costs, forward=True)
        belief = self.messages.belief
        least = np.minimum.reduceat(belief, flat.first[:-1]) if belief.size else belief
        values = np.maximum(bound - paid(prices.best, flat.limit) + belief - np.repeat(least, flat.size), prices.bound)
        return np.split(values, flat.first[1:-1])
