"""Stopping on request: the first SIGTERM or SIGINT (Ctrl-C) is recorded, so that the step can be finished and saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDS_AT_ONCE = {signal.SIGTERM: "a second SIGTERM", signal.SIGINT: "Ctrl-C once more"}


class StopRequest:
    """Whether a signal requested the end of training.

    Attributes:
        signal: the number of the first signal; 0 before one came.
    """

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self) -> bool:
        """Whether a signal came."""
        return self.signal != 0

    @property
    def exit_code(self) -> int:
        """Exit code of a process that saved and ended: 143 after SIGTERM, 130 after SIGINT.

        A process that received no signal itself was stopped with the other processes of its run, and ends with 143.
        """
        return 128 + (self.signal or signal.SIGTERM)


@contextmanager
def asked_to_stop() -> Iterator[StopRequest]:
    """Records the first SIGTERM and the first SIGINT; the second one of a kind ends the process at once.

    Each kind counts by itself, since a supervisor that receives Ctrl-C often sends SIGTERM to its children, who have
    received Ctrl-C from the terminal already. SIGINT stays ignored where the process was started with it ignored, as a
    shell script does with ``&``. Enter it after ``jax.distributed.initialize``, whose own handler swallows SIGTERM.
    """
    request = StopRequest()

    def record(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        request.signal = request.signal or number
        again = _ENDS_AT_ONCE[signal.Signals(number)]
        told = f"\ngshard-m4: stopping after this step, which is saved; {again} ends the process at once\n"
        os.write(2, told.encode())  # this handler may interrupt a write to sys.stderr, which allows no other within

    handled = [number for number in _ENDS_AT_ONCE if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, record) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
