"""Changes states one at a time, and updates the costs of changes and the memory.

* ``descend`` makes changes that lower the cost and fit, until there are none;
* ``repair`` frees memory at the fullest moment, the cheapest bytes first, until everything fits.
"""

from __future__ import annotations

import numpy as np

from gshard.solver.flat import Flat
from gshard.solver.problem import Floats, Ints, accumulated

SMALL = 1e-9  # of the value: a smaller saving counts as none


class Walk:
    """States of a problem that change one by one."""

    def __init__(self, flat: Flat, states: Ints):
        self.flat, self.states = flat, states.copy()  # int64 [nodes]
        # costs: float64 [all states], the cost of each state with the neighbours' present states; usage: float64
        # [moments], bytes
        self.costs, self.usage = flat.given(states), flat.usage(states)

    @property
    def over(self) -> float:
        """Bytes above the limit at the fullest moment; zero or less if everything fits."""
        return float(self.usage.max() - self.flat.limit) if self.usage.size else -np.inf

    def change(self, node: int, state: int) -> None:
        """Changes the state of a node."""
        flat = self.flat
        first, more = self.bytes_more(node, state)
        self.usage[first : first + more.size] += more
        self.states[node] = state
        for j in flat.neighbours[flat.neighbours_first[node] : flat.neighbours_first[node + 1]].tolist():
            self.costs[flat.first[j] : flat.first[j + 1]] = flat.given_at(j, self.states)

    def bytes_more(self, node: int, state: int) -> tuple[int, Floats]:
        """The first moment at which a change adds memory, and float64 [moments], the bytes from there on."""
        flat = self.flat
        loads = slice(flat.load_first[node], flat.load_first[node + 1])
        rows, amounts = flat.load_rows[loads], flat.bytes_of(node)
        if not len(rows):
            return 0, np.zeros(0)
        change = amounts[:, state] - amounts[:, self.states[node]]
        if len(rows) == 1:
            return int(rows[0, 0]), np.full(rows[0, 1] - rows[0, 0], change[0])
        first = int(rows[:, 0].min())
        return first, accumulated(rows - first, change, int(rows[:, 1].max()) - first)

    def fits(self, node: int, state: int) -> bool:
        """Whether a change stays within the limit at all moments to which it adds."""
        first, more = self.bytes_more(node, state)
        return not ((more > 0) & (self.usage[first : first + more.size] + more > self.flat.limit)).any()

    def current(self) -> Floats:
        """float64 [nodes]: the cost of each node's present state."""
        return self.costs[self.flat.first[:-1] + self.states]

    def descend(self, passes: int) -> None:
        """Changes single nodes as long as that saves cost and fits. No present state may be forbidden."""
        flat = self.flat
        blocked = np.zeros(self.states.size, dtype=bool)  # nodes without memory for a better state; that seldom changes
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
        """Gives a node its best state that fits. False if no better state fits."""
        flat = self.flat
        costs = self.costs[flat.first[node] : flat.first[node + 1]]
        better = np.flatnonzero(costs < costs[self.states[node]] - small)
        for state in better[np.argsort(costs[better], kind="stable")].tolist():
            if self.fits(node, state):
                self.change(node, state)
                return True
        return False

    def repair(self, most: int) -> bool:
        """Changes nodes until everything fits. False if that needs more than ``most`` changes or is impossible."""
        left = np.zeros(self.costs.size, dtype=bool)  # states that were left, to which no node returns
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
        """The state with the least extra cost for each byte that a change to it frees at a moment."""
        flat = self.flat
        states, amounts, first = flat.bytes_at(moment)
        chosen = self.states[flat.owner[states]]
        freed = amounts[first + chosen] - amounts
        useful = np.flatnonzero(freed > 0)
        useful = useful[np.isfinite(self.costs[states[useful]]) & ~left[states[useful]]]
        if not useful.size:
            return None
        states, freed = states[useful], freed[useful]
        present = flat.first[flat.owner[states]] + chosen[useful]
        extra_costs = np.maximum(self.costs[states] - self.costs[present], 0.0)
        cost_of_byte = extra_costs / np.minimum(freed, self.usage[moment] - flat.limit)
        cheapest = np.flatnonzero(cost_of_byte == cost_of_byte.min())
        return int(states[cheapest[freed[cheapest].argmax()]])
