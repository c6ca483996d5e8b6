"""Advice: explains why a collective is needed, from the shardings and marks on both of its sides."""

from __future__ import annotations

from collections.abc import Mapping

from gshard.core.plan import Plan
from gshard.core.program import Equation, Value
from gshard.core.spmd import RECOMPUTED, Collective
from gshard.explanation.roots import root_of, root_of_sum


def advice(c: Collective, plan: Plan, producers: Mapping[Value, Equation]) -> str:
    """One or two sentences: which marks lead here."""
    if c.why == RECOMPUTED:
        return "gshard runs it a second time, because memory_limit leaves no room to keep its result."
    if c.value is None or c.before is None or c.after is None:
        return f"The operator itself communicates ({c.why}), because a dimension that it mixes along is split."
    axes = plan.mesh.format_atoms(c.atoms)
    moved = set(c.atoms)
    if moved & {a for a, _ in c.before.unreduced}:
        root = root_of_sum(c.value, moved, plan, producers)
        because = f" ({root})" if root else ""
        return f"A sum over a dimension that is split over {axes}{because} leaves each device a part."
    if c.source is not None and moved.isdisjoint(c.source.atoms):
        summed = [a for a, _ in c.source.unreduced]
        root = root_of_sum(c.value, set(summed), plan, producers)
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
