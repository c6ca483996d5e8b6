"""Tells how many axes and parts of axes a plan can move in all ways."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from gshard.core.mesh import Atoms, Mesh

# Up to so many axes, reshards may change the order of the axes of a dimension, and all choices are compared.
FEW = 3
# Up to so many parts of one axis may be in any places.
FEW_PARTS = 2


def parts_of(mesh: Mesh, axes: Sequence[Atoms]) -> list[tuple[Atoms, ...]]:
    """For each axis of the mesh that has several devices, the axes that are parts of it."""
    return [tuple(part for part in axes if part[0] in whole) for whole in mesh.atoms_of.values() if whole]


def has_many(mesh: Mesh, axes: Sequence[Atoms]) -> bool:
    """Whether there are too many axes to compare all choices."""
    return len(parts_of(mesh, axes)) > FEW


def is_considered(places: Sequence[object]) -> bool:
    """Whether the planner considers these places for the parts of one axis (None: no place).

    Two parts may be anywhere. Of more parts, the first or the last ones have one place, and the others have another
    place or none. Without this rule, a mark on each gradient could divide an axis of 2,048 devices into five parts,
    with thousands of choices.

    >>> is_considered([0, 1]), is_considered([0, 0, 1, 1]), is_considered([None, None, None, 1])
    (True, True, True)
    >>> is_considered([0, None, 1]), is_considered([0, 1, 1, 0]), is_considered([0, 1, None, None])
    (False, False, False)
    """
    return len(places) <= FEW_PARTS or sum(a != b for a, b in itertools.pairwise(places)) <= 1
