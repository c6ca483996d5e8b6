"""Pieces: represents an array along one dimension by arrays side by side; each is a window of a frame.

An array that is joined with few elements, or loses few, has shards of another size, so nearly all elements move. In
pieces each array stays where it is: operands of a join as they are, a part in the frame of the array it was cut from.

    concatenate(first, x)     1 and 256 elements                    [0:1 of 1], [0:256 of 256]
    logits[:, :1000]          of 1024                               [0:1000 of 1024]
    pad(that, 0, 24)          the window grows, and is filled       [0:1024 of 1024], an array like any other

Elements of a frame outside of its window are undefined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.program import Equation
from gshard.core.rule import Span
from gshard.rules.movement import index_of

_TIMES = 1.25  # elements of a frame for one of its window: what lies outside is computed for nothing
_MOST = 8  # pieces of an array


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The elements from ``start`` up to ``end`` of a frame of ``size``."""

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
    """An array like any other, of one piece."""
    return (Piece(n, 0, n),)


def is_whole(layout: Layout) -> bool:
    """Whether an array is one like any other."""
    return len(layout) == 1 and layout[0].is_whole


def starts_of(layout: Layout) -> list[int]:
    """Where in the array each piece begins."""
    return [sum(p.length for p in layout[:k]) for k in range(len(layout))]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What a piece is made of.

    Attributes:
        piece: what it is.
        operand: the position of the operand that it is made of, or of the number that fills it.
        part: which piece of that operand; None if it is a number.
        low, high: how many of its elements, at the ends of its window, are filled with a number, at ``number``.
        cut: the elements of the operand's frame that are cut out; None where the frame is kept.
    """

    piece: Piece
    operand: int
    part: int | None
    low: int = 0
    high: int = 0
    number: int = 0
    cut: tuple[int, int] | None = None

    @property
    def is_as_it_was(self) -> bool:
        """Whether nothing has to be computed for it."""
        return self.part is not None and not self.low and not self.high and self.cut is None


def spans_along(e: Equation, dim: int) -> list[Sequence[Span]] | None:
    """The spans of each result of an equation that only moves elements along one dimension; None for any other."""
    found = list[Sequence[Span]]()
    for index in index_of(e) or ():
        if [d for d, spans in enumerate(index) if spans] != [dim] or any(span.step != 1 for span in index[dim]):
            return None
        found.append(index[dim])
    return found or None


def sources_of(spans: Sequence[Span], layouts: Sequence[Layout | None]) -> list[Source] | None:
    """The pieces of what consists of spans.

    Args:
        spans: of operands; of one without dimensions, copies.
        layouts: of the operands; None for numbers.

    Returns:
        None if there are too many, or two are of the same array.
    """
    found: list[Source] = []
    for span in spans:
        operand, start, end, layout = span.operand, span.start, span.start + span.count, layouts[span.operand]
        if layout is None:
            found += [Source(Piece(span.count, 0, span.count), operand, None)] if span.count else []
            continue
        for k, (piece, begin) in enumerate(zip(layout, starts_of(layout), strict=True)):
            low, high = max(start - begin, 0), min(end - begin, piece.length)
            if high > low:
                found.append(Source(Piece(piece.size, piece.start + low, piece.start + high), operand, k))
    filled = _kept_small(_filled(found))
    same = [(s.operand, s.part) for s in filled if s.part is not None and s.cut is None]
    return filled if 0 < len(filled) <= _MOST and len(set(same)) == len(same) else None


def _filled(sources: Sequence[Source]) -> list[Source]:
    """The pieces with numbers beside them where there is room for them in the frame."""
    found: list[Source] = []
    for k, s in enumerate(sources):
        after = found[-1] if found else None
        if s.part is None and after is not None and after.part is not None:
            p, n = after.piece, s.piece.length
            if p.end + n <= p.size and (not after.low or after.number == s.operand):
                grown = Piece(p.size, p.start, p.end + n)
                found[-1] = dataclasses.replace(after, piece=grown, high=after.high + n, number=s.operand)
                continue
        if s.part is not None and after is not None and after.part is None and s.piece.start >= after.piece.length:
            p, n = s.piece, after.piece.length
            found[-1] = dataclasses.replace(s, piece=Piece(p.size, p.start - n, p.end), low=n, number=after.operand)
            continue
        found.append(sources[k])
    return found


def _kept_small(sources: Sequence[Source]) -> list[Source]:
    """The pieces, cut out where their frames are much larger, with numbers beside them where they were filled."""
    found: list[Source] = []
    for s in sources:
        p = s.piece
        if p.size <= _TIMES * p.length:
            found.append(s)
            continue
        start, end = p.start + s.low, p.end - s.high
        numbers = [Source(Piece(n, 0, n), s.number, None) for n in (s.low, s.high)]
        own = Source(Piece(end - start, 0, end - start), s.operand, s.part, cut=(start, end))
        found += [q for q in (numbers[0], own, numbers[1]) if q.piece.length]
    return found
