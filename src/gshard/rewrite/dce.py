"""Unread: equations whose results nobody reads, once others have taken their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gshard.core.program import Equation


def without_unread(
    equations: Iterable[Equation], outputs: Iterable[Any], may_go: Callable[[Equation], bool]
) -> list[Equation]:
    """The equations of a block without those that may go and whose results nobody reads.

    Args:
        equations: in order.
        outputs: the block's results.
        may_go: whether an equation may, if nobody reads it.
    """
    kept: list[Equation] = []
    read: set[Any] = set(outputs)
    for e in reversed([*equations]):
        if not read.isdisjoint(e.outputs) or not may_go(e):
            kept.append(e)
            read.update(e.inputs)
    return kept[::-1]
