"""Origin: the collective of the plan that each collective of the costed program is, and so which line caused it.

A collective has two lines. It is *caused* by the equation that leaves parts of a sum, or that needs an operand in
another sharding; it is *emitted* where what is moved is first used, which may be later. Bytes and seconds belong to the
line that caused them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Sequence

from gshard.analysis.array_names import ArrayNames
from gshard.analysis.cost import Cost, KernelCost
from gshard.analysis.rows import together
from gshard.core.jax_adapter import user_place
from gshard.core.mesh import Atoms
from gshard.core.program import Equation
from gshard.core.spmd import Collective, SpmdProgram
from gshard.passes.device_program import COLLECTIVE


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
            known = (c.kind, c.bytes, c.times, _place(c.emitted), c.atoms)
            queues.setdefault(tuple(known[i] for i in told), deque()).append(c)
        for i, k in sought:
            known = (k.name, k.sent, k.times, _place(k.equation), k.axes)
            waiting = queues.get(tuple(known[i] for i in told))
            if i not in pairs and waiting:
                pairs[i] = waiting.popleft()
        left = [c for queue in queues.values() for c in queue]
    return tuple(pairs.get(i) for i in range(len(found.kernels)))


# By what they are told apart: kind, bytes, times, place and atoms; else without the atoms, for what permutes along some
# of them is emitted over all; else without times and place.
_KEYS = ((0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 4))


@dataclasses.dataclass(frozen=True, slots=True)
class MergedCollective:
    """Collectives that differ in nothing but the array, as one.

    Attributes:
        collective: one of them, with the times of all.
        seconds: of all runs, as modelled. Of equal ones in one place the compiler keeps one, and so does the model.
        kernels: their numbers among the costed kernels.
        pairs: of permutations, which position of a group sends to which, in one of them or another.
        over: the atoms that these groups are over.
        every: all of them.
    """

    collective: Collective
    seconds: float
    kernels: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    over: Atoms = ()
    every: tuple[Collective, ...] = dataclasses.field(default=(), repr=False)


def merged(spmd: SpmdProgram, found: Cost, names: ArrayNames | None = None) -> tuple[MergedCollective, ...]:
    """The collectives of a program, those that send most first.

    Args:
        spmd: the program.
        found: its cost.
        names: as for ``rows_of``.
    """
    kernels: dict[int, list[int]] = {}
    for i, c in enumerate(origins(spmd, found)):
        if c is not None:
            kernels.setdefault(id(c), []).append(i)
    rows = rows_of(spmd.collectives, names)
    return tuple(_merge(same, [i for c in same for i in kernels.get(id(c), ())], found) for same in rows)


def rows_of(collectives: Sequence[Collective], names: ArrayNames | None = None) -> list[list[Collective]]:
    """The collectives that differ in nothing but the array, together; those that send most in all first.

    Args:
        collectives: of a program.
        names: what its arrays are called: then those together differ in nothing but the layer.
    """
    rows: dict[Hashable, list[Collective]] = {}
    for i, alike in enumerate([collectives] if names is None else together(collectives, names)):
        for c in alike:
            places = (_place(c.cause), _place(c.emitted))
            why = c.why if names is None else ""
            rows.setdefault((i, c.kind, c.atoms, c.bytes, c.shape, c.line, why, places), []).append(c)
    return sorted(rows.values(), key=lambda same: -sum(c.total_bytes for c in same))


def _merge(same: list[Collective], kernels: list[int], found: Cost) -> MergedCollective:
    times = sum(c.times for c in same)
    costed = [found.kernels[i] for i in kernels]
    seconds = sum(k.total_seconds for k in costed)
    one = dataclasses.replace(same[0], times=times)
    over = costed[0].axes if costed else one.atoms
    pairs = {(int(a), int(b)) for k in costed if k.axes == over for a, b in k.equation.params.get("perm", ())}
    return MergedCollective(one, seconds, tuple(kernels), tuple(sorted(pairs)), over, tuple(same))


def _place(e: Equation | None) -> tuple[str, int] | None:
    return None if e is None else user_place(e.source_info)
