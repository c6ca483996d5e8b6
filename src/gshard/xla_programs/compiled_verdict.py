"""Compiled verdict: what bounds a call of a compiled program, in a few sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.number_text import format_seconds
from gshard.core.program import format_bytes
from gshard.device.machine_kinds import COMPILERS
from gshard.explanation.bounds import CallVerdict, remedies
from gshard.xla_programs.compiled_cost import CompiledCost
from gshard.xla_programs.compiled_rows import CompiledRow

_HIDDEN = 0.005  # of the network's seconds: less is not worth a sentence


@dataclasses.dataclass(frozen=True)
class CompiledVerdict(CallVerdict):
    """What bounds one call of a compiled program on a machine, as modelled."""

    cost: CompiledCost  # what it was read from
    rows: Sequence[CompiledRow] = dataclasses.field(repr=False)  # the collectives, with their seconds on this machine
    platform: str = ""  # what the program was compiled for; empty if that is not known

    @property
    def ideal(self) -> float:
        """Seconds that the products take at the machine's peak rate."""
        works = ((k.work, k.times) for k in self.cost.kernels)
        return sum(w.products * times / self.cost.machine.peak(w.dtype) for w, times in works if w is not None)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The others."""
        more = self._compute(), self._network(), self._memory(), self._unknown(), self._elsewhere()
        return tuple(text for text in (*remedies(self.cost), *more) if text)

    def _compute(self) -> str:
        if not self.ideal:
            return "There is no matrix product whose operations are known."
        return (
            f"The products of a device would take {format_seconds(self.ideal)} at the peak rate: "
            f"{100 * self.share:.0f} % of the call."
        )

    def _network(self) -> str:
        if not self.rows:
            return "No device sends anything."
        most, total = self.rows[0], max(self.cost.sent, 1)
        text = (
            f"Of {format_bytes(self.cost.sent)} that each device sends, {100 * most.bytes / total:.0f} % is the "
            f"{most.kind} of {most.array} over {most.axes} at {most.line or most.module or 'no known line'}."
        )
        taken, hidden = sum(row.seconds for row in self.rows), self.cost.overlapped
        if taken and hidden > _HIDDEN * taken:
            text += f" {100 * hidden / taken:.0f} % of the network's {format_seconds(taken)} passes while kernels run."
        longest = max(self.rows, key=lambda row: row.exposed)
        if longest is not most and longest.exposed:
            text += (
                f" The call waits longest, {format_seconds(longest.exposed)}, for the {longest.kind} of "
                f"{longest.array} at {longest.line or longest.module or 'no known line'}."
            )
        return text

    def _unknown(self) -> str:
        if not self.cost.unknown:
            return ""
        return f"Kernels whose operations are not known count by their bytes only: {', '.join(self.cost.unknown)}."

    def _elsewhere(self) -> str:
        machine = self.cost.machine
        if not self.platform or machine.compiler == COMPILERS.get(self.platform, machine.compiler):
            return ""
        return (
            f"XLA compiled this program for {self.platform}. For {machine.kind or machine.name} it fuses and combines "
            "otherwise, and may choose other collectives: compile for the devices themselves to see those."
        )
