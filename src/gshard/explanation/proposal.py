"""Proposal: a change of marks with which the devices send less.

``changes`` finds which marks could be changed, ``trials`` plans the program again with each change and keeps those that
lower the bytes of the whole program. This module has the result.
"""

from __future__ import annotations

import dataclasses

from gshard.core.number_text import format_seconds
from gshard.core.program import format_bytes
from gshard.core.spmd import SpmdProgram
from gshard.device.cost import Cost, cost


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A change of marks, and what it brings."""

    mark: str  # the source text, ``gshard.shard(x, P('data', None))``
    at: str  # what to mark: an argument's name, or the line and operation that make the value
    before: int  # before, after: bytes that each device sends in one call, as the program is and with the change
    after: int
    instead: str = ""  # the mark that is there now, if this one takes its place; ``mark`` is empty if it can just go
    # the per-device program with the change
    spmd: SpmdProgram | None = dataclasses.field(default=None, repr=False, compare=False)
    # what a call takes on a machine, as the program is and with the change (``on``)
    costs: tuple[Cost, Cost] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def change(self) -> str:
        """What to do: ``gshard.replicate(x) on ...``, ``remove replicate(x) at ...``."""
        if not self.instead:
            return f"{self.mark} on {self.at}"
        return (
            f"{self.mark} instead of {self.instead} at {self.at}"
            if self.mark
            else f"remove {self.instead} at {self.at}"
        )

    def on(self, now: Cost) -> Proposal:
        """The same with what a call takes on a machine, by which those that send less but take longer can be told."""
        if self.spmd is None:
            return self
        captured = len(self.spmd.program.captured)
        return dataclasses.replace(self, costs=(now, cost(self.spmd, now.machine, [i - captured for i in now.donated])))

    @property
    def is_slower(self) -> bool:
        """Whether a call takes longer with the change, where that is known."""
        return self.costs is not None and self.costs[1].seconds > self.costs[0].seconds

    @property
    def result(self) -> str:
        """What was found: bytes, and where a machine is known time and memory too."""
        text = f"with this change, each device sends {format_bytes(self.after)} instead of {format_bytes(self.before)}"
        if self.costs is None:
            return f"{text}."
        now, then = self.costs
        times = f"a call takes {format_seconds(then.seconds)} instead of {format_seconds(now.seconds)}"
        held = f"the memory peak is {format_bytes(then.peak)} instead of {format_bytes(now.peak)}"
        same = format_bytes(then.peak) == format_bytes(now.peak)
        return f"{text}, and {times}." if same else f"{text}, {times}, and {held}."

    def __str__(self) -> str:
        return f"This change removes or reduces it: {self.change}: {self.result}"
