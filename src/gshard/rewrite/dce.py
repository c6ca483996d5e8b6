"""Eliminates dead code after rewrites."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gshard.core.program import Equation
from gshard.rewrite.cse import is_pure


def is_removable(e: Equation) -> bool:
    """Whether an equation can be removed if its results are dead: it is pure and not a mark of the user."""
    return e.mark is None and is_pure(e)


def without_dead_code(
    equations: Iterable[Equation], outputs: Iterable[Any], may_go: Callable[[Equation], bool] = is_removable
) -> list[Equation]:
    """The equations of a block without those whose results are dead."""
    kept: list[Equation] = []
    read: set[Any] = set(outputs)
    for e in reversed([*equations]):
        if not read.isdisjoint(e.outputs) or not may_go(e):
            kept.append(e)
            read.update(e.inputs)
    return kept[::-1]
