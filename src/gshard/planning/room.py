"""Computes the bytes of arrays beyond those of the marks, and how many of them a loop may hold.

A loop holds the values that it reads from outside, the values that its iterations stack, and those that they pass on.
gshard gathers weights that marks split one layer at a time, and scatters their gradients in the iterations that compute
them, also if micro-batches add them up. To hold all of them at once would send less, but would not fit into memory. A
stack that is small beside the largest array of an iteration may be gathered or reduced at once
(``graph.without_excess_in_loops``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gshard.core.mesh import Mesh
from gshard.core.plan import local_bytes
from gshard.core.program import Edge, Equation, Value
from gshard.core.sharding import Sharding
from gshard.planning.graph import SMALL, STACKED, WHOLE, LoopBytes, largest_of_iteration
from gshard.planning.propagated import Propagated
from gshard.solver.problem import Bools, Floats


class Room:
    """The bytes that the loops of a program may hold."""

    def __init__(self, loops: Collection[Equation], propagated: Propagated | None, mesh: Mesh):
        self._loops, self._propagated, self._mesh = loops, propagated, mesh
        self._largest: dict[Equation, int] = {}

    def extra_bytes(self, e: Equation, edge: Edge, sizes: Sequence[int]) -> Floats | None:
        """float64 [states]: bytes of a value at a loop's boundary beyond those of the marks."""
        if self._propagated is None or e not in self._loops:
            return None
        shardings, stacked_dims = self._propagated.shardings, len(edge.outer.shape) - len(edge.inner.shape)
        least = local_bytes(edge.outer, shardings[edge.outer], self._mesh)
        if stacked_dims:
            inside = Sharding(((),) * stacked_dims + shardings[edge.inner].dims)
            least = max(least, local_bytes(edge.outer, inside, self._mesh))
        return np.array(sizes, float) - least

    def extra_bytes_of_group(self, group: Sequence[Value], states: Sequence[Sharding]) -> Floats:
        """float64 [states]: bytes of the largest value of a group beyond those of the marks, at least 0."""
        if self._propagated is None:
            return np.zeros(len(states))
        v = max(group, key=lambda v: v.bytes)
        sizes = np.array([local_bytes(v, s, self._mesh) for s in states], float)
        return (sizes - local_bytes(v, self._propagated.shardings[v], self._mesh)).clip(0)

    def loop_input(self, node: int, e: Equation, extra_bytes: Floats, is_stacked: bool) -> LoopBytes:
        """The bytes of a value that a loop reads from outside.

        The states of the node are the shardings of the unchanged value, then those of a copy. An unchanged value counts
        only if it is a stack, because memory holds a stack until the loop ends.
        """
        unchanged = extra_bytes if is_stacked else np.zeros(len(extra_bytes))
        return LoopBytes(node, e, np.concatenate([unchanged, extra_bytes]), STACKED if is_stacked else WHOLE)

    def fits(self, e: Equation, extra_bytes: Floats) -> Bools:
        """bool [states]: whether the extra bytes are few beside the largest array of an iteration under the marks."""
        assert self._propagated is not None
        if e not in self._largest:
            self._largest[e] = largest_of_iteration(e, self._propagated.shardings, self._mesh)
        return extra_bytes <= SMALL * self._largest[e]
