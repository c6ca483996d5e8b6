"""Turned: an array that is only turned around to be searched is searched as it lies.

    searchsorted(bins[::-1], x)        searchsorted(bins, x), whose elements fall

Turned around, every part would go to another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gshard.core.program import Constant, Equation, Value
from gshard.rewrite.cse import is_repeatable
from gshard.rewrite.dce import without_unread


def searched_as_they_lie(
    equations: Iterable[Equation], outputs: Sequence[Value | Constant], equation: Callable[..., Equation]
) -> list[Equation]:
    """The equations in which searches turn around; what nobody reads any more is gone.

    Args:
        equations: of one block.
        outputs: the block's results.
        equation: an equation of a primitive, its parameters, operands, results, and the source that it is blamed on.
    """
    equations = list(equations)
    turned: dict[Any, Equation] = {e.outputs[0]: e for e in equations if e.name == "rev" and e.mark is None}
    instead = {}
    for e in equations:
        rev = turned.get(e.inputs[0]) if e.name == "searchsorted" else None
        if rev is not None:
            params = {**e.params, "falling": not e.params["falling"]}
            instead[e] = equation(e.primitive, params, (*rev.inputs, *e.inputs[1:]), e.outputs, e.source_info)
    if not instead:
        return equations
    return without_unread([instead.get(e, e) for e in equations], outputs, is_repeatable)
