"""Searches a reversed array in its own order, because a reversal sends every part to another device.

searchsorted(bins[::-1], x)        searchsorted(bins, x), for elements that fall
"""

from __future__ import annotations

from collections.abc import Sequence

from gshard.core.program import Equation
from gshard.rewrite.driver import at
from gshard.rewrite.equation_graph import Graph


@at("searchsorted")
def search_of_rev(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """Replaces ``searchsorted(rev(bins), x)`` by a search in ``bins`` in the other order."""
    rev = graph.producer(e.inputs[0], "rev")
    if rev is None or rev.params["dimensions"] != (len(rev.inputs[0].shape) - 1,):
        return None
    return [graph.changed(e, (*rev.inputs, *e.inputs[1:]), falling=not e.params["falling"])]
