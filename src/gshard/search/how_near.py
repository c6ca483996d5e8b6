"""Writes sentences about the distance of a plan from the best one, the model of that proof, and the end of a search."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from gshard.core.number_text import format_ms, significant
from gshard.search.best import Best
from gshard.search.meshes import axes_text

_NONE = 1e-5  # a gap that counts as none, to the printed digits
_SHOWN = 4  # printed names of steps that were left out


def how_near(best: Best, *, is_one_of_several: bool = False) -> str:
    """One sentence on the returned plan, with its price in the simplified model and its full price."""
    full = f"priced in full: {format_ms(best.chosen.cost.seconds)}"
    gap = best.gap
    if gap is not None and best.predicted is not None:
        if best.is_limited:
            optimum = "the best of the choices compared"
            near = optimum if gap < _NONE else f"at most {_slower(gap)} slower than {optimum}"
        else:
            near = "optimal" if gap < _NONE else f"at most {_slower(gap)} slower than the optimum"
        near += " on this mesh" if is_one_of_several else ""
        return f"{near} for the simplified model ({format_ms(best.predicted)} there); {full}"
    if best.graph is None:
        return f"nothing is proven: the search did not get as far; {full}"
    if best.chosen.recomputed or best.chosen.plan.rings:
        why = "the simplified model has no recomputed values and no collective matmuls"
    elif best.predicted is None:
        why = "the simplified model has no bound for a plan like this"
    elif best.near is not None:
        why = f"gshard compared plans that differ in one axis from the one found on mesh ({axes_text(best.near)})"
    else:
        why = "the solver found no bound in its time"
    return f"nothing is proven of this plan: {why}; {full}"


def to_gain(gap: float | None, is_limited: bool, meshes: str) -> str:
    """What the best plan so far could gain at most, for a line of progress."""
    if gap is None:
        return "nothing is proven yet of the best plan"
    compared = ", of the choices compared" if is_limited else ""
    share = "0" if gap < _NONE else significant(100 * gap, 2)
    return f"at most {share} % of its time to save in the simplified model on {meshes}{compared}"


def ended(seconds: float, left_out: Sequence[str], stopped: int | None, failed: Sequence[str] = ()) -> list[str]:
    """Lines on a search that a signal ended, whose time was over before it had tried everything, or parts failed."""
    lines = []
    if stopped is not None:
        by = "Ctrl-C" if stopped == signal.SIGINT else signal.Signals(stopped).name
        lines.append(f"{by} ended the search after {seconds:.1f} s: this is the best plan so far")
    if left_out:
        lines.append(f"the time was over after {seconds:.1f} s; not tried, or cut: {_some(left_out)}")
    if failed:
        lines.append(f"not tried, because of an error: {_some(failed)}")
    return lines


def _some(steps: Sequence[str]) -> str:
    return "; ".join([*steps[:_SHOWN], *([f"{len(steps) - _SHOWN} more"] if len(steps) > _SHOWN else [])])


def _slower(gap: float) -> str:
    return f"{significant(100 * gap / (1 - gap), 2)} %"
