"""Walk: changes states one at a time, and keeps costs of changes and used memory up to date.

* ``descend`` makes changes that are better and fit, until there is none;
* ``repair`` frees memory where most is used, the cheapest bytes first, until all fits.
"""

from __future__ import annotations

import numpy as np

from gshard.solver.flat import Flat
from gshard.solver.problem import Floats, Ints, accumulated

SMALL = 1e-9  # of the value: a change that saves less is none


class Walk:
    """States of a problem on the move.

    Attributes:
        states: int64 [nodes].
        costs: float64 [all states], what each would cost, the neighbours being as they are.
        usage: float64 [moments].
    """

    def __init__(self, flat: Flat, states: Ints):
        self.flat, self.states = flat, states.copy()
        self.costs, self.usage = flat.given(states), flat.usage(states)

    @property
    def over(self) -> float:
        """Bytes too much at the fullest moment; zero or less if all fits."""
        return float(self.usage.max() - self.flat.limit) if self.usage.size else -np.inf

    def change(self, node: int, state: int) -> None:
        flat = self.flat
        first, more = self.bytes_more(node, state)
        self.usage[first : first + more.size] += more
        self.states[node] = state
        for j in flat.neighbours[flat.neighbours_first[node] : flat.neighbours_first[node + 1]].tolist():
            self.costs[flat.first[j] : flat.first[j + 1]] = flat.given_at(j, self.states)

    def bytes_more(self, node: int, state: int) -> tuple[int, Floats]:
        """What a change adds to the usage, from which moment on."""
        flat = self.flat
        own = slice(flat.load_first[node], flat.load_first[node + 1])
        rows, amounts = flat.load_rows[own], flat.bytes_of(node)
        if not len(rows):
            return 0, np.zeros(0)
        change = amounts[:, state] - amounts[:, self.states[node]]
        if len(rows) == 1:
            return int(rows[0, 0]), np.full(rows[0, 1] - rows[0, 0], change[0])
        first = int(rows[:, 0].min())
        return first, accumulated(rows - first, change, int(rows[:, 1].max()) - first)

    def fits(self, node: int, state: int) -> bool:
        """Whether a change leaves no moment too full that it adds to."""
        first, more = self.bytes_more(node, state)
        return not ((more > 0) & (self.usage[first : first + more.size] + more > self.flat.limit)).any()

    def current(self) -> Floats:
        """float64 [nodes]: what the state of each costs."""
        return self.costs[self.flat.first[:-1] + self.states]

    def descend(self, passes: int) -> None:
        """Changes single nodes as long as that saves something and fits. No current state may be forbidden."""
        flat = self.flat
        blocked = np.zeros(self.states.size, dtype=bool)  # by memory, which seldom becomes free on the way down
        for _ in range(passes if self.states.size else 0):
            current = self.current()
            saved = current - np.minimum.reduceat(self.costs, flat.first[:-1])
            small = SMALL * float(current.mean())
            nodes = np.flatnonzero((saved > small) & ~blocked)
            for node in nodes[np.argsort(-saved[nodes], kind="stable")].tolist():
                blocked[node] = not self._improve(node, small)
            if blocked[nodes].all():
                return

    def _improve(self, node: int, small: float) -> bool:
        """Gives a node its best state that fits. False if none does that is better."""
        flat = self.flat
        costs = self.costs[flat.first[node] : flat.first[node + 1]]
        better = np.flatnonzero(costs < costs[self.states[node]] - small)
        for state in better[np.argsort(costs[better], kind="stable")].tolist():
            if self.fits(node, state):
                self.change(node, state)
                return True
        return False

    def repair(self, most: int) -> bool:
        """Changes nodes until all fits. False if that takes more than ``most`` changes or cannot be."""
        left = np.zeros(self.costs.size, dtype=bool)  # states that were left are not come back to
        for _ in range(most):
            if self.over <= 0:
                return True
            state = self._cheapest_bytes(int(self.usage.argmax()), left)
            if state is None:
                return False
            node = int(self.flat.owner[state])
            left[self.flat.first[node] + self.states[node]] = True
            self.change(node, state - int(self.flat.first[node]))
        return self.over <= 0

    def _cheapest_bytes(self, moment: int, left: np.ndarray) -> int | None:
        """The state that costs least for each byte that changing to it frees at a moment."""
        flat = self.flat
        states, amounts, first = flat.bytes_at(moment)
        chosen = self.states[flat.owner[states]]
        freed = amounts[first + chosen] - amounts
        useful = np.flatnonzero(freed > 0)
        useful = useful[np.isfinite(self.costs[states[useful]]) & ~left[states[useful]]]
        if not useful.size:
            return None
        states, freed = states[useful], freed[useful]
        now = flat.first[flat.owner[states]] + chosen[useful]
        more = np.maximum(self.costs[states] - self.costs[now], 0.0)
        each = more / np.minimum(freed, self.usage[moment] - flat.limit)
        cheapest = np.flatnonzero(each == each.min())
        return int(states[cheapest[freed[cheapest].argmax()]])
