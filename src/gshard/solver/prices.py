"""Maintains Lagrange multipliers for memory: one price of a byte for each moment.

With prices, memory is part of the costs of states, and messages need not represent it. For any prices, the bound of the
priced problem minus ``prices x limit`` is a bound of the problem itself (Geoffrion, Lagrangean Relaxation for Integer
Programming, 1974).

Prices begin at 0. If the best states at these prices do not fit, prices restart from above, where memory is nearly all
that counts, and fall where there is room. So solutions fit from the first round on; from below that would take long.
"""

from __future__ import annotations

import numpy as np

from gshard.solver.flat import Flat
from gshard.solver.messages import ROUNDING
from gshard.solver.problem import Floats

ABOVE = 10.0  # the cost of a full memory at the first prices, relative to the value without memory
COOLING = 60  # rounds after which price changes are half as large
RISE, FALL, SLOW, SLOWEST = 0.3, 0.35, 0.12, 0.02  # relative changes of a price in a round


class Prices:
    """Prices that follow the use of memory."""

    def __init__(self, flat: Flat):
        self.flat = flat
        self.values = np.zeros(len(flat.problem.moments))  # float64 [moments]
        # bound: the best bound at any prices so far; best: float64 [moments], the prices of that bound
        self.best, self.bound = self.values, 0.0
        self._rounds = 0

    def costs(self) -> Floats:
        """float64 [all states]: costs at these prices."""
        return self.flat.priced(self.values)

    def start(self, usage: Floats, value: float) -> None:
        """Sets the first prices, from above.

        Args:
            usage: float64 [moments], the memory of the best states without prices.
            value: the cost of these states.
        """
        fullness = usage / max(self.flat.limit, 1.0)
        self.values = np.where(fullness > 1, fullness - 1, 0.02)
        self.values *= ABOVE * value / max(self.flat.limit, 1.0) / self.values.sum()

    def learn(self, bound: float) -> float:
        """Records a bound of the priced problem, and returns it as a bound of the problem itself."""
        own_bound = bound - paid(self.values, self.flat.limit)
        if own_bound > self.bound:
            self.bound, self.best = own_bound, self.values
        return own_bound

    def follow(self, usage: Floats, bound: float) -> None:
        """Raises prices where memory exceeds the limit and lowers them where there is room.

        Args:
            usage: float64 [moments], the memory of the states chosen at these prices.
            bound: a bound of the priced problem; it sets the size of a price that rises from 0.
        """
        self._rounds += 1
        step = 1.0 / (1.0 + self._rounds / COOLING)
        limit = max(self.flat.limit, 1.0)
        fullness = usage / limit
        new = step * 0.5 * max(bound, 1e-300) / limit / fullness.size * np.minimum(1.0, 20.0 * (fullness - 1.0))
        fall = np.where(fullness < 0.9, FALL, np.where(fullness < 0.97, SLOW, SLOWEST))
        self.values = np.where(fullness > 1, self.values * (1 + RISE * step) + new, self.values * (1 - fall * step))


def paid(prices: Floats, limit: float) -> float:
    """The cost of a full memory, plus rounding: the difference between bounds of the priced problem and the problem."""
    return float(prices.sum()) * limit * (1.0 + ROUNDING) if prices.any() else 0.0
