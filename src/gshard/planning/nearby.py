"""Limits how many axes may differ from the propagated places, if there are too many choices to compare all.

A choice gives each axis one dimension, or none. With up to three axes, all choices are compared. With many axes
(``axis_steps.has_many``), or if a program is large with three axes or an axis in several parts, these are too many:
nodes have hundreds of states and tables tens of thousands of entries, so that building the problem takes long and its
solution ends far from the best. There, one axis may differ from the propagated places, or from no place, and the parts
of it that differ have one place. Axes that some known sharding has in a row may go to one place as if they were one
axis, so that a plan does not cost more if an axis is divided.
"""

from __future__ import annotations

from collections.abc import Iterable

from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import Program, Value
from gshard.core.rule import REPLICATE
from gshard.core.sharding import Sharding
from gshard.planning.axis_steps import FEW, FEW_PARTS, has_many, parts_of

LARGE = 2e6  # entries of all tables: such a problem takes some seconds to build and solve
Runs = tuple[Atoms, ...]


def is_limited(program: Program, mesh: Mesh, axes: tuple[Atoms, ...]) -> bool:
    """Whether a program has too many choices to compare all."""
    parts = parts_of(mesh, axes)
    has_several = len(parts) >= FEW or any(len(part) > FEW_PARTS for part in parts)
    return has_many(mesh, axes) or (has_several and estimated_entries(program, mesh, axes) > LARGE)


def runs_of(axes: tuple[Atoms, ...], known: Iterable[Sharding]) -> Runs:
    """The atoms that split a dimension of some known sharding, if they are several axes."""
    rows = dict.fromkeys(atoms for sharding in known for atoms in sharding.dims)
    return tuple(atoms for atoms in rows if sum(set(axis) <= set(atoms) for axis in axes) > 1)


def estimated_entries(program: Program, mesh: Mesh, axes: tuple[Atoms, ...]) -> float:
    """An estimate of the entries of all tables between values and equations, without the limit for large programs.

    Each axis has one dimension of a value, or none, and one factor of an equation, or none. With many axes, one of them
    has any place, and the others have the propagated one.
    """
    parts = tuple(len(part) for part in parts_of(mesh, axes))
    return _entries(program, parts, 1 if has_many(mesh, axes) else len(parts))


@tabulated(16)
def _entries(program: Program, parts: tuple[int, ...], most: int) -> float:
    """Estimates the entries for some axes."""

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
