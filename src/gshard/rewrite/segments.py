"""Segments: runs of equations that have the same context.

What becomes another equation while a program is traced is looked for in each segment by itself. So nothing merges
equations across the boundary of a context, and all that stands for an equation has its context.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from gshard.core.context import Context
from gshard.core.program import Equation

Rewrite = Callable[[Context, Sequence[Equation], Sequence[Any]], Sequence[Equation]]


def in_segments(equations: Sequence[Equation], outputs: Sequence[Any], rewrite: Rewrite) -> list[Equation]:
    """The equations of a block, each segment rewritten by itself.

    Args:
        equations: of one block.
        outputs: the block's results.
        rewrite: takes the context of a segment, its equations, and those of its results that are read outside of it;
            gives equations that make these results.
    """
    segments = [(context, list(part)) for context, part in itertools.groupby(equations, lambda e: e.context)]
    read, found = set(outputs), list[list[Equation]]()
    for context, part in reversed(segments):
        own = outputs if len(segments) == 1 else [v for e in part for v in e.outputs if v in read]
        read.update(v for e in part for v in e.inputs)
        found.append(list(rewrite(context, part, own)))
    return [e for part in reversed(found) for e in part]
