"""Rewritten: the equations of a block as those that they become, one way of looking at them after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gshard.core.program import Equation, Value
from gshard.rewrite.compose_movement import one_equation_each
from gshard.rewrite.fold_pad_into_window import padded_by_windows
from gshard.rewrite.fold_table import made_of_positions
from gshard.rewrite.match_associative_scan import scanned
from gshard.rewrite.search_of_rev import searched_as_they_lie
from gshard.rewrite.sink_elementwise import moved_first
from gshard.rewrite.sink_pad import in_frames
from gshard.rewrite.split_merged_dims import unmerged
from gshard.rewrite.sum_of_scatter import sums_of_updates
from gshard.rewrite.transpose_of_dot import products_as_wanted


def rewritten(
    equations: Sequence[Equation],
    outputs: Sequence[Any],
    fresh: Callable[[tuple[int, ...], Any], Value],
    equation: Callable[..., Equation],
    equations_of: Callable[..., Any],
) -> Sequence[Equation]:
    """The equations that make the same results.

    Args:
        equations: of one block, in one context.
        outputs: those of their results that others read.
        fresh: a new value of a shape and a dtype.
        equation: an equation of a primitive, its parameters, operands, results and place in the source.
        equations_of: the equations of a jaxpr with constants on some arrays, and its results.
    """
    equations = scanned(equations, outputs, fresh, equation, equations_of)
    equations = made_of_positions(equations, outputs, equation)
    for in_place in (sums_of_updates, unmerged, moved_first, in_frames, one_equation_each):
        equations = in_place(equations, outputs, fresh, equation)
    for fewer in (padded_by_windows, products_as_wanted, searched_as_they_lie):
        equations = fewer(equations, outputs, equation)
    return equations
