"""Defines the record of a rewrite that has changed a program."""

from __future__ import annotations

import dataclasses
from collections import Counter

# Rewrites that are no modules of ``gshard.rewrite``. Their notes describe what they made.
BATCH_EQUAL_FUNCTIONS, RUN_AS_PIPELINE = "batch_equal_functions", "run_as_pipeline"


@dataclasses.dataclass(frozen=True, slots=True)
class Fired:
    """One rewrite that has changed a program.

    >>> print(Fired("sink_pad", "train.py:12 (loss)", ("pad",), ("pad", "pad", "add", "select_n")))
    sink_pad at train.py:12 (loss): pad -> 2 pad, add, select_n
    """

    # the name of the rewrite: of a module in ``gshard.rewrite``, ``batch_equal_functions`` (``planning.batched``) or
    # ``run_as_pipeline`` (``planning.pipelined``)
    rewrite: str
    line: str  # the user's source line of the first replaced equation
    # before, after: the primitive names of the replaced equations, and of the equations in their place
    before: tuple[str, ...]
    after: tuple[str, ...]
    note: str = ""  # the functions that it batches or the pipeline, as text; empty for other rewrites

    def __str__(self) -> str:
        location = f" at {self.line}" if self.line else ""
        return f"{self.rewrite}{location}: {_counted(self.before)} -> {_counted(self.after)}"


def _counted(names: tuple[str, ...]) -> str:
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in Counter(names).items()) or "nothing"
