"""Deadline: the time limit of a computation, which long computations check.

A search with a time budget plans a program many times, and one planning can take longer than the budget. Planning and
solving therefore call ``check_deadline`` between their steps. It does nothing outside of ``until``, and raises
``OutOfTime`` inside, once the time is over. Whoever called ``until`` goes on without the result.

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
    """The computation was cut at its deadline. It never leaves ``gshard.search``."""


_current: contextvars.ContextVar[tuple[float, Callable[[], None]] | None] = contextvars.ContextVar(
    "gshard_deadline", default=None
)


def _nothing() -> None:
    """Does nothing."""


@contextlib.contextmanager
def until(end: float, each: Callable[[], None] = _nothing) -> Iterator[None]:
    """Sets the deadline of everything inside; it replaces one that is set outside.

    Args:
        end: a time of ``time.monotonic``; ``inf`` for none.
        each: called at every check, for progress.
    """
    token = _current.set((end, each))
    try:
        yield
    finally:
        _current.reset(token)


def check_deadline() -> None:
    """Raises ``OutOfTime`` if the deadline is over. Call it only where all data structures are consistent."""
    found = _current.get()
    if found is not None:
        end, each = found
        each()
        if time.monotonic() > end:
            raise OutOfTime
