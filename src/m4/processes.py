"""Processes that train together: what the training loop asks of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol


class Group(Protocol):
    """The processes of one run, seen from one of them. Enter it before training: its end is told to the others.

    Attributes:
        first: whether this is the one that writes metrics and talks to the user.
    """

    first: bool

    def at(self, step: int, phase: str) -> None:
        """Says what this process is about to do."""

    def any(self, asked: bool) -> bool:
        """Whether it is true in any of the processes; all of them must ask."""

    def runs(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled step as it is called with arrays of this process's memory."""

    def nothing(self) -> AbstractContextManager[None]:
        """In place of what only the first process has."""

    def __enter__(self) -> Any:
        """Training begins."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Training ends, or failed."""


class Alone:
    """One process."""

    first = True

    def at(self, step: int, phase: str) -> None:
        """Nobody wants to know."""

    def any(self, asked: bool) -> bool:
        """What this process says."""
        return asked

    def runs(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """JAX places the arrays."""
        return compiled

    def nothing(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass
