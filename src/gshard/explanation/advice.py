"""Advice: the marks and argument shardings that cause a collective; and a budget of bytes that refuses a program."""

from __future__ import annotations

from typing import Any

from gshard.core.errors import PlanError
from gshard.core.plan import Plan, Reason
from gshard.core.program import Equation, Value
from gshard.core.rule import REDUCE
from gshard.core.spmd import RECOMPUTED, Collective, SpmdProgram

# Roots: the marks and argument shardings that cause a collective.


def root_of(value: Value, atoms: set[str], plan: Plan) -> Reason | None:
    """The mark or argument at the end of the chain of a dimension that is split over some of the atoms."""
    for d, dim in enumerate(plan.shardings[value].dims):
        if atoms & set(dim) and (value, d) in plan.roots:
            return plan.roots[value, d]
    return None


def root_of_sum(value: Value, atoms: set[str], plan: Plan) -> Reason | None:
    """The mark that splits the dimension over which the nearest equation before ``value`` adds up."""
    seen: set[Equation] = set()
    at = [value]
    while at:
        e = plan.program.producers.get(at.pop())
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


def roots(c: Collective, plan: Plan) -> frozenset[Reason]:
    """The marks and arguments that a collective goes back to."""
    moving = (e for e in (c.cause, c.emitted) if e is not None and e.mark is not None)
    found = {Reason("mark", e.line, str(e.mark)) for e in moving}
    values = [c.value, *(v for e in (c.cause, c.emitted) if e is not None for v in (*e.inputs, *e.outputs))]
    for v in dict.fromkeys(values):
        if isinstance(v, Value) and v in plan.shardings:
            found.update(plan.roots[v, d] for d in range(len(v.shape)) if (v, d) in plan.roots)
    summed = set() if c.before is None else {a for a, _ in c.before.unreduced}
    if c.value is not None and summed and (root := root_of_sum(c.value, summed, plan)) is not None:
        found.add(root)
    return frozenset(found)


def advice(c: Collective, plan: Plan) -> str:
    """One or two sentences: which marks lead here."""
    if c.why == RECOMPUTED:
        return "gshard runs it a second time, because memory_limit leaves no room to keep its result."
    if c.value is None or c.before is None or c.after is None:
        return f"The operator itself communicates ({c.why}), because a dimension that it mixes along is split."
    axes = plan.mesh.format_atoms(c.atoms)
    moved = set(c.atoms)
    if moved & {a for a, _ in c.before.unreduced}:
        root = root_of_sum(c.value, moved, plan)
        because = f" ({root})" if root else ""
        return f"A sum over a dimension that is split over {axes}{because} leaves each device a part."
    if c.source is not None and moved.isdisjoint(c.source.atoms):
        summed = [a for a, _ in c.source.unreduced]
        root = root_of_sum(c.value, set(summed), plan)
        because = f" ({root})" if root else ""
        return (
            f"Copies over {axes} have shared the work of combining a sum over a dimension that is split over "
            f"{plan.mesh.format_atoms(summed)}{because}; each hands its share to the others."
        )
    here = root_of(c.value, moved, plan)
    at = [d for d, dim in enumerate(c.before.dims) if moved & set(dim)]
    along = f" along dimension {at[0]}" if at else ""
    held = f"It is split over {axes}{along}" + (f" ({here}). " if here else ". ")
    if moved & {a for dim in c.after.dims for a in dim}:
        to = next(d for d, dim in enumerate(c.after.dims) if moved & set(dim))
        return f"{held}The operator needs dimension {to} split instead."
    return f"{held}The operator needs all of it."


# Budget: refuses a program in which a device sends more bytes than the user allows, and shows what to change.


def allowed_bytes(strict: Any) -> float | None:
    """The bytes that each device may send in one call by ``strict=``; None if it is about rules only.

    >>> allowed_bytes(1e6), allowed_bytes(True)
    (1000000.0, None)
    """
    if isinstance(strict, bool):
        return None
    if not isinstance(strict, int | float) or not strict >= 0:
        raise PlanError(
            f"strict={strict!r} says nothing.",
            hint="Write True, False, or the number of bytes that each device may send in one call: strict=50e6.",
        )
    return strict


def check_bytes(allowed: float, plan: Plan, spmd: SpmdProgram) -> None:
    """Refuses a program in which a device sends more bytes."""
    total = sum(c.total_bytes for c in spmd.collectives)
    if total <= allowed:
        return
    most = sorted(spmd.collectives, key=lambda c: -c.total_bytes)
    rows = [_row(c, plan) + f"\n    {advice(c, plan)}" for c in most[:3]]
    if rest := most[3:]:
        rows.append(f"and {len(rest)} more collectives, {_bytes(sum(c.total_bytes for c in rest))}")
    raise PlanError(
        f"each device would send {_bytes(total)} in one call of {plan.program.name}, "
        f"and strict allows {_bytes(allowed)}.",
        most[0].line or None,
        "\n  ".join([f"mesh: {plan.mesh}; most is sent by", *rows]),
        "Change these marks, or allow more bytes.",
    )


def _row(c: Collective, plan: Plan) -> str:
    times = f", {c.times} times" if c.times > 1 else ""
    at = f" at {c.line}" if c.line else ""
    axes = plan.mesh.format_atoms(c.atoms)
    return f"{c.kind} of {c.shape} over {axes} for {c.why}{at}: {_bytes(c.total_bytes)}{times}"


def _bytes(n: float) -> str:
    return f"{n:,.0f} bytes"
