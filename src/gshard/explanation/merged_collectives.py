"""Merged collectives: those that differ in nothing but the array (or the layer) are one row, with its modelled time."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from gshard.core.mesh import Atoms
from gshard.core.spmd import Collective, SpmdProgram
from gshard.device.cost import Cost
from gshard.device.origin import origins, place_of
from gshard.explanation.rows import together
from gshard.naming.array_names import ArrayNames


@dataclasses.dataclass(frozen=True, slots=True)
class MergedCollective:
    """Collectives that differ in nothing but the array, as one."""

    collective: Collective  # one of them, with the times of all
    # of all runs, as modelled. Of equal ones in one place the compiler keeps one, and so does the model.
    seconds: float
    kernels: tuple[int, ...]  # their numbers among the costed kernels
    # of permutations, which position of a group sends to which, in one of them or another
    pairs: tuple[tuple[int, int], ...] = ()
    over: Atoms = ()  # the atoms that these groups are over
    every: tuple[Collective, ...] = dataclasses.field(default=(), repr=False)  # all of them


def merged(spmd: SpmdProgram, found: Cost, names: ArrayNames | None = None) -> tuple[MergedCollective, ...]:
    """The collectives of a program, those that send most first."""
    kernels: dict[int, list[int]] = {}
    for i, c in enumerate(origins(spmd, found)):
        if c is not None:
            kernels.setdefault(id(c), []).append(i)
    rows = rows_of(spmd.collectives, names)
    return tuple(_merge(same, [i for c in same for i in kernels.get(id(c), ())], found) for same in rows)


def rows_of(collectives: Sequence[Collective], names: ArrayNames | None = None) -> list[list[Collective]]:
    """The collectives that differ in nothing but the array, together; those that send most in all first."""
    rows: dict[Hashable, list[Collective]] = {}
    for i, alike in enumerate([collectives] if names is None else together(collectives, names)):
        for c in alike:
            places = (place_of(c.cause), place_of(c.emitted))
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
