"""Tables: what follows from the positions of elements alone is one equation, of which each device computes its part.

    concatenate([sin(a), cos(a)]), where a is made of iotas and numbers        table, reading nothing but numbers

Taken one by one, what is put side by side, padded or reversed would be made in equal parts and then moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp

from gshard.core.program import Constant, Equation, Value
from gshard.rewrite.cse import is_repeatable
from gshard.rewrite.dce import without_unread
from gshard.rules.table import ELEMENTWISE, MOVERS, PLACED, Table, table_p

_MOST = 64  # equations of a table
_LARGEST = 2**31  # elements: positions are int32


def made_of_positions(
    equations: Iterable[Equation], outputs: Sequence[Value | Constant], equation: Callable[..., Equation]
) -> list[Equation]:
    """The equations, with those that move elements of tables as tables; what nobody reads any more is gone.

    Args:
        equations: of one block.
        outputs: the block's results.
        equation: an equation of a primitive, its parameters, operands, results, and the source that it is blamed on.
    """
    equations = list(equations)
    makers: dict[Value, Equation] = {}  # of tables
    instead: dict[Equation, Equation] = {}
    for e in equations:
        if not _is_table(e, makers):
            continue
        makers[e.outputs[0]] = e
        if e.name in MOVERS and (table := _table(e, makers)) is not None:
            instead[e] = equation(table_p, {"table": table}, table.numbers, e.outputs, e.source_info)
    if not instead:
        return equations
    made = {*makers.values(), *instead.values()}
    return without_unread((instead.get(e, e) for e in equations), outputs, made.__contains__)


def _is_table(e: Equation, makers: dict[Value, Equation]) -> bool:
    if e.name not in ELEMENTWISE and e.name not in PLACED:
        return False
    if len(e.outputs) != 1 or not e.outputs[0].shape or e.mark is not None or not is_repeatable(e):
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
