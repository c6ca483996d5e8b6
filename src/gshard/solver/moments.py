"""Moments: selects the moments of memory that can be the fullest, so that others can be ignored.

>>> full, less = np.array([8.0, 4.0]), np.array([3.0, 4.0])
>>> fullest_moments([(0, (0, 2), full), (1, (1, 3), less), (1, (2, 4), less)], 4).tolist()
[1, 2]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gshard.solver.problem import Floats, Ints


def fullest_moments(spans: Sequence[tuple[int, tuple[int, int], Floats]], count: int) -> Ints:
    """The moments that matter: at the others every state of every node takes at most what it takes at one of these.

    Args:
        spans: loads: node, from which moment to before which, bytes by state.
        count: of the moments.
    """
    starts: list[list[tuple[int, Floats]]] = [[] for _ in range(count + 1)]
    for node, (first, last), amount in spans:
        starts[first].append((node, amount))
        starts[last].append((node, -amount))
    left: list[int] = []
    apart: dict[int, Floats] = {}  # by node: bytes now less bytes at the last moment that is left
    for moment in range(count):
        for node, amount in starts[moment]:
            apart[node] = apart[node] + amount if node in apart else amount
        apart = {node: amount for node, amount in apart.items() if amount.any()}
        if left and all((amount <= 0).all() for amount in apart.values()):
            continue
        if left and all((amount >= 0).all() for amount in apart.values()):
            left.pop()
        left.append(moment)
        apart = {}
    return np.array(left, dtype=np.int64)
