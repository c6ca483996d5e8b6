"""Stopping: Ctrl-C and SIGTERM end a search, which then returns the best plan so far."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Stop:
    """What ended a search early.

    Attributes:
        number: of the signal; None as long as nothing has.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def deliver(self) -> None:
        """Acts on SIGTERM as the process would have without ``stoppable``; called where there is nothing to return."""
        if self.number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """SIGTERM raises ``KeyboardInterrupt`` inside, as Ctrl-C does; afterwards the former handler is there again.

    A handler of the user's own is called first. Signals are the main thread's: in other threads, where the process
    ignores SIGTERM, or where its handler is not one of Python's, nothing is changed.
    """
    stop = Stop()
    before: Any = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()

    def on_term(number: int, frame: Any) -> None:
        stop.number = number
        if callable(before):
            before(number, frame)
        raise KeyboardInterrupt

    installs = in_main and before is not None and before is not signal.SIG_IGN
    if installs:
        signal.signal(signal.SIGTERM, on_term)
    try:
        yield stop
    finally:
        if installs:
            signal.signal(signal.SIGTERM, before)
