"""Selects the moments at which memory can be fullest, so that the solver can ignore the others.

>>> full, less = np.array([8.0, 4.0]), np.array([3.0, 4.0])
>>> fullest_moments([(0, (0, 2), full), (1, (1, 3), less), (1, (2, 4), less)], 4).tolist()
[1, 2]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gshard.solver.problem import Floats, Ints


def fullest_moments(spans: Sequence[tuple[int, tuple[int, int], Floats]], count: int) -> Ints:
    """The moments that matter: at any other moment, every state takes at most what it takes at one of these."""
    starts: list[list[tuple[int, Floats]]] = [[] for _ in range(count + 1)]
    for node, (first, last), amount in spans:
        starts[first].append((node, amount))
        starts[last].append((node, -amount))
    kept: list[int] = []
    difference: dict[int, Floats] = {}  # by node: bytes now minus bytes at the last kept moment
    for moment in range(count):
        for node, amount in starts[moment]:
            difference[node] = difference[node] + amount if node in difference else amount
        difference = {node: amount for node, amount in difference.items() if amount.any()}
        if kept and all((amount <= 0).all() for amount in difference.values()):
            continue
        if kept and all((amount >= 0).all() for amount in difference.values()):
            kept.pop()
        kept.append(moment)
        difference = {}
    return np.array(kept, dtype=np.int64)
