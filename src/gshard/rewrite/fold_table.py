"""Folds what follows from positions alone into one equation, a table: each device computes its part.

    concatenate([sin(a), cos(a)]), where a is made of iotas and numbers        table, reading nothing but numbers

Computed one by one, arrays that are concatenated, padded or reversed would be made in equal parts and then moved.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from gshard.core.program import Equation, Value
from gshard.language.traits import names_where, traits_of
from gshard.rewrite.dce import is_removable
from gshard.rewrite.driver import over
from gshard.rewrite.equation_graph import Graph, Others
from gshard.rules.table import Table, table_p

_MOST = 64  # equations of a table
_LARGEST = 2**31  # elements: positions are int32
_MOVERS = names_where(lambda traits: traits.moves and traits.placed)


@over(*_MOVERS)
def fold_table(graph: Graph) -> Others:
    """Equations that move elements of tables become tables."""
    makers: dict[Value, Equation] = {}  # of tables
    others: dict[Equation, list[Equation]] = {}
    for e in graph.equations:
        if not _is_table(e, makers):
            continue
        makers[e.outputs[0]] = e
        if e.name in _MOVERS and (table := _table(e, makers)) is not None:
            params = {"table": table}
            others[e] = [graph.writer.equation(table_p, params, table.numbers, e.outputs, e.source_info)]
    return others


def _is_table(e: Equation, makers: dict[Value, Equation]) -> bool:
    traits = traits_of(e.name)
    if not (traits.computes or traits.placed) or len(e.outputs) != 1 or not e.outputs[0].shape or not is_removable(e):
        return False
    shape, dtype = e.outputs[0].shape, e.outputs[0].dtype
    if not 0 < math.prod(shape) < _LARGEST or not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
        return False
    return all(not x.shape or x in makers for x in e.inputs)


def _table(e: Equation, makers: dict[Value, Equation]) -> Table | None:
    """An equation with all that it is made of; None if that is too much."""
    found: dict[Equation, None] = {}
    numbers: dict[Value, None] = {}

    def follow(e: Equation) -> None:
        for x in e.inputs:
            if x in makers and makers[x] not in found and len(found) <= _MOST:
                follow(makers[x])
            elif isinstance(x, Value) and not x.shape:
                numbers[x] = None
        found[e] = None

    follow(e)
    return Table(tuple(found), tuple(numbers), e.outputs[0]) if len(found) <= _MOST else None
