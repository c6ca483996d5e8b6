"""Prints the progress of a search and its best plan on stderr.

A search that takes two seconds or less prints nothing. A longer one prints a line for each step and each better plan,
and at least one every ten seconds. It does so even if stderr is no terminal: in notebooks and logs of batch jobs, a
silent search looks like a hanging one.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable

_SILENT = 2.0  # seconds, by default
_BEAT = 10.0  # seconds after which an unfinished step is reported again


@dataclasses.dataclass(eq=False)
class Progress:
    """The lines of one search."""

    write: Callable[[str], object] | None  # prints a line; None to print nothing
    silent: float = 0.0  # seconds from the beginning in which nothing is printed
    # when the search began (``time.monotonic``)
    since: float = dataclasses.field(default_factory=lambda: time.monotonic())
    doing: str = ""  # the present step
    best: str = ""  # the best plan so far, as text
    name: str = "gshard.search"  # what the lines begin with
    end: float = math.inf  # when the search ends at the latest (``time.monotonic``)
    _last: float = -float("inf")  # the time of the last line

    @staticmethod
    def of(option: bool | Callable[[str], object] | None) -> Progress:
        """Reads the option ``gshard.search(progress=...)``."""
        if callable(option):
            return Progress(option)
        return Progress(_on_stderr if option is None or option else None, _SILENT if option is None else 0.0)

    def step(self, doing: str) -> None:
        """Reports that a step begins."""
        self.doing = doing
        self._print(doing)

    def better(self, plan: str) -> None:
        """Reports a better plan."""
        self.best = f"best so far: {plan}"
        self._print(self.best)

    def beat(self) -> None:
        """Prints the present step again if ten seconds have passed without a line. A long step calls it often."""
        if self.write is not None and time.monotonic() - self._last > _BEAT:
            left = f" (ends in {max(self.end - time.monotonic(), 0):.0f} s at most)" if self.end < math.inf else ""
            self._print(f"still {self.doing}{left}")

    def _print(self, text: str) -> None:
        now = time.monotonic()
        if self.write is None or now - self.since < self.silent:
            return
        best = f"; {self.best}" if self._last < self.since and self.best and self.best != text else ""
        self._last = now
        self.write(f"{self.name} {now - self.since:5.1f} s: {text}{best}")


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
