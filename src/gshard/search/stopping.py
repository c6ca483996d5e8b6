"""Lets Ctrl-C and SIGTERM end a search, which then returns the best plan so far."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Stop:
    """The signal that ended a search."""

    def __init__(self) -> None:
        self.number: int | None = None  # the number of the signal; None if there was none

    def deliver(self) -> None:
        """Raises SIGTERM again if its default action was replaced. Called if the search has nothing to return."""
        if self.number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Makes SIGTERM raise ``KeyboardInterrupt`` inside, as Ctrl-C does, and restores the former handler afterwards.

    A handler of the user's own is called first. Python handles signals in the main thread. In other threads, or if the
    process ignores SIGTERM or handles it outside of Python, nothing changes.
    """
    stop = Stop()
    former: Any = signal.getsignal(signal.SIGTERM)
    in_main_thread = threading.current_thread() is threading.main_thread()

    def on_term(number: int, frame: Any) -> None:
        stop.number = number
        if callable(former):
            former(number, frame)
        raise KeyboardInterrupt

    installs = in_main_thread and former is not None and former is not signal.SIG_IGN
    if installs:
        signal.signal(signal.SIGTERM, on_term)
    try:
        yield stop
    finally:
        if installs:
            signal.signal(signal.SIGTERM, former)
