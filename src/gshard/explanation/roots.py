"""Roots: the marks and argument shardings that cause a collective.

A value is split because of a mark or an argument's sharding, which its reasons lead back to. A collective that moves a
value goes back to what splits it, to what splits the sum that it combines, and to what splits the arrays of the
equation that needs it moved. A mark that itself needs its operand moved is its direct root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gshard.core.plan import Plan, Reason
from gshard.core.program import Equation, Value
from gshard.core.rule import REDUCE
from gshard.core.spmd import Collective


def root_of(value: Value, atoms: set[str], plan: Plan) -> Reason | None:
    """The mark or argument at the end of the chain of a dimension that is split over some of the atoms."""
    for d, dim in enumerate(plan.shardings[value].dims):
        if atoms & set(dim) and (value, d) in plan.roots:
            return plan.roots[value, d]
    return None


def root_of_sum(value: Value, atoms: set[str], plan: Plan, producers: Mapping[Value, Equation]) -> Reason | None:
    """The mark that splits the dimension over which the nearest equation before ``value`` adds up."""
    seen: set[Equation] = set()
    at = [value]
    while at:
        e = producers.get(at.pop())
        if e is None or e.rule is None or e in seen:
            continue
        seen.add(e)
        split = plan.splits.get(e, {})
        for v, dims in zip(e.inputs, e.rule.operands, strict=True):
            for dim in dims:
                summed = [f for f in dim if e.rule.factors[f].kind == REDUCE and atoms & set(split.get(f, ()))]
                if summed and isinstance(v, Value) and (root := root_of(v, atoms, plan)) is not None:
                    return root
        at += [v for v in e.inputs if isinstance(v, Value)]
    return None


def direct_roots(c: Collective) -> Iterator[Reason]:
    """The marks that themselves need the operand of a collective moved."""
    for e in dict.fromkeys((c.cause, c.emitted)):
        if e is not None and e.mark is not None:
            yield Reason("mark", e.line, str(e.mark))


def roots(c: Collective, plan: Plan, producers: Mapping[Value, Equation]) -> frozenset[Reason]:
    """The marks and arguments that a collective goes back to."""
    found = {*direct_roots(c)}
    values = [c.value, *(v for e in (c.cause, c.emitted) if e is not None for v in (*e.inputs, *e.outputs))]
    for v in dict.fromkeys(values):
        if isinstance(v, Value) and v in plan.shardings:
            found.update(plan.roots[v, d] for d in range(len(v.shape)) if (v, d) in plan.roots)
    summed = set() if c.before is None else {a for a, _ in c.before.unreduced}
    if c.value is not None and summed and (root := root_of_sum(c.value, summed, plan, producers)) is not None:
        found.add(root)
    return frozenset(found)
