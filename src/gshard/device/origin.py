"""Matches each collective kernel of a priced program with the collective that the partitioner emitted.

The match gives the source line that caused the collective. A collective has two lines. The equation that *causes* it
leaves an unreduced result, or needs an operand in another sharding. gshard *emits* it where the result is first used,
which may be later. Bytes and seconds belong to the line that caused them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from gshard.core.jax_adapter import user_place
from gshard.core.program import Equation
from gshard.core.spmd import Collective, SpmdProgram
from gshard.device.cost import Cost, KernelCost
from gshard.device.fusion_model import COLLECTIVE


def cause_of(kernel: KernelCost, collective: Collective | None) -> Equation:
    """The equation to whose line a kernel's bytes and seconds belong."""
    return kernel.equation if collective is None or collective.cause is None else collective.cause


def origins(spmd: SpmdProgram, found: Cost) -> tuple[Collective | None, ...]:
    """For each priced kernel, its collective; None for kernels that send nothing.

    Both are in the order in which they were emitted. Equal collectives are distinguished by the place where they were
    emitted, and then by their order.
    """
    unmatched = [(i, k) for i, k in enumerate(found.kernels) if k.kind == COLLECTIVE]
    collectives = list(spmd.collectives)
    pairs: dict[int, Collective] = {}
    for attributes in _KEYS:
        queues: dict[Hashable, deque[Collective]] = {}
        for c in collectives:
            values = (c.kind, c.bytes, c.times, place_of(c.emitted), c.atoms)
            queues.setdefault(tuple(values[i] for i in attributes), deque()).append(c)
        for i, k in unmatched:
            values = (k.name, k.sent, k.times, place_of(k.equation), k.axes)
            candidates = queues.get(tuple(values[i] for i in attributes))
            if i not in pairs and candidates:
                pairs[i] = candidates.popleft()
        collectives = [c for queue in queues.values() for c in queue]
    return tuple(pairs.get(i) for i in range(len(found.kernels)))


# The attributes that must be equal: kind, bytes, times, place and atoms; then without the atoms, because a permutation
# along some atoms is emitted over all; then without times and place.
_KEYS = ((0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 4))


def place_of(e: Equation | None) -> tuple[str, int] | None:
    """File and line of an equation; None for no equation."""
    return None if e is None else user_place(e.source_info)
