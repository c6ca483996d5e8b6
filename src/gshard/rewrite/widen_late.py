"""Widens an array that a mark with ``send`` rounds just before the first equation that reads it.

    q = mark(...); w = f32(q); y = f(x); y @ w     ->     q = mark(...); y = f(x); w = f32(q); y @ w

The marks of a layer often come first, for all weights of the layer. Devices gather an array before they widen it. So an
array that is widened late is gathered late, like a weight without ``send``: while an earlier product is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from gshard.core.program import Equation, Value
from gshard.language.mark_primitive import mark_p
from gshard.language.traits import traits_of
from gshard.rewrite.driver import over
from gshard.rewrite.equation_graph import Graph, Others


@over(mark_p.name)
def widen_late(graph: Graph) -> Others:
    """Moves the equations that widen a marked array to the first equation that reads the result."""
    position = {e: i for i, e in enumerate(graph.equations)}
    chains: dict[Equation, list[list[Equation]]] = {}  # by the first equation that reads the result
    for e in graph.equations:
        chain = _widening(graph, e.outputs[0]) if e.mark is not None and e.mark.send else []
        readers = graph.readers(chain[-1].outputs[0]) if chain else ()
        if readers:
            chains.setdefault(min(readers, key=position.__getitem__), []).append(chain)
    others: dict[Equation, Sequence[Equation]] = {}
    for reader, widenings in chains.items():
        moved = [e for chain in widenings for e in chain]
        if position[reader] - min(map(position.__getitem__, moved)) != len(moved):
            others |= dict.fromkeys(moved, ())
            others[reader] = (*moved, reader)
    return others


def _widening(graph: Graph, x: Value) -> list[Equation]:
    """The elementwise equations that make one wide array of a narrow one and of smaller ones (scales)."""
    chain: list[Equation] = []
    while graph.is_read_once(x):
        (e,) = graph.readers(x)
        of_its_shape = [v for v in e.inputs if v.shape == x.shape]
        if (
            e.mark is not None
            or e.blocks
            or not traits_of(e.name).computes
            or of_its_shape != [x]
            or len(e.outputs) > 1
        ):
            break
        chain.append(e)
        (x,) = e.outputs
    return chain
