"""What an equation makes of arrays, for their names: another form of one, several beside each other, or new values."""

from __future__ import annotations

import math

from gshard.comm.collectives import KINDS
from gshard.core.program import Equation, Value
from gshard.core.rule import REDUCE


def source_of(e: Equation, result: Value) -> Value | None:
    """The operand that a result is another form of; None if the equation computes new values."""
    sources = in_another_form(e)
    return sources[e.outputs.index(result)] if sources else None


def in_another_form(e: Equation) -> tuple[Value | None, ...]:
    """For each result, the operand that the equation casts, reshapes, slices or sends; () if it computes new values."""
    if e.rule is None:
        return ()
    if e.rule.passes or (e.name in KINDS and len(e.inputs) == len(e.outputs)):
        return tuple(x if isinstance(x, Value) else None for x in e.inputs)
    arrays = [(i, x) for i, x in enumerate(e.inputs) if isinstance(x, Value) and x.shape]
    if len(arrays) != 1:
        return ()
    if any(f.kind == REDUCE and f.size > 1 and f.monoid != "pick" for f in e.rule.factors):
        return ()
    ((i, source),) = arrays
    monoids = [monoid for monoid, operands in e.rule.linear if operands == {i}]
    keeps_values = "add" in monoids or (len(e.inputs) == 1 and monoids) or e.mark is not None
    return (source,) * len(e.outputs) if keeps_values else ()


def joined_by(e: Equation) -> list[Value]:
    """The arrays that an equation puts beside each other; none if it does something else."""
    arrays = {i: x for i, x in enumerate(e.inputs) if isinstance(x, Value) and x.shape}
    size = sum(math.prod(x.shape) for x in arrays.values())
    is_whole = len(e.outputs) == 1 and len(arrays) > 1 and size == math.prod(e.outputs[0].shape)
    return [*arrays.values()] if is_whole and adds_in(e, {*arrays}) else []


def adds_in(e: Equation, operands: set[int]) -> bool:
    """Whether an equation is linear in these operands together."""
    return e.rule is not None and any(monoid == "add" and operands <= positions for monoid, positions in e.rule.linear)


def is_elementwise(e: Equation) -> bool:
    """Whether each element of the result depends on one element of each operand. Operands may be broadcast."""
    if e.rule is None or len(e.outputs) != 1 or not e.rule.known:
        return False
    (result,) = e.rule.results
    for x, dims in zip(e.inputs, e.rule.operands, strict=True):
        if not x.shape:
            continue
        if len(dims) != len(result) or any(dim and dim != other for dim, other in zip(dims, result, strict=True)):
            return False
    return True
