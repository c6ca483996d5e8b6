"""Folds equations whose results depend on positions only into one equation, a table, whose part each device computes.

    concatenate([sin(a), cos(a)]), where a depends on iotas and numbers        table, which reads only numbers

Separate equations would compute arrays in equal parts, and then move them to concatenate, pad or reverse them.
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

_MOST = 64  # largest number of equations of a table
_LARGEST = 2**31  # elements: positions are int32
_MOVERS = names_where(lambda traits: traits.moves and traits.placed)


@over(*_MOVERS)
def fold_table(graph: Graph) -> Others:
    """Replaces equations that move elements of tables by tables."""
    producers: dict[Value, Equation] = {}  # of tables
    others: dict[Equation, list[Equation]] = {}
    for e in graph.equations:
        if not _is_table(e, producers):
            continue
        producers[e.outputs[0]] = e
        if e.name in _MOVERS and (table := _table(e, producers)) is not None:
            params = {"table": table}
            others[e] = [graph.writer.equation(table_p, params, table.numbers, e.outputs, e.source_info)]
    return others


def _is_table(e: Equation, producers: dict[Value, Equation]) -> bool:
    """Whether the result of an equation depends on positions and numbers only."""
    traits = traits_of(e.name)
    if not (traits.computes or traits.placed) or len(e.outputs) != 1 or not e.outputs[0].shape or not is_removable(e):
        return False
    shape, dtype = e.outputs[0].shape, e.outputs[0].dtype
    if not 0 < math.prod(shape) < _LARGEST or not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
        return False
    return all(not x.shape or x in producers for x in e.inputs)


def _table(e: Equation, producers: dict[Value, Equation]) -> Table | None:
    """The table of an equation and all equations that it depends on; None if there are too many."""
    equations: dict[Equation, None] = {}
    numbers: dict[Value, None] = {}

    def add(e: Equation) -> None:
        for x in e.inputs:
            if x in producers and producers[x] not in equations and len(equations) <= _MOST:
                add(producers[x])
            elif isinstance(x, Value) and not x.shape:
                numbers[x] = None
        equations[e] = None

    add(e)
    return Table(tuple(equations), tuple(numbers), e.outputs[0]) if len(equations) <= _MOST else None
