"""Sets and checks the time limit of a long computation.

Planning and solving call ``check_deadline`` between their steps. Inside of ``until`` it raises ``OutOfTime`` after the
deadline; the caller of ``until`` catches it and continues without the result. Outside it does nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator


class OutOfTime(Exception):
    """The deadline has passed. ``gshard.search`` catches this exception; users never see it."""


_current: contextvars.ContextVar[tuple[float, Callable[[], object]] | None] = contextvars.ContextVar(
    "gshard_deadline", default=None
)


@contextlib.contextmanager
def until(end: float, at_each_check: Callable[[], object] = lambda: None) -> Iterator[None]:
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
