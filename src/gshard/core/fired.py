"""Fired: the record of one rewrite of a program."""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass(frozen=True, slots=True)
class Fired:
    """One rewrite that fired.

    Attributes:
        rewrite: its name, that of a module in ``gshard.rewrite``.
        line: the user's line of the first equation that it replaced.
        before, after: the names of the equations that it replaced, and of those in their place.

    >>> print(Fired("sink_pad", "train.py:12 (loss)", ("pad",), ("pad", "pad", "add", "select_n")))
    sink_pad at train.py:12 (loss): pad -> 2 pad, add, select_n
    """

    rewrite: str
    line: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"{self.rewrite}{at}: {_counted(self.before)} -> {_counted(self.after)}"


def _counted(names: tuple[str, ...]) -> str:
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in Counter(names).items()) or "nothing"
