"""Limits how many axes may differ from the propagated places, if there are too many choices to compare all.

A choice gives each axis one dimension, or none. With up to three axes, all choices are compared. With many axes
(``axis_steps.has_many``), at most two of them may differ from the propagated places, or from no place. If a program is
large, even these are too many, with three or more axes or with an axis in several parts: nodes have hundreds of states
and tables tens of thousands of entries, so that building the problem takes long and its solution ends far from the
best. There, at most one axis may differ, and the parts of it that differ have one place.
"""

from __future__ import annotations

import itertools
import math

from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import Program, Value
from gshard.core.rule import REPLICATE
from gshard.planning.axis_steps import FEW, FEW_PARTS, has_many, parts_of

MANY_AXES, LARGE_PROGRAM = 2, 1  # the numbers of axes that may differ
NEAR_PLAN = 1  # the same, of choices near a plan that is known
LARGE = 2e6  # entries of all tables: such a problem takes some seconds to build and solve


def changes(program: Program, mesh: Mesh, axes: tuple[Atoms, ...]) -> int | None:
    """How many axes may differ from the propagated places; None if all may.

    Args:
        program: the program to plan.
        mesh: the devices.
        axes: the axes that move as wholes.
    """
    parts = parts_of(mesh, axes)
    has_several = sum(map(bool, parts)) >= FEW or any(len(part) > FEW_PARTS for part in parts)
    if has_several and estimated_entries(program, mesh, axes) > LARGE:
        return LARGE_PROGRAM
    return MANY_AXES if has_many(mesh, axes) else None


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
        options = places + 1
        others = [(options**n if n <= FEW_PARTS else options + (n - 1) * options * places) - 1 for n in parts]
        return sum(math.prod(some) for k in range(most + 1) for some in itertools.combinations(others, k))

    entries = 0.0
    for e in program.block.walk():
        if e.rule is not None:
            factors = sum(f.kind != REPLICATE and f.size > 1 for f in e.rule.factors)
            ranks = [sum(n > 1 for n in v.shape) for v in (*e.inputs, *e.outputs) if isinstance(v, Value)]
            entries += choices(factors) * sum(map(choices, ranks))
    return entries
