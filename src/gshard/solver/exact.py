"""Finds the best solution by enumeration, if there are few enough states.

Nodes without loads are eliminated, the one that leaves the smallest table first (bucket elimination; Dechter,
Artificial Intelligence 1999); tables may have many nodes. Then all choices of the remaining nodes, those with loads,
form one table, without the choices that do not fit.
"""

from __future__ import annotations

import math

import numpy as np

from gshard.solver.problem import Floats, Ints, Problem

TABLE = 1_000_000  # entries of the largest table
NODES = 500  # eliminated nodes; for more, messages are faster
WORK = 30_000_000  # entries of all tables, and the choices of nodes with loads times the moments


def exact(problem: Problem) -> list[Ints] | None:
    """The cheapest states that fit, in a list, which is empty if nothing fits; None if the problem is too large.

    >>> exact(Problem.of([[0, 3], [1, 0]], [(0, 1, [[9, 9], [0, 9]])]))
    [array([1, 0])]
    """
    order = _order(problem)
    if order is None:
        return None
    tables: list[tuple[tuple[int, ...], Floats]] = [((i,), cost) for i, cost in enumerate(problem.costs)]
    tables += [((u, v), table) for (u, v), table in zip(problem.ends.tolist(), problem.tables)]
    eliminations: list[tuple[int, tuple[int, ...], Floats]] = []
    for node in order:
        tables_of_node = [entry for entry in tables if node in entry[0]]
        scope = tuple(sorted({i for nodes, _ in tables_of_node for i in nodes}))
        total = _sum(tables_of_node, scope)
        axis = scope.index(node)
        tables = [entry for entry in tables if node not in entry[0]]
        other_nodes = tuple(i for i in scope if i != node)
        tables.append((other_nodes, total.min(axis)))
        eliminations.append((node, other_nodes, total.argmin(axis)))
    eliminated = set(order)
    remaining = tuple(i for i in range(len(problem.costs)) if i not in eliminated)
    total = _sum(tables, remaining, tuple(problem.costs[i].size for i in remaining))
    if problem.limit is not None:
        for moment in range(len(problem.moments)):
            used = _sum(
                [((load.node,), load.bytes) for load, (a, b) in zip(problem.loads, problem.rows) if a <= moment < b],
                remaining,
                total.shape,
            )
            total = np.where(used <= problem.limit, total, np.inf)
    best = np.unravel_index(int(total.argmin()), total.shape) if remaining else ()
    if not np.isfinite(total[best]):
        return []
    states = np.zeros(len(problem.costs), dtype=np.int64)
    states[list(remaining)] = best
    for node, other_nodes, choice in reversed(eliminations):
        states[node] = choice[tuple(states[list(other_nodes)])] if other_nodes else int(choice)
    return [states]


def _order(problem: Problem) -> list[int] | None:
    """The nodes without loads in the order of their elimination; None if tables become too large."""
    size = problem.states.tolist()
    loaded = {load.node for load in problem.loads} if problem.limit is not None else set()
    loaded_choices = math.prod(size[i] for i in sorted(loaded))
    if loaded_choices > TABLE or loaded_choices * max(1, len(problem.moments)) > WORK:
        return None
    neighbours: list[set[int]] = [set() for _ in size]
    for u, v in problem.ends.tolist():
        neighbours[u].add(v)
        neighbours[v].add(u)
    remaining, order, work = [i for i in range(len(size)) if i not in loaded], [], 0
    if len(remaining) > NODES:
        return None
    table_of = {i: math.prod(size[j] for j in neighbours[i]) * size[i] for i in remaining}
    while table_of:
        table, node = min((table, i) for i, table in table_of.items())
        work += table
        if table > TABLE or work > WORK or len(neighbours[node]) > 24:
            return None
        del table_of[node]
        for j in neighbours[node]:
            neighbours[j] |= neighbours[node]
            neighbours[j] -= {j, node}
        table_of |= {i: math.prod(size[j] for j in neighbours[i]) * size[i] for i in neighbours[node] if i in table_of}
        order.append(node)
    return order


def _sum(tables: list[tuple[tuple[int, ...], Floats]], scope: tuple[int, ...], shape: tuple[int, ...] = ()) -> Floats:
    """The sum of tables as one table over the nodes of ``scope``. Nodes increase in ``scope`` and in each table."""
    total = np.zeros(shape)
    for nodes, table in tables:
        extents = dict(zip(nodes, table.shape))
        total = total + table.reshape([extents.get(i, 1) for i in scope])
    return total
