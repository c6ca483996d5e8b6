"""Element source: the origin of an array's elements along one dimension, before any data moves.

Segment(x, 7, 8), Segment(x, 0, 7)               x rotated by one
Segment(0.0, 0, 2), Segment(Window(y, 1, -1, 0), 0, 8)     two zeros, then y, whose other dimension is cut
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from gshard.core.program import Constant, Value

Array = Value | Constant


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """An array that is cut (below zero) or padded along one dimension; its elements, not yet moved.

    Attributes:
        source: the array.
        axis: the dimension.
        low, high: as ``lax.pad`` has them.
        number: what it is padded with; None if it is only cut.
    """

    source: Array | Window
    axis: int
    low: int
    high: int
    number: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.source.shape
        return (*whole[: self.axis], whole[self.axis] + self.low + self.high, *whole[self.axis + 1 :])

    def of(self, source: Array | Window) -> Window:
        """The same of another array."""
        return dataclasses.replace(self, source=source)


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``end`` of an array along the dimension that is looked at; of a number, copies of it."""

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
        """Whether nothing of an array is missing."""
        return not self.is_number and (self.start, self.end) == (0, self.source.shape[axis])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and (self.start, self.end) == (other.start, other.end) and self.is_like(other)

    def is_like(self, other: Segment) -> bool:
        """Whether both are of the same array, or of equal numbers."""
        if isinstance(self.source, Constant) and isinstance(other.source, Constant):
            return _bits(self.source) == _bits(other.source)
        return self.source == other.source

    def and_then(self, other: Segment) -> Segment | None:
        """Two segments as one, if they are."""
        if not self.is_like(other) or not (self.is_number or self.end == other.start):
            return None
        return Segment(self.source, self.start, self.end + other.length)


def _bits(number: Constant) -> tuple[str, bytes]:
    return str(number.dtype), np.asarray(number.value).tobytes()


def cut(segments: Iterable[Segment], start: int, end: int) -> list[Segment]:
    """The segments of elements ``start`` to ``end``."""
    found, at = [], 0
    for p in segments:
        low, high = max(start - at, 0), min(end - at, p.length)
        if low < high:
            found.append(Segment(p.source, p.start + low, p.start + high))
        at += p.length
    return found


def tidy(segments: Iterable[Segment]) -> list[Segment]:
    """Segments without empty ones, neighbours that belong together as one."""
    found: list[Segment] = []
    for p in segments:
        if not p.length:
            continue
        p = Segment(p.source, 0, p.length) if p.is_number else p
        together = found[-1].and_then(p) if found else None
        if together is not None:
            found[-1] = together
        else:
            found.append(p)
    return found


def ends(segments: Iterable[Segment]) -> Iterable[int]:
    """Where each of them ends."""
    return itertools.accumulate(p.length for p in segments)


def is_zero(number: Any) -> bool:
    """Whether a number is written in the program, and all its bits are zero."""
    return isinstance(number, Constant) and not any(np.asarray(number.value).tobytes())
