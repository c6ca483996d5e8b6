"""Interns equal states and equal cost tables of one planning problem, so that each is computed once.

Equal layers have equal states and tables. Because equal ones are one object, everything derived from them is found by
identity, up to the solver (``solver.done``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from gshard.core.sharding import Sharding
from gshard.solver.problem import Floats


class Interned:
    """The states and tables of one problem, by keys of everything that they depend on."""

    def __init__(self) -> None:
        self._states: dict[object, tuple[Sharding, ...]] = {}
        self._equal: dict[tuple[Sharding, ...], tuple[Sharding, ...]] = {}
        self._tables: dict[object, Floats] = {}
        # By identities of tables. The first array of each pair keeps the identity in its key valid.
        self._sums: dict[tuple[int, ...], tuple[Floats, Floats]] = {}

    def states(self, key: object, find: Callable[[], Iterable[Sharding]]) -> tuple[Sharding, ...]:
        """The shardings of a key, computed by ``find`` the first time. Equal tuples are one object, under any key."""
        if key not in self._states:
            found = tuple(find())
            self._states[key] = self._equal.setdefault(found, found)
        return self._states[key]

    def table(self, key: object, find: Callable[[], Floats]) -> Floats:
        """The cost table of a key, computed by ``find`` the first time. Callers must not write to it."""
        if key not in self._tables:
            self._tables[key] = find()
        return self._tables[key]

    def plus(self, cost: Floats, times: int, table: Floats) -> Floats:
        """``cost + times * table``."""
        key = id(cost), times, id(table)
        if key not in self._sums:
            self._sums[key] = cost, cost + times * table
        return self._sums[key][1]

    def often(self, times: int, table: Floats) -> Floats:
        """``times * table``, where ``inf`` stays ``inf`` even if ``times`` is 0."""
        if times == 1:
            return table
        key = times, id(table)
        if key not in self._sums:
            self._sums[key] = table, np.where(np.isinf(table), np.inf, times * np.where(np.isinf(table), 0.0, table))
        return self._sums[key][1]
