"""Unsplit work: that a plan for a machine does not split products over an axis, and what splitting them would take.

On a machine it may be faster to gather a small batch, and to compute all of it on every device, than to add the
gradients of its parts up. The verdict then names the marked batch, and gives both times.
"""

from __future__ import annotations

from gshard.core.number_text import format_seconds
from gshard.core.plan import Plan
from gshard.device.cost import Cost, cost
from gshard.device.fusion_model import PRODUCT, flops
from gshard.explanation.replicated import replicated_work
from gshard.explanation.what_if import Planner, replanned
from gshard.naming.array_names import ArrayNames


def unsplit_work(plan: Plan, found: Cost, names: ArrayNames, by_bytes: Planner | None) -> str:
    """One sentence on the largest product that is not split as its operand is; empty if there is none."""
    rows = replicated_work(plan)
    made = replanned(by_bytes, plan.program) if rows and by_bytes is not None else None
    if made is None:
        return ""
    captured = len(made.program.captured)
    split = cost(made, found.machine, [i - captured for i in found.donated])
    if _products(split) >= _products(found):
        return ""
    row = max(rows, key=lambda row: flops(row.equation))
    what, at = names.array(row.operand).text or f"%{row.operand.index}", row.equation.line
    return (
        f"{what} is not split over {row.axes!r}{f' at {at}' if at else ''}: every device does all of that work "
        f"({row.times} times its share). With the work split as planning by bytes splits it, a call would take "
        f"{format_seconds(split.seconds)} instead of {format_seconds(found.seconds)}."
    )


def _products(found: Cost) -> int:
    """Operations of the products of one device."""
    return sum(k.flops * k.times for k in found.kernels if k.kind == PRODUCT)
