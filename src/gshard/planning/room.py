"""Room: the bytes of arrays beyond those of the marks, and how many of them a loop may hold.

A loop holds what is brought there before it begins, what its rounds stack, and what they carry. Weights that marks
split are gathered one layer at a time, and their gradients scattered in the rounds that make them, also where they are
added up over micro-batches. To hold all of them would send less, and would not fit. A stack that is small beside the
largest array of a round may be gathered or reduced at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gshard.core.mesh import Mesh
from gshard.core.plan import local_bytes
from gshard.core.program import Edge, Equation, Value
from gshard.core.sharding import Sharding
from gshard.planning.graph import SMALL, STACKED, WHOLE, Brought, largest_of_round
from gshard.planning.propagated import Propagated
from gshard.solver.problem import Bools, Floats


class Room:
    """The room of the loops of a program.

    Args:
        loops: what runs its body more than once.
        propagated: what follows from the marks; where there are none, loops hold what they like.
        mesh: the devices.
    """

    def __init__(self, loops: Collection[Equation], propagated: Propagated | None, mesh: Mesh):
        self._loops, self._propagated, self._mesh = loops, propagated, mesh
        self._largest: dict[Equation, int] = {}

    def more(self, e: Equation, edge: Edge, sizes: Sequence[int]) -> Floats | None:
        """float64 [states]: by how many bytes a value at a loop's boundary is more than the marks say.

        Args:
            e: the loop.
            edge: the value outside and the one inside.
            sizes: for each state the bytes of the value outside.

        Returns:
            None if ``e`` is no loop, or nothing is known of marks.
        """
        if self._propagated is None or e not in self._loops:
            return None
        known, stacked = self._propagated.shardings, len(edge.outer.shape) - len(edge.inner.shape)
        least = local_bytes(edge.outer, known[edge.outer], self._mesh)
        if stacked:
            inside = Sharding(((),) * stacked + known[edge.inner].dims)
            least = max(least, local_bytes(edge.outer, inside, self._mesh))
        return np.array(sizes, float) - least

    def beyond(self, group: Sequence[Value], states: Sequence[Sharding]) -> Floats:
        """float64 [states]: by how many bytes the largest of some values is more than the marks say; else zero.

        Args:
            group: values that are sharded alike.
            states: how.
        """
        if self._propagated is None:
            return np.zeros(len(states))
        v = max(group, key=lambda v: v.bytes)
        sizes = np.array([local_bytes(v, s, self._mesh) for s in states], float)
        return (sizes - local_bytes(v, self._propagated.shardings[v], self._mesh)).clip(0)

    def brought(self, node: int, e: Equation, more: Floats, stacked: bool) -> Brought:
        """Values that a loop reads from outside, unchanged or moved, by the states of a node for both.

        An unchanged value counts for the loop only if it is a stack, because a stack is held until the loop
        ends.
        """
        unchanged = more if stacked else np.zeros(len(more))
        return Brought(node, e, np.concatenate([unchanged, more]), STACKED if stacked else WHOLE)

    def fits(self, e: Equation, more: Floats) -> Bools:
        """bool [states]: whether so much more is small beside the largest array that a round makes, as marks say."""
        assert self._propagated is not None
        if e not in self._largest:
            self._largest[e] = largest_of_round(e, self._propagated.shardings, self._mesh)
        return more <= SMALL * self._largest[e]
