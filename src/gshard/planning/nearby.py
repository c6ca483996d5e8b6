"""Nearby: how many axes may be elsewhere than is expected, where there are too many choices to compare them all.

A choice puts each axis along one dimension, or none. With many axes (``reshard_costs.has_many``), at most two of them
are elsewhere than propagation says, or than in no place. With three axes, or one in several parts, all choices are
compared, unless the program is large: then nodes have hundreds of states, and tables tens of thousands of entries, so
that building the problem takes long and solving it ends far from the best. There at most one axis is elsewhere, and
the parts of it that are elsewhere are together.
"""

from __future__ import annotations

import math

from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Program, Value
from gshard.core.rule import REPLICATE
from gshard.planning.reshard_costs import FEW, FEW_PARTS, has_many, parts_of

MANY_AXES, LARGE_PROGRAM = 2, 1  # axes that may be elsewhere
LARGE = 2e6  # entries of all tables, if all choices are compared: to build and solve it takes some seconds


def changes(program: Program, mesh: Mesh, axes: tuple[Atoms, ...]) -> int | None:
    """How many axes may be elsewhere than is expected; None if all may.

    Args:
        program: what is planned.
        mesh: the devices.
        axes: those that move as wholes.
    """
    if has_many(mesh, axes):
        return MANY_AXES
    parts = parts_of(mesh, axes)
    has_several = sum(map(bool, parts)) == FEW or any(len(own) > FEW_PARTS for own in parts)
    return LARGE_PROGRAM if has_several and estimated_entries(program, mesh, axes) > LARGE else None


def estimated_entries(program: Program, mesh: Mesh, axes: tuple[Atoms, ...]) -> float:
    """About how many entries the tables between values and equations have, if all choices are compared.

    Each axis is along one dimension of a value, or none, and along one factor of an equation, or none.
    """
    parts = [len(own) for own in parts_of(mesh, axes)]

    def choices(places: int) -> int:
        """Of the parts of an axis in several the first ones are in one place and the others in another."""
        one = places + 1
        return math.prod(one**n if n <= FEW_PARTS else one + (n - 1) * one * places for n in parts)

    found = 0.0
    for e in program.block.walk():
        if e.rule is not None:
            factors = sum(f.kind != REPLICATE and f.size > 1 for f in e.rule.factors)
            ranks = [sum(n > 1 for n in v.shape) for v in (*e.inputs, *e.outputs) if isinstance(v, Value)]
            found += choices(factors) * sum(map(choices, ranks))
    return found
