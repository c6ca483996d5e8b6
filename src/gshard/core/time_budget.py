"""Tracks the remaining time of a search, prints its progress, and lets signals end it with the best plan so far."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from gshard.core.errors import ArgumentError
from gshard.core.planning_tables import tables


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


# Prints the progress of a search and its best plan on stderr.

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
    part: str = ""  # the part of the search that it is of, whose steps are shown if they take long only
    _last: float = -float("inf")  # the time of the last line

    @staticmethod
    def of(option: bool | Callable[[str], object] | None) -> Progress:
        """Reads the option ``gshard.search(progress=...)``."""
        if callable(option):
            return Progress(option)
        on_stderr = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        return Progress(on_stderr if option is None or option else None, _SILENT if option is None else 0.0)

    def step(self, doing: str) -> None:
        """Reports that a step begins."""
        self.doing = f"{self.part}: {doing}" if self.part else doing
        if self.part:
            self.beat()
        else:
            self._print(doing)

    def better(self, plan: str) -> None:
        """Reports a better plan."""
        if not self.part:
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


EFFORT = 0.1  # of the solver: for a plan without search, for problems after the first, and for each of many
TRIAL_SECONDS = 10.0  # of all trials of an explanation, if the user gives none
DEFAULT_SECONDS = 300.0  # the time of a search, if the user gives none

T = TypeVar("T")
M = TypeVar("M")  # a move: a change of a program
P = TypeVar("P")  # what the program takes with it


@dataclasses.dataclass(eq=False)
class TimeBudget:
    """The time of one search: all its meshes, plans and prices."""

    seconds: float = DEFAULT_SECONDS  # how long the search may take
    # whether solving continues as long as there is time; otherwise the size of the problem limits its steps, and the
    # time only cuts them
    uses_all: bool = False
    progress: Progress = dataclasses.field(default_factory=lambda: Progress.of(None))  # prints the lines
    left_out: list[str] = dataclasses.field(default_factory=list)  # steps that were cut or not begun
    # candidates that ended with an error, each with its first line
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    end: float = math.inf  # the end of the time (``time.monotonic``)

    def __post_init__(self) -> None:
        self.end = min(self.end, self.progress.since + self.seconds)
        self.progress.end = min(self.progress.end, self.progress.since + self.seconds)

    @staticmethod
    def of(seconds: float | None, progress: bool | Callable[[str], object] | None = None) -> TimeBudget:
        """Reads the options ``budget_seconds`` and ``progress`` of ``gshard.search``."""
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds > 0):
            raise ArgumentError(
                f"budget_seconds={seconds!r} is no time to search for.",
                hint="Give seconds above zero, or None for as many steps as follow from the size of the program.",
            )
        uses_all = seconds is not None and math.isfinite(seconds)
        return TimeBudget(DEFAULT_SECONDS if seconds is None else seconds, uses_all, Progress.of(progress))

    @property
    def spent(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self.progress.since

    @property
    def left(self) -> float:
        """Seconds that are left, zero or more."""
        return max(0.0, self.end - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.left <= 0

    @property
    def failed_lines(self) -> tuple[str, ...]:
        """``failed`` as text."""
        return tuple(f"{name}: {error}" for name, error in self.failed.items())

    def part(self, of: int = 2) -> TimeBudget:
        """A budget with one of so many equal parts of the time that is left. ``left_out`` and ``failed`` are shared."""
        return dataclasses.replace(self, end=min(self.end, time.monotonic() + self.left / of))

    def attempt(self, name: str, run: Callable[[], T], *, always: bool = False, raises: bool = False) -> T | None:
        """The result of a step of the search; None if its time was over, or if it failed.

        A step is cut when the time is over, and does not begin after that, unless it runs ``always``. An error of any
        kind ends this step, not the search, unless it ``raises``.
        """
        if not always and self.is_over:
            self.left_out.append(name)
            return None
        self.progress.step(name)
        try:
            with until(math.inf if always else self.end, self.progress.beat):
                return run()
        except OutOfTime:
            self.left_out.append(name)
        except Exception as error:  # of any kind: other steps have results
            if raises:
                raise
            logging.getLogger("gshard.search").debug(name, exc_info=True)
            self.failed[name] = in_a_line(error)
        return None


def in_a_line(error: Exception) -> str:
    """The type and the first line of an error.

    >>> in_a_line(ValueError("no such size"))
    'ValueError: no such size'
    """
    return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]}"


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


# Lets Ctrl-C and SIGTERM end a search, which then returns the best plan so far.


def until_stopped(search: Callable[[], None], result: Callable[[int | None], T | None]) -> T:
    """Runs a search to its end, or to a signal, and returns its result, which is given the number of the signal.

    SIGTERM raises ``KeyboardInterrupt`` in the search, as Ctrl-C does, after a handler of the user's own. In other
    threads than the main one, or if the process ignores SIGTERM or handles it outside of Python, nothing changes. If
    the search has nothing to return, the signal has its usual effect.
    """
    numbers: list[int] = []  # of signals
    former: Any = signal.getsignal(signal.SIGTERM)

    def on_term(number: int, frame: Any) -> None:
        numbers.append(number)
        if callable(former):
            former(number, frame)
        raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    installs = in_main_thread and former is not None and former is not signal.SIG_IGN
    if installs:
        signal.signal(signal.SIGTERM, on_term)
    try:
        try:
            with tables():
                search()
        except KeyboardInterrupt:
            numbers.append(signal.SIGINT)
        # What a signal left half done may be in the tables: from here on there are new ones.
        if (found := result(numbers[0] if numbers else None)) is not None:
            return found
    finally:
        if installs:
            signal.signal(signal.SIGTERM, former)
    if numbers[:1] == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.raise_signal(signal.SIGTERM)
    raise KeyboardInterrupt
