"""Moves: changes of a program. gshard tries and prices each, and keeps it if the program is better with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

M = TypeVar("M")  # a move
P = TypeVar("P")  # what the program takes with it


def tried(
    moves: Iterable[M],
    price: Callable[[M], P],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[M, P]]:
    """Prices the program with each move alone.

    It ends where another trial, which takes as long as the longest one so far, would end too late. With any time at
    all the first one is made.
    """
    end, longest = clock() + seconds, 0.0
    for move in moves if seconds > 0 else ():
        began = clock()
        if longest and began + longest > end:
            return
        found = price(move)
        longest = max(longest, clock() - began)
        yield move, found


def improve(
    start: P,
    moves: Callable[[P], Iterator[M]],
    price: Callable[[Sequence[M]], P | None],
    is_better: Callable[[P, P], bool],
    is_enough: Callable[[P], bool] = lambda _: False,
) -> list[tuple[M, P]]:
    """Puts moves together: each is kept if the program is better with it than with those before. It has the prices.

    ``moves`` has those that are left to try, given the best price so far; the first of them is tried next. ``price`` is
    of several moves; it is None where they do not fit, or where the time is over.
    """
    kept: list[tuple[M, P]] = []
    best = start
    while not is_enough(best) and (move := next(moves(best), None)) is not None:
        found = price([*(earlier for earlier, _ in kept), move])
        if found is not None and is_better(found, best):
            kept.append((move, found))
            best = found
    return kept
