"""Prices: Lagrange multipliers for memory, one price of a byte for each moment.

With prices, memory is part of the costs of states and messages need not know of it. For any prices at all, the bound
of the priced problem less ``prices x limit`` is a bound of the problem itself (Geoffrion, Lagrangean Relaxation for
Integer Programming, 1974).

Prices begin at nothing. Where what is then best does not fit, they go on from above, where memory is nearly all that
counts, and fall where there is room: so there is something that fits from the first, which from below takes long to
come.
"""

from __future__ import annotations

import numpy as np

from gshard.solver.flat import Flat
from gshard.solver.messages import ROUNDING
from gshard.solver.problem import Floats

ABOVE = 10.0  # of the value without memory: what a full memory costs at the first prices
COOLING = 60  # rounds after which changes are half as large
RISE, FALL, SLOW, SLOWEST = 0.3, 0.35, 0.12, 0.02  # parts by which a price changes in a round


class Prices:
    """Prices that follow what memory is used.

    Attributes:
        values: float64 [moments].
        bound: the best bound that any prices gave.
        best: the prices that gave it.
    """

    def __init__(self, flat: Flat):
        self.flat = flat
        self.values = np.zeros(len(flat.problem.moments))
        self.best, self.bound = self.values, 0.0
        self._rounds = 0

    def costs(self) -> Floats:
        """float64 [all states]: costs at these prices."""
        return self.flat.priced(self.values)

    def start(self, usage: Floats, value: float) -> None:
        """Prices from above.

        Args:
            usage: of what is best without memory.
            value: of the same.
        """
        fullness = usage / max(self.flat.limit, 1.0)
        self.values = np.where(fullness > 1, fullness - 1, 0.02)
        self.values *= ABOVE * value / max(self.flat.limit, 1.0) / self.values.sum()

    def learn(self, bound: float) -> float:
        """Notes a bound of the problem at these prices, and returns it as one of the problem itself."""
        own = bound - paid(self.values, self.flat.limit)
        if own > self.bound:
            self.bound, self.best = own, self.values
        return own

    def follow(self, usage: Floats, bound: float) -> None:
        """Raises prices where memory does not suffice and lowers them where there is room.

        Args:
            usage: of what was chosen at these prices.
            bound: of the priced problem; it gives the size of a price that rises from nothing.
        """
        self._rounds += 1
        step = 1.0 / (1.0 + self._rounds / COOLING)
        limit = max(self.flat.limit, 1.0)
        fullness = usage / limit
        new = step * 0.5 * max(bound, 1e-300) / limit / fullness.size * np.minimum(1.0, 20.0 * (fullness - 1.0))
        fall = np.where(fullness < 0.9, FALL, np.where(fullness < 0.97, SLOW, SLOWEST))
        self.values = np.where(fullness > 1, self.values * (1 + RISE * step) + new, self.values * (1 - fall * step))


def paid(prices: Floats, limit: float) -> float:
    """What a full memory costs, and a little more for rounding: what is taken from a bound of a priced problem."""
    return float(prices.sum()) * limit * (1.0 + ROUNDING) if prices.any() else 0.0
