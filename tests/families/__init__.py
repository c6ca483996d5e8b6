"""Programs: what people partition, in small, each with few marks.

A family is a module. ``CASES`` holds all cases by name: a program, the mesh it is meant for and its arguments. The
gradient of a program is a case of its own. ``SMALL`` holds programs with dimensions smaller than the mesh.
"""

from families import (
    contractions,
    experts,
    indexing,
    layers,
    loops,
    moves,
    order,
    small_dimensions,
    statistics,
    training,
    vocabulary,
    windows,
)
from families.case import Case as Case

FAMILIES = (
    layers, training, experts, vocabulary, contractions, statistics, moves, order, indexing, windows, loops
)  # fmt: skip
CASES = {case.name: case for family in FAMILIES for case in family.CASES.cases}
SMALL = {case.name: case for case in small_dimensions.CASES.cases}
