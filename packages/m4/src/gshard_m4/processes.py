"""Processes that train together: what the training loop asks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from gshard_m4.step import Batch

Draw = Callable[..., Batch]
"""``draw(step)`` is a whole batch, ``draw(step, process, processes)`` one of so many parts of it: rows p B / n to
(p + 1) B / n, rounded down."""


class Alone:
    """One process: a run as it sees it. `gshard_m4.together.Together` is one of several.

    Use it as a context around training. With several processes, leaving it tells the others how this one ended.

    Attributes:
        first: whether this is the one that writes metrics and talks to the user.
    """

    first = True

    def at(self, step: int, phase: str) -> None:
        """Says what this process is about to do."""

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Compares what all processes are about to do; all of them must ask.

        Raises:
            TrainError: some setting is not the same for all.
        """

    def any(self, *values: bool) -> tuple[bool, ...]:
        """For each value, whether it is true in any of the processes; all of them must call this."""
        return values

    def batch(self, draw: Draw, step: int) -> Batch:
        """The batch of a step, as far as this process needs it."""
        return draw(step)

    def runs(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a compiled step so that it takes arrays in the memory of this process."""
        return compiled

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Training ends, or failed."""
