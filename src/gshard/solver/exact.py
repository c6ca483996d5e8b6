"""Exact: finds the best solution by enumeration, if there are few enough states.

Nodes without loads are eliminated, the one that leaves the smallest table first (bucket elimination; Dechter,
Artificial Intelligence 1999); tables may be of many nodes. What is left are nodes with loads: all their choices
together are one more table, from which goes what does not fit.
"""

from __future__ import annotations

import math

import numpy as np

from gshard.solver.problem import Floats, Ints, Problem

TABLE = 1_000_000  # entries of the largest table
NODES = 500  # that are eliminated: for more, messages are quicker
WORK = 30_000_000  # entries of all tables, and of the choices of nodes with loads times the moments


def exact(problem: Problem) -> list[Ints] | None:
    """States of least value that fit, in a list that is empty if nothing fits; None if that is too much work.

    >>> exact(Problem.of([[0, 3], [1, 0]], [(0, 1, [[9, 9], [0, 9]])]))
    [array([1, 0])]
    """
    order = _order(problem)
    if order is None:
        return None
    tables: list[tuple[tuple[int, ...], Floats]] = [((i,), cost) for i, cost in enumerate(problem.costs)]
    tables += [((u, v), table) for (u, v), table in zip(problem.ends.tolist(), problem.tables)]
    gone: list[tuple[int, tuple[int, ...], Floats]] = []
    for node in order:
        near = [entry for entry in tables if node in entry[0]]
        scope = tuple(sorted({i for nodes, _ in near for i in nodes}))
        total = _sum(near, scope)
        axis = scope.index(node)
        tables = [entry for entry in tables if node not in entry[0]]
        rest = tuple(i for i in scope if i != node)
        tables.append((rest, total.min(axis)))
        gone.append((node, rest, total.argmin(axis)))
    eliminated = set(order)
    left = tuple(i for i in range(len(problem.costs)) if i not in eliminated)
    total = _sum(tables, left, tuple(problem.costs[i].size for i in left))
    if problem.limit is not None:
        for moment in range(len(problem.moments)):
            used = _sum(
                [((load.node,), load.bytes) for load, (a, b) in zip(problem.loads, problem.rows) if a <= moment < b],
                left,
                total.shape,
            )
            total = np.where(used <= problem.limit, total, np.inf)
    best = np.unravel_index(int(total.argmin()), total.shape) if left else ()
    if not np.isfinite(total[best]):
        return []
    states = np.zeros(len(problem.costs), dtype=np.int64)
    states[list(left)] = best
    for node, rest, choice in reversed(gone):
        states[node] = choice[tuple(states[list(rest)])] if rest else int(choice)
    return [states]


def _order(problem: Problem) -> list[int] | None:
    """The nodes without loads in the order of their elimination, or None if tables become too large."""
    size = problem.states.tolist()
    loaded = {load.node for load in problem.loads} if problem.limit is not None else set()
    left = math.prod(size[i] for i in sorted(loaded))
    if left > TABLE or left * max(1, len(problem.moments)) > WORK:
        return None
    near: list[set[int]] = [set() for _ in size]
    for u, v in problem.ends.tolist():
        near[u].add(v)
        near[v].add(u)
    free, order, work = [i for i in range(len(size)) if i not in loaded], [], 0
    if len(free) > NODES:
        return None
    while free:
        table, node = min((math.prod(size[j] for j in near[i]) * size[i], i) for i in free)
        work += table
        if table > TABLE or work > WORK or len(near[node]) > 24:
            return None
        for j in near[node]:
            near[j] |= near[node]
            near[j] -= {j, node}
        order.append(node)
        free.remove(node)
    return order


def _sum(tables: list[tuple[tuple[int, ...], Floats]], scope: tuple[int, ...], shape: tuple[int, ...] = ()) -> Floats:
    """The sum of tables, as one over the nodes of ``scope``, which are increasing as those of each table are."""
    total = np.zeros(shape)
    for nodes, table in tables:
        extents = dict(zip(nodes, table.shape))
        total = total + table.reshape([extents.get(i, 1) for i in scope])
    return total
