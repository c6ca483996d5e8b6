"""Writes sentences about the distance of a plan from the best one, the model of that proof, and the end of a search."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from gshard.search.best import Best
from gshard.search.meshes import axes_text

_NONE = 1e-5  # a gap that counts as none, to the printed digits
_SHOWN = 4  # printed names of steps that were left out


def how_near(best: Best) -> str:
    """One sentence on the returned plan, with its price in the simplified model and its full price."""
    full = f"priced in full: {_ms(best.chosen.cost.seconds)}"
    gap = best.gap
    if gap is not None and best.predicted is not None:
        near = "optimal" if gap < _NONE else f"at most {100 * gap:.2g} % slower than the optimum"
        return f"{near} for the simplified model ({_ms(best.predicted)} there); {full}"
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


def ended(seconds: float, left_out: Sequence[str], stopped: int | None) -> list[str]:
    """Lines on a search that a signal ended, or whose time was over before it had tried everything."""
    lines = []
    if stopped is not None:
        by = "Ctrl-C" if stopped == signal.SIGINT else signal.Signals(stopped).name
        lines.append(f"{by} ended the search after {seconds:.1f} s: this is the best plan so far")
    if left_out:
        shown = [*left_out[:_SHOWN], *([f"{len(left_out) - _SHOWN} more"] if len(left_out) > _SHOWN else [])]
        lines.append(f"the time was over after {seconds:.1f} s; not tried, or cut: {'; '.join(shown)}")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
