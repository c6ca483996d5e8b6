"""Random problems for the tests of the search, and their exhaustive optimum."""

import itertools

import numpy as np

from gshard.solver.problem import Problem


def random_problem(rng, nodes=6, states=4, memory=True, density=0.5, forbidden=0.15, tight=0.5):
    """Whole-numbered costs, so that sums are exact; tables with holes, some by which a node follows from another."""
    n = int(rng.integers(1, nodes + 1))
    sizes = rng.integers(1, states + 1, n)
    costs = [rng.integers(0, 50, s).astype(float) for s in sizes]
    edges = []
    for u, v in itertools.combinations(range(n), 2):
        if rng.random() > density:
            continue
        table = rng.integers(0, 40, (sizes[u], sizes[v])).astype(float)
        kind = rng.random()
        if kind < 0.15:
            table += np.where(rng.integers(0, sizes[u], sizes[v]) == np.arange(sizes[u])[:, None], 0, np.inf)
        elif kind < 0.25:
            table = rng.integers(0, 9, (sizes[u], 1)) + rng.integers(0, 9, (1, sizes[v])).astype(float)
        elif kind < 0.7:
            table[rng.random(table.shape) < forbidden] = np.inf
        edges.append((u, v, table) if rng.random() < 0.5 else (v, u, table.T))
    if edges and rng.random() < 0.3:
        edges.append(edges[0])  # parallel edges
    for cost in costs:
        cost[rng.random(cost.size) < forbidden / 3] = np.inf
        cost[rng.integers(cost.size)] = 3.0
    if not memory:
        return Problem.of(costs, edges)
    loads = []
    for i in range(n):
        for _ in range(rng.integers(0, 3)):
            start = int(rng.integers(0, 8))
            loads.append((i, start, start + int(rng.integers(0, 6)), rng.integers(0, 20, sizes[i])))
    free = Problem.of(costs, edges, loads)
    peaks = [free.peak([int(rng.integers(s)) for s in sizes]) for _ in range(8)]
    return Problem.of(costs, edges, loads, limit=float(np.quantile(peaks, tight)))


def exhaustive(problem):
    """The least value of all that fits, by trying everything; ``inf`` where nothing does."""
    everything = itertools.product(*(range(s) for s in problem.states))
    return min((problem.value(x) for x in everything if problem.fits(x)), default=np.inf)


def layered(seed, layers=5, width=4, states=4, room=0.5, memory=True):
    """A problem too large to be written down: layers of nodes, tables between neighbours, some shortcuts, and loads."""
    rng = np.random.default_rng(seed)
    n = layers * width
    sizes = rng.integers(2, states + 1, n)
    pairs = {(i, i + width) for i in range(n - width)}
    pairs |= {(i, min(n - 1, i + int(rng.integers(1, 2 * width)))) for i in range(n)}
    edges = []
    for u, v in sorted(pair for pair in pairs if pair[0] != pair[1]):
        table = rng.integers(0, 100, (sizes[u], sizes[v])).astype(float)
        table[rng.random(table.shape) < 0.05] = np.inf
        table[0, 0] = 90
        edges.append((u, v, table))
    costs = [rng.integers(0, 100, s).astype(float) for s in sizes]
    if not memory:
        return Problem.of(costs, edges)
    loads = [(i, i, i + int(rng.integers(2, 3 * width)), rng.integers(0, 100, sizes[i])) for i in range(n)]
    free = Problem.of(costs, edges, loads)
    peaks = [free.peak(rng.integers(0, sizes)) for _ in range(100)]
    return Problem.of(costs, edges, loads, limit=float(np.quantile(peaks, 1 - room)))
