"""Divides a block into segments: maximal runs of equations with the same context.

During tracing gshard rewrites each segment separately. So rewrites do not combine equations of different contexts, and
new equations have the context of the replaced ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from gshard.core.context import Context
from gshard.core.program import Equation

Rewrite = Callable[[Context, Sequence[Equation], Sequence[Any]], Sequence[Equation]]


def in_segments(equations: Sequence[Equation], outputs: Sequence[Any], rewrite: Rewrite) -> list[Equation]:
    """Rewrites each segment of a block separately."""
    segments = [(context, list(part)) for context, part in itertools.groupby(equations, lambda e: e.context)]
    read = set(outputs)
    rewritten = list[list[Equation]]()
    for context, part in reversed(segments):
        results = outputs if len(segments) == 1 else [v for e in part for v in e.outputs if v in read]
        read.update(v for e in part for v in e.inputs)
        rewritten.append(list(rewrite(context, part, results)))
    return [e for part in reversed(rewritten) for e in part]
