"""Origin: matches each collective kernel of a costed program with the collective that the partitioner emitted.

From that follows which source line caused it.

A collective has two lines. It is *caused* by the equation that leaves parts of a sum, or that needs an operand in
another sharding; it is *emitted* where what is moved is first used, which may be later. Bytes and seconds belong to the
line that caused them.
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
    """The equation whose line a kernel's bytes and seconds belong to."""
    return kernel.equation if collective is None or collective.cause is None else collective.cause


def origins(spmd: SpmdProgram, found: Cost) -> tuple[Collective | None, ...]:
    """For each costed kernel the collective that it is, None for those that send nothing.

    Both are in the order in which they were emitted. Equal ones are told apart by where they were emitted, and among
    those by their order.
    """
    sought = [(i, k) for i, k in enumerate(found.kernels) if k.kind == COLLECTIVE]
    left = list(spmd.collectives)
    pairs: dict[int, Collective] = {}
    for told in _KEYS:
        queues: dict[Hashable, deque[Collective]] = {}
        for c in left:
            known = (c.kind, c.bytes, c.times, place_of(c.emitted), c.atoms)
            queues.setdefault(tuple(known[i] for i in told), deque()).append(c)
        for i, k in sought:
            known = (k.name, k.sent, k.times, place_of(k.equation), k.axes)
            waiting = queues.get(tuple(known[i] for i in told))
            if i not in pairs and waiting:
                pairs[i] = waiting.popleft()
        left = [c for queue in queues.values() for c in queue]
    return tuple(pairs.get(i) for i in range(len(found.kernels)))


# By what they are told apart: kind, bytes, times, place and atoms; else without the atoms, for what permutes along some
# of them is emitted over all; else without times and place.
_KEYS = ((0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 4))


def place_of(e: Equation | None) -> tuple[str, int] | None:
    """File and line of an equation; None for no equation."""
    return None if e is None else user_place(e.source_info)
