"""Tried changes: compiles a program with changes, one by one, and puts those together that help."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from gshard.core.number_text import format_ms
from gshard.core.program import format_bytes, format_flops
from gshard.search.time_budget import Watch

WORTH = 0.98  # of bytes, memory or seconds: a change must spare 2 % of one
SAME = 1.001  # of bytes, memory or seconds: no more is no more
ROWS = 8  # changes that are printed


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What a compiled program takes."""

    sent: int  # bytes that each device sends in one call
    peak: int  # bytes that it holds at most
    seconds: float  # of a call, as modelled; 0 without a machine
    messages: int  # collectives that run in one call
    flops: int  # operations that each device performs

    @property
    def rank(self) -> tuple[float, int, int]:
        """Orders figures, the better first: by time, where it is known, then by bytes and memory."""
        return self.seconds, self.sent, self.peak

    def change_to(self, after: Figures) -> str:
        """What another program takes instead, as text."""
        pairs = [
            ("sent", format_bytes(self.sent), format_bytes(after.sent)),
            ("messages", f"{self.messages:,}", f"{after.messages:,}"),
            ("peak", format_bytes(self.peak), format_bytes(after.peak)),
        ]
        if self.seconds:
            pairs.append(("a call", f"{format_ms(self.seconds)}", f"{format_ms(after.seconds)}"))
        else:
            pairs.append(("computed", format_flops(self.flops), format_flops(after.flops)))
        return ", ".join(f"{what} {then} -> {now}" if then != now else f"{what} {then}" for what, then, now in pairs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TriedChange:
    """A change of a program."""

    # what the program takes with it; None before it is compiled, and if JAX or XLA refuses it
    figures: Figures | None = None

    @property
    def parts(self) -> set[Hashable]:
        """What it is about: of one part one change can be made."""
        raise NotImplementedError


Change = TypeVar("Change", bound=TriedChange)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried(Generic[Change]):
    """What became of changes."""

    before: Figures  # what the unchanged program takes
    helping: tuple[Change, ...]  # the changes that help by themselves, the best first
    together: tuple[tuple[Change, ...], Figures]  # those of them that help together, and what the program then takes
    tried: int  # tried, changes: how many changes were compiled, of how many
    changes: int
    # at how many of these JAX or XLA failed, or ``jax.jit``, which may have been given ``in_shardings``
    refused: int = 0

    @property
    def of(self) -> str:
        """How many were compiled, as text."""
        return f"{self.tried} of {self.changes}" if self.tried < self.changes else f"all {self.changes}"

    @property
    def lines(self) -> tuple[str, list[str]]:
        """The result as a title and lines below it."""
        raise NotImplementedError

    def __str__(self) -> str:
        title, rows = self.lines
        return "\n".join([f"{title}{':' if rows else '.'}", *(f"  {row}" for row in rows)])


def try_changes(
    before: Figures,
    changes: Sequence[Change],
    compiled: Callable[[Sequence[Change]], Figures | None],
    helps: Callable[[Figures, Figures], bool],
    seconds: float,
    *,
    alone: float = 1.0,
    only_best: bool = False,
) -> Tried[Change]:
    """Compiles a program with changes."""
    began = time.monotonic()
    watch = Watch(began + alone * seconds)

    def figures(some: Sequence[Change]) -> Figures | None:
        with watch.trial():
            return compiled(some)

    helping: list[tuple[Figures, Change]] = []
    tried = refused = 0
    for change in changes if seconds > 0 else ():
        if watch.is_over:
            break
        tried, made = tried + 1, figures([change])
        refused += made is None
        if made is not None and helps(made, before):
            helping.append((made, dataclasses.replace(change, figures=made)))
    helping.sort(key=lambda pair: pair[0].rank)
    if only_best:
        best: dict[Hashable, tuple[Figures, Change]] = {}
        for made, change in helping:
            best.setdefault(frozenset(change.parts), (made, change))
        helping = list(best.values())
    watch.end = began + seconds
    after, together = before, list[Change]()
    for made, change in helping:
        if not together:
            after, together = made, [change]
        elif not watch.is_over and not any(change.parts & kept.parts for kept in together):
            more = figures([*together, change])
            if more is not None and helps(more, after):
                after, together = more, [*together, change]
    return Tried(
        before=before, helping=tuple(change for _, change in helping), together=(tuple(together), after), tried=tried,
        changes=len(changes), refused=refused,
    )  # fmt: skip
