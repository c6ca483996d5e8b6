"""Limits how many axes may differ from the propagated places, if there are too many choices to compare all.

A choice gives each axis one dimension, or none. With up to three axes, all choices are compared. With many axes
(``axes.has_many``), at most two of them may differ from the propagated places, or from no place. If a program is
large, even these are too many, with three or more axes or with an axis in several parts: nodes have hundreds of states
and tables tens of thousands of entries, so that building the problem takes long and its solution ends far from the
best. There, at most one axis may differ, and the parts of it that differ have one place. Axes that some known sharding
has in a row may go to one place as if they were one axis, so that a plan does not depend on how an axis is divided.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import Program, Value
from gshard.core.rule import REPLICATE
from gshard.core.sharding import Sharding
from gshard.planning.axes import FEW, FEW_PARTS, has_many, parts_of

MANY_AXES, LARGE_PROGRAM = 1, 1  # the numbers of axes that may differ
NEAR_PLAN = 1  # the same, of choices near a plan that is known
LARGE = 2e6  # entries of all tables: such a problem takes some seconds to build and solve


class Nearby(NamedTuple):
    """Which choices near known shardings are compared.

    Attributes:
        changes: how many axes may differ from a known sharding, or from no place.
        runs: axes that differ together, in one place, count as one.
    """

    changes: int
    runs: tuple[Atoms, ...]


def nearby(
    program: Program, mesh: Mesh, axes: tuple[Atoms, ...], known: Iterable[Sharding], *, near_plan: bool = False
) -> Nearby | None:
    """Which choices are compared for a program; None for all.

    Args:
        program: the program to plan.
        mesh: the devices.
        axes: the axes that move as wholes.
        known: the propagated shardings, or those of a known plan.
        near_plan: whether the choices near a known plan are compared.
    """
    parts = parts_of(mesh, axes)
    has_several = len(parts) >= FEW or any(len(part) > FEW_PARTS for part in parts)
    if near_plan:
        changes = NEAR_PLAN
    elif has_several and estimated_entries(program, mesh, axes) > LARGE:
        changes = LARGE_PROGRAM
    elif has_many(mesh, axes):
        changes = MANY_AXES
    else:
        return None
    rows = dict.fromkeys(atoms for sharding in known for atoms in sharding.dims)
    runs = [atoms for atoms in rows if sum(set(axis) <= set(atoms) for axis in axes) > 1]
    return Nearby(changes, tuple(runs))


def estimated_entries(program: Program, mesh: Mesh, axes: tuple[Atoms, ...]) -> float:
    """An estimate of the entries of all tables between values and equations, without the limit for large programs.

    Each axis has one dimension of a value, or none, and one factor of an equation, or none. With many axes, two of them
    have any place, and the others have the propagated one.
    """
    parts = tuple(len(part) for part in parts_of(mesh, axes))
    return _entries(program, parts, MANY_AXES if has_many(mesh, axes) else len(parts))


@tabulated(16)
def _entries(program: Program, parts: tuple[int, ...], most: int) -> float:
    """Estimates the entries for some axes.

    Args:
        program: the program.
        parts: for each axis, the number of its parts.
        most: how many axes may have any place.
    """

    def choices(places: int) -> int:
        """The number of choices. Of an axis in several parts, the first parts have one place, the others another."""
        options, count_of = places + 1, [1] + [0] * most  # for each number of axes that differ, the number of choices
        for n in parts:
            others = (options**n if n <= FEW_PARTS else options + (n - 1) * options * places) - 1
            count_of = [count + others * fewer for count, fewer in zip(count_of, [0, *count_of], strict=False)]
        return sum(count_of)

    entries = 0.0
    for e in program.block.walk():
        if e.rule is not None:
            factors = sum(f.kind != REPLICATE and f.size > 1 for f in e.rule.factors)
            ranks = [sum(n > 1 for n in v.shape) for v in (*e.inputs, *e.outputs) if isinstance(v, Value)]
            entries += choices(factors) * sum(map(choices, ranks))
    return entries
