"""Sets and checks the time limit of a long computation.

A search with a time budget plans a program many times, and one planning can take longer than the budget. Planning and
solving therefore call ``check_deadline`` between their steps. Outside of ``until`` it does nothing. Inside, it raises
``OutOfTime`` after the deadline. The caller of ``until`` catches the exception and continues without the result.

    >>> with until(time.monotonic() + 60):
    ...     check_deadline()
    >>> with until(time.monotonic() - 1):
    ...     check_deadline()
    Traceback (most recent call last):
    gshard.core.deadline.OutOfTime
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator


class OutOfTime(Exception):
    """The deadline has passed. ``gshard.search`` catches this exception; users never see it."""


_current: contextvars.ContextVar[tuple[float, Callable[[], None]] | None] = contextvars.ContextVar(
    "gshard_deadline", default=None
)


def _nothing() -> None:
    """Does nothing."""


@contextlib.contextmanager
def until(end: float, at_each_check: Callable[[], None] = _nothing) -> Iterator[None]:
    """Sets the deadline of a ``with`` block. It replaces the deadline of an enclosing block."""
    token = _current.set((end, at_each_check))
    try:
        yield
    finally:
        _current.reset(token)


def check_deadline() -> None:
    """Raises ``OutOfTime`` after the deadline. Call it only where all data structures are consistent."""
    deadline = _current.get()
    if deadline is not None:
        end, at_each_check = deadline
        at_each_check()
        if time.monotonic() > end:
            raise OutOfTime
