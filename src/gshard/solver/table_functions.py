"""Computes on the cost tables of one node or edge: allowed entries, sums, merged, dominated and best states.

These functions are pure, so that ``solver.done`` computes them once for equal tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gshard.solver.problem import Floats, Ints


def all_states(cost: Floats) -> Ints:
    """int64 [states]: the numbers of all states."""
    return np.arange(cost.size)


def finite_states(cost: Floats) -> np.ndarray | None:
    """bool [states]: the allowed states; None if all are."""
    finite = np.isfinite(cost)
    return None if finite.all() else finite


def allowed_entries(table: Floats) -> tuple[np.ndarray | None, np.ndarray | None, bool, Ints | None, Ints | None]:
    """Finds the allowed entries of a table."""
    allowed = np.isfinite(table)
    count = np.count_nonzero(allowed)
    if count == table.size:
        return None, None, _is_sum(table), None, None
    rows, columns = np.asarray(allowed.any(1)), np.asarray(allowed.any(0))
    by_column = allowed.argmax(0) if count == table.shape[1] else None
    by_row = allowed.argmax(1) if count == table.shape[0] else None
    return None if rows.all() else rows, None if columns.all() else columns, False, by_column, by_row


def _is_sum(table: Floats) -> bool:
    if 1 in table.shape or table[0, 0] + table[-1, -1] != table[0, -1] + table[-1, 0]:
        return 1 in table.shape
    return bool((table + table[0, 0] == table[:1] + table[:, :1]).all())


def row_and_column_costs(table: Floats) -> tuple[Floats, Floats]:
    """The costs of rows and of columns that add up to a table."""
    least = int(table[:, 0].argmin())  # the least row in every column, so that no cost becomes negative
    return table[:, 0] - table[least, 0], table[least]


def merged_costs(cost: Floats, table: Floats, choice: Ints) -> Floats:
    """The costs of the chosen states, plus their entries in a table."""
    merged: Floats = cost[choice] + table[choice, np.arange(choice.size)]
    return merged


def least_excess(table: Floats) -> Floats:
    """float64 [b, a]: the least amount by which an entry of row b exceeds that of row a."""
    with np.errstate(invalid="ignore"):
        apart = table[:, None, :] - table[None, :, :]
    if np.isinf(table).any():
        apart[np.isnan(apart)] = np.inf  # forbidden for both
    least: Floats = apart.min(2)
    return least


def dominated_states(cost: Floats, apart: Sequence[Floats], amounts: Sequence[Floats]) -> tuple[tuple[int, int], ...]:
    """Dominated states, the last first, each with a state that costs and holds no more for any neighbours' states."""
    with np.errstate(invalid="ignore"):  # inf - inf: each is allowed where the other one is not
        worse = sum(apart, start=cost[:, None] - cost[None, :]) >= 0
    for amount in amounts:
        worse &= amount[:, None] >= amount[None, :]
    np.fill_diagonal(worse, False)
    remaining, dominated = np.ones(cost.size, dtype=bool), []
    for worse_state in np.flatnonzero(worse.any(1))[::-1].tolist():
        better = np.flatnonzero(worse[worse_state] & remaining)
        if better.size:
            remaining[worse_state] = False
            dominated.append((worse_state, int(better[0])))
    return tuple(dominated)


def best_costs(cost: Floats, *tables: Floats) -> Floats:
    """The least cost of a node for its neighbours' states."""
    return np.asarray(_total_costs(cost, tables).min(0))


def best_state(cost: Floats, *rows: Floats) -> int:
    """The state of the least cost, with these costs at the neighbours' states."""
    for row in rows:
        cost = cost + row
    return int(cost.argmin())


def extra_costs(cost: Floats, *tables: Floats) -> Floats:
    """float64 [states, states of the neighbours]: the cost of each state of a node above the best."""
    total = _total_costs(cost, tables)
    best = np.asarray(total.min(0))
    with np.errstate(invalid="ignore"):  # inf - inf: no state is allowed there
        return np.where(np.isfinite(best), total - best, np.inf)


def _total_costs(cost: Floats, tables: Sequence[Floats]) -> Floats:
    total = cost.reshape(-1, *[1] * len(tables))
    for axis, table in enumerate(tables):
        total = total + table.reshape(-1, *[table.shape[1] if a == axis else 1 for a in range(len(tables))])
    return total
