"""Stopping on request: the first SIGTERM is noted, so that the step can be finished and saved."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 143
"""Exit code after a request to stop (SIGTERM) that was followed by saving: 128 + 15."""


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM came: the first one is only noted, a second one ends the process as usual.

    Enter it after ``jax.distributed.initialize``, whose own handler swallows the signal.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)
