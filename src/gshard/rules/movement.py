"""Moves elements as the index of a rule describes (``Rule.index``), on NumPy arrays.

pad(x, 9, low=1, high=-1) of 4 elements      index ((Span(1, 0, 1), Span(0, 0, 3)),)      [9, x[0], x[1], x[2]]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gshard.core.program import Equation
from gshard.core.rule import Index, Span
from gshard.core.xla_workarounds import taken
from gshard.language.traits import Places


def index_of(e: Equation) -> tuple[Index, ...] | None:
    """For each result the spans of the operands that it consists of; None if elements do not just move in order."""
    return None if e.rule is None else e.rule.index


def one_array(e: Equation) -> list[list[Span]]:
    """For each result of an equation that only cuts its operand, and for each dimension, the span that is kept."""
    shape = e.inputs[0].shape
    return [
        [spans[0] if spans else Span(0, 0, n) for spans, n in zip(index, shape, strict=True)]
        for index in index_of(e) or ()
    ]


def elements(index: Index, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The result that consists of these elements of the operands.

    >>> elements(((Span(1, 0, 1), Span(0, 0, 3)),), [np.arange(4), np.array(9)])
    array([9, 0, 1, 2])
    """
    first = next((i for i, x in enumerate(arrays) if x.ndim), 0)
    result = arrays[first]
    for d, spans in enumerate(index):
        parts = []
        for span in spans:
            x = result if span.operand == first else arrays[span.operand]
            if x.ndim:
                positions = span.start + span.step * np.arange(span.count)
                parts.append(np.take(x, positions, d))
            else:
                shape = [span.count if i == d else n for i, n in enumerate(result.shape)]
                parts.append(np.full(shape, x, result.dtype))
        result = np.concatenate(parts, d) if parts else result
    return result


def at_places(x: Any, at: Places) -> Any:
    """The elements of an array at some positions of each dimension."""
    for d, i in enumerate(at):
        if i is not None:
            x = taken(x, i, d)
    return x
