"""Once: interns equal tables, so that values derived from them are computed once.

Equal layers have equal choices, and tables of what these cost. By which object it is, the next that is made of it is
known, and so on to the solver (``solver.done``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from gshard.core.sharding import Sharding
from gshard.solver.problem import Floats


class Once:
    """Shardings and tables of one problem, by what they follow from."""

    def __init__(self) -> None:
        self._states: dict[object, tuple[Sharding, ...]] = {}
        self._equal: dict[tuple[Sharding, ...], tuple[Sharding, ...]] = {}
        self._tables: dict[object, Floats] = {}
        self._sums: dict[tuple[int, ...], tuple[Floats, Floats]] = {}  # with what they are of, so that it stays

    def states(self, key: object, find: Callable[[], Iterable[Sharding]]) -> tuple[Sharding, ...]:
        """Shardings to choose from. Equal ones are one object, whatever they follow from."""
        if key not in self._states:
            found = tuple(find())
            self._states[key] = self._equal.setdefault(found, found)
        return self._states[key]

    def table(self, key: object, find: Callable[[], Floats]) -> Floats:
        """What choices cost. It is not to be written to."""
        if key not in self._tables:
            self._tables[key] = find()
        return self._tables[key]

    def plus(self, cost: Floats, times: int, table: Floats) -> Floats:
        """A cost and what something costs besides that happens so often."""
        key = id(cost), times, id(table)
        if key not in self._sums:
            self._sums[key] = cost, cost + times * table
        return self._sums[key][1]

    def often(self, times: int, table: Floats) -> Floats:
        """What something costs that happens so often; what cannot be cannot, also in a loop without rounds."""
        if times == 1:
            return table
        key = times, id(table)
        if key not in self._sums:
            self._sums[key] = table, np.where(np.isinf(table), np.inf, times * np.where(np.isinf(table), 0.0, table))
        return self._sums[key][1]
