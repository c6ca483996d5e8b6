"""The common base of explanations of gshard's programs and of XLA's: their difference, and their page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.program import format_bytes
from gshard.device.machine import Machine
from gshard.explanation.difference import Difference, difference
from gshard.explanation.report.page import page


@without_our_frames_in_methods
class Comparable:
    """An explanation, of gshard's program or of XLA's."""

    if TYPE_CHECKING:

        @property
        def bytes_by_kind(self) -> dict[str, int]: ...
        def data(self, machine: Machine | str | None = None) -> dict[str, Any]: ...

    @property
    def total_bytes(self) -> int:
        """Bytes that each device sends in one call."""
        return sum(self.bytes_by_kind.values())

    @property
    def _sent_line(self) -> str:
        """The line with the bytes that each device sends."""
        kinds = sorted(self.bytes_by_kind.items(), key=lambda pair: -pair[1])
        each = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in kinds)
        return f"  each device sends {format_bytes(self.total_bytes)} in one call{f': {each}' if each else ''}"

    def difference(self, before: Comparable | Mapping[str, Any], machine: Machine | str | None = None) -> Difference:
        """What became more and what less against another explanation, by line of the source."""
        return difference(_data_of(before, machine), self._compared(machine))

    def _compared(self, machine: Machine | str | None) -> Mapping[str, Any]:
        """The data that a difference reads."""
        return self.data(machine)

    def _write_page(
        self,
        path: str | Path,
        data: dict[str, Any],
        against: Comparable | Mapping[str, Any] | None,
        machine: Machine | str | None,
    ) -> Path:
        """Writes the report, with the difference to another explanation, if one is given."""
        if against is not None:
            data["difference"] = difference(_data_of(against, machine), data).data()
        return write_text(path, page(data))


def _data_of(side: Comparable | Mapping[str, Any], machine: Machine | str | None) -> Mapping[str, Any]:
    """The data of an explanation; data that is given stays."""
    return side._compared(machine) if isinstance(side, Comparable) else side


def write_text(path: str | Path, text: str) -> Path:
    """Writes a file, and returns its path."""
    Path(path).write_text(text, "utf-8")
    return Path(path)


def write_trace(path: str | Path, events: dict[str, Any]) -> Path:
    """Writes a timeline in the Trace Event Format, and returns the path."""
    return write_text(path, json.dumps(events, separators=(",", ":"), allow_nan=False))
