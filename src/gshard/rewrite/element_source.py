"""Describes the origin of an array's elements along one dimension by segments of other arrays.

Segment(x, 7, 8), Segment(x, 0, 7)               x rotated by one
Segment(0.0, 0, 2), Segment(Window(y, 1, -1, 0), 0, 8)     two zeros, then y, whose other dimension is cut
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from gshard.core.program import Constant
from gshard.rewrite.equation_graph import Array


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """An array that is padded along one dimension, or cut by negative padding, but not yet computed."""

    source: Array | Window  # the array
    axis: int  # the dimension
    low: int  # low, high: the padding, as in ``lax.pad``
    high: int
    number: Array | None = None  # the padding value; None if the array is only cut

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.source.shape
        return (*whole[: self.axis], whole[self.axis] + self.low + self.high, *whole[self.axis + 1 :])

    def of(self, source: Array | Window) -> Window:
        """The same window of another array."""
        return dataclasses.replace(self, source=source)


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``end`` of an array along a dimension; if the source is a scalar, copies of the scalar."""

    source: Array | Window
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def is_number(self) -> bool:
        return not self.source.shape

    def is_all_of(self, axis: int) -> bool:
        """Whether the segment is a whole array."""
        return not self.is_number and (self.start, self.end) == (0, self.source.shape[axis])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and (self.start, self.end) == (other.start, other.end) and self.is_like(other)

    def is_like(self, other: Segment) -> bool:
        """Whether both segments have the same array or equal numbers as source."""
        if isinstance(self.source, Constant) and isinstance(other.source, Constant):
            return _bits(self.source) == _bits(other.source)
        return self.source == other.source

    def and_then(self, other: Segment) -> Segment | None:
        """The union with a following segment; None if they are not adjacent in one source."""
        if not self.is_like(other) or not (self.is_number or self.end == other.start):
            return None
        return Segment(self.source, self.start, self.end + other.length)


def _bits(number: Constant) -> tuple[str, bytes]:
    return str(number.dtype), np.asarray(number.value).tobytes()


def cut(segments: Iterable[Segment], start: int, end: int) -> list[Segment]:
    """The segments of elements ``start`` to ``end``."""
    selected: list[Segment] = []
    position = 0
    for p in segments:
        low, high = max(start - position, 0), min(end - position, p.length)
        if low < high:
            selected.append(Segment(p.source, p.start + low, p.start + high))
        position += p.length
    return selected


def tidy(segments: Iterable[Segment]) -> list[Segment]:
    """The segments without empty ones, with adjacent segments of one source joined."""
    result: list[Segment] = []
    for p in segments:
        if not p.length:
            continue
        p = Segment(p.source, 0, p.length) if p.is_number else p
        union = result[-1].and_then(p) if result else None
        if union is not None:
            result[-1] = union
        else:
            result.append(p)
    return result


def ends(segments: Iterable[Segment]) -> Iterable[int]:
    """The end position of each segment."""
    return itertools.accumulate(p.length for p in segments)


def is_zero(number: Any) -> bool:
    """Whether a value is a literal of the program whose bits are all zero."""
    return isinstance(number, Constant) and not any(np.asarray(number.value).tobytes())
