"""Represents an array along one dimension by pieces: arrays side by side, each a window of a frame.

If a few elements are added to an array or removed from it, its shards have another size, so nearly all elements would
move. In pieces each array stays where it is: the operands of a concatenation are pieces, and a slice is a window in the
frame of the sliced array.

    concatenate(first, x)     1 and 256 elements                    [0:1 of 1], [0:256 of 256]
    logits[:, :1000]          of 1024 elements                      [0:1000 of 1024]
    pad(logits, 0, 24)        the window grows and is filled        [0:1024 of 1024], an ordinary array

Elements of a frame outside of its window are undefined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.program import Equation
from gshard.core.rule import Span
from gshard.rules.movement import index_of

_TIMES = 1.25  # largest ratio of the sizes of a frame and its window: elements outside are computed in vain
_MOST = 8  # largest number of pieces of an array


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The elements from ``start`` to ``end`` of a frame of ``size`` elements."""

    size: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        return self.length == self.size


Layout = tuple[Piece, ...]


def whole(n: int) -> Layout:
    """The layout of an ordinary array: one whole piece."""
    return (Piece(n, 0, n),)


def is_whole(layout: Layout) -> bool:
    """Whether a layout is the layout of an ordinary array."""
    return len(layout) == 1 and layout[0].is_whole


def starts_of(layout: Layout) -> list[int]:
    """The position in the array at which each piece begins."""
    return [sum(p.length for p in layout[:k]) for k in range(len(layout))]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The source of a piece."""

    piece: Piece  # the piece
    operand: int  # the number of the operand that contains its elements, or that is the number that fills it
    part: int | None  # the number of the piece of this operand; None if the operand is a number
    low: int = 0  # low, high: the numbers of elements at the ends of the window that are filled with a number
    high: int = 0
    number: int = 0  # the operand that is this number
    # the elements of the operand's frame that are cut out; None if the frame is kept
    cut: tuple[int, int] | None = None

    @property
    def is_as_it_was(self) -> bool:
        """Whether the piece is an unchanged piece of the operand."""
        return self.part is not None and not self.low and not self.high and self.cut is None


def spans_along(e: Equation, dim: int) -> list[Sequence[Span]] | None:
    """The spans of each result of an equation that only moves elements along ``dim``; None for other equations."""
    spans_of_results = list[Sequence[Span]]()
    for index in index_of(e) or ():
        if [d for d, spans in enumerate(index) if spans] != [dim] or any(span.step != 1 for span in index[dim]):
            return None
        spans_of_results.append(index[dim])
    return spans_of_results or None


def sources_of(spans: Sequence[Span], layouts: Sequence[Layout | None]) -> list[Source] | None:
    """The sources of the pieces of a result."""
    sources: list[Source] = []
    for span in spans:
        layout = layouts[span.operand]
        start, end = span.start, span.start + span.count
        if layout is None:
            if span.count:
                sources.append(Source(Piece(span.count, 0, span.count), span.operand, None))
            continue
        for k, (piece, begin) in enumerate(zip(layout, starts_of(layout), strict=True)):
            low, high = max(start - begin, 0), min(end - begin, piece.length)
            if high > low:
                window = Piece(piece.size, piece.start + low, piece.start + high)
                sources.append(Source(window, span.operand, k))
    sources = _cut_from_large_frames(_filled(sources))
    frames = [(s.operand, s.part) for s in sources if s.part is not None and s.cut is None]
    return sources if 0 < len(sources) <= _MOST and len(set(frames)) == len(frames) else None


def _filled(sources: Sequence[Source]) -> list[Source]:
    """The sources, in which adjacent numbers are put into the frames of pieces if there is room."""
    filled: list[Source] = []
    for s in sources:
        last = filled[-1] if filled else None
        if s.part is None and last is not None and last.part is not None:
            p, n = last.piece, s.piece.length
            if p.end + n <= p.size and (not last.low or last.number == s.operand):
                grown = Piece(p.size, p.start, p.end + n)
                filled[-1] = dataclasses.replace(last, piece=grown, high=last.high + n, number=s.operand)
                continue
        if s.part is not None and last is not None and last.part is None and s.piece.start >= last.piece.length:
            p, n = s.piece, last.piece.length
            filled[-1] = dataclasses.replace(s, piece=Piece(p.size, p.start - n, p.end), low=n, number=last.operand)
            continue
        filled.append(s)
    return filled


def _cut_from_large_frames(sources: Sequence[Source]) -> list[Source]:
    """The sources, in which pieces are cut out of frames that are much larger. Their filled ends become numbers."""
    result: list[Source] = []
    for s in sources:
        p = s.piece
        if p.size <= _TIMES * p.length:
            result.append(s)
            continue
        start, end = p.start + s.low, p.end - s.high
        low, high = (Source(Piece(n, 0, n), s.number, None) for n in (s.low, s.high))
        window = Source(Piece(end - start, 0, end - start), s.operand, s.part, cut=(start, end))
        result += [q for q in (low, window, high) if q.piece.length]
    return result
