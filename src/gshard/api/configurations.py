"""Configurations: what ``gshard.configure`` returns: the configurations that were found, and a bound for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gshard.api.configuration import Configuration
from gshard.core.number_text import format_seconds, significant
from gshard.core.program import format_bytes
from gshard.device.machine import Machine
from gshard.explanation.verdict import headline
from gshard.search.find import ended, how_near

_SHOWN = 5  # rows of the table
_NONE = 1e-5  # a gap that counts as none, to the printed digits


@dataclasses.dataclass(frozen=True, slots=True)
class NotSearched:
    """A configuration that was left out, and why."""

    text: str  # its keywords, and where the state is
    why: str  # the reason
    fits: bool  # whether it may fit into memory. If not, no bound needs to hold for it.
    least_seconds: float = 0.0  # seconds that it takes at least in the simplified model; 0 if nothing is known
    is_estimated: bool = True  # whether it was estimated

    def __str__(self) -> str:
        return f"{self.text}: {self.why}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Configurations:
    """The configurations that were found for a step, the best first.

    Attributes:
        rows: the configurations that have a plan: first those that fit, by time; then the others, by memory.
        not_searched: the configurations without a plan, and why they have none.
        machine: the machine.
        limit: bytes that a device may hold.
        bound: seconds that no plan of any configuration goes below, in the simplified model of ``gshard.search``; 0 if
            some configuration was not estimated. It is for plans without recomputed values, besides those that the
            builder's step recomputes, and without collective matmuls, on the meshes that were given.
        searched_bound: the same for the configurations whose problems were solved on all meshes only; 0 if none was.
        solved: the number of these.
        left_out: steps that were cut, or not begun, because the time was over.
        failed: steps that ended with an error, each with its first line.
        notes: what else limits the result.
        seconds: the time that it took.
        stopped: the signal that ended it; None if none did.
    """

    rows: tuple[Configuration, ...]
    not_searched: tuple[NotSearched, ...]
    machine: Machine
    limit: float
    bound: float
    searched_bound: float
    solved: int
    left_out: tuple[str, ...]
    failed: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    stopped: int | None = None

    @property
    def best(self) -> Configuration:
        """The best configuration."""
        return self.rows[0]

    def __iter__(self) -> Iterator[Configuration]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Configuration:
        return self.rows[i]

    @property
    def gap(self) -> float | None:
        """The largest share of the best configuration's time in the simplified model that another one could save.

        None if nothing is proven: there is no bound over all configurations, the model has no plan like the best, or
        its mesh has three axes.
        """
        found = self.best.found
        if found is None or found.best.predicted is None or found.best.near is not None or not self.bound:
            return None
        return max(0.0, 1 - self.bound / found.best.predicted)

    def table(self, shown: int = _SHOWN) -> str:
        """The best configurations, one a line.

        Args:
            shown: the number of lines.
        """
        keywords = list(dict.fromkeys(key for row in self.rows for key in row.keywords))
        batch = any(row.global_batch is not None for row in self.rows)
        head = ["a step", *(["examples/s"] if batch else []), "peak", "sent", "on host", "mesh", *keywords]
        lines = [[*head, "gshard recomputes", "gap"]]
        for row in self.rows[:shown]:
            fits = row.cost.peak <= self.limit
            rate = row.examples_per_second
            lines.append([
                format_seconds(row.seconds),
                *([significant(rate, 4) if rate is not None else ""] if batch else []),
                f"{format_bytes(row.cost.peak)}{'' if fits else ', does not fit'}",
                format_bytes(row.cost.sent),
                format_bytes(row.bytes_on_host) if row.built.host else "-",
                " ".join(f"{name}={size}" for name, size in row.mesh.axes),
                *(_shown(row.keywords, key) for key in keywords),
                "yes" if row.recomputes else "-",
                _percent(self._gap_of(row)),
            ])  # fmt: skip
        return "\n".join(_columns(lines))

    def _gap_of(self, row: Configuration) -> float | None:
        """The share of its time in the model that a plan of the same configuration could save."""
        return None if row.found is None else row.found.gap

    def data(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        rows = [
            {
                "keywords": {key: _plain(value) for key, value in row.keywords.items()},
                "seconds": row.seconds, "examples_per_second": row.examples_per_second, "peak": row.cost.peak,
                "fits": row.cost.peak <= self.limit, "sent": row.cost.sent, "flops": row.cost.flops,
                "bytes_on_host": row.bytes_on_host, "mesh": dict(row.mesh.axes), "recomputes": row.recomputes,
                "gap": self._gap_of(row), "by_bound": row.cost.by_bound,
            }
            for row in self.rows
        ]  # fmt: skip
        return {
            "machine": self.machine.name, "memory_limit": int(self.limit), "configurations": rows,
            "bound": self.bound, "searched_bound": self.searched_bound, "gap": self.gap,
            "not_searched": [dataclasses.asdict(other) for other in self.not_searched],
            "left_out": list(self.left_out), "failed": list(self.failed), "notes": list(self.notes),
            "seconds": self.seconds,
        }  # fmt: skip

    def html(self, path: str | Path) -> Path:
        """Writes the report of the best plan as one page, as ``gshard.search`` does. Returns the path."""
        return self.best.search_result.html(path)

    def __str__(self) -> str:
        best = self.best
        total = len(self.rows) + len(self.not_searched)
        lines = [
            f"{total} configuration{'s' * (total != 1)} on {self.machine.name}, "
            f"{format_bytes(int(self.limit))} of memory; {len(self.rows)} with plans; {self.seconds:.1f} s",
            self.table(),
            headline(best.cost),
        ]
        if best.found is not None:
            lines.append(f"the best: {how_near(best.found.best)}")
        if best.recomputes:
            lines.append("gshard recomputes some of its values to fit: best.jit() has the memory limit for that")
        lines += self._bounds()
        lines += _folded(self.not_searched)
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines + ended(self.seconds, self.left_out, self.stopped, self.failed))

    __repr__ = __str__

    def _bounds(self) -> list[str]:
        text, best = "in the simplified model of gshard.search", self.best.found
        if any(row.found is not None and row.found.best.near is not None for row in self.rows):
            text += ", on meshes with up to two axes"
        if self.bound:
            lines = [f"{text}, no configuration takes less than {format_seconds(self.bound)}"]
            if self.gap is not None and best is not None and best.best.predicted is not None:
                lines[0] += f"; the best takes {format_seconds(best.best.predicted)} there, {_more(self.gap)}"
        else:
            lines = ["there is no bound over all configurations, because some were not estimated"]
        if self.solved and self.searched_bound > self.bound:
            lines.append(
                f"the {self.solved} that {'was' if self.solved == 1 else 'were'} searched on all meshes: no plan takes "
                f"less than {format_seconds(self.searched_bound)} there"
            )
        return lines


def _folded(others: Sequence[NotSearched]) -> list[str]:
    """A line for each reason why configurations have no plan, with their number and the first of them."""
    of_reason: dict[str, list[NotSearched]] = {}
    for other in others:
        of_reason.setdefault(other.why, []).append(other)
    return [f"{len(some)} {why}: {some[0].text}{', ...' * (len(some) > 1)}" for why, some in of_reason.items()]


def _shown(keywords: dict[str, Any], key: str) -> str:
    return str(keywords[key]) if key in keywords else ""


def _percent(gap: float | None) -> str:
    return "-" if gap is None else "0 %" if gap < _NONE else f"{significant(100 * gap, 2)} %"


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def _more(gap: float) -> str:
    return "no more" if gap < _NONE else f"at most {significant(100 * gap / (1 - gap), 2)} % more"
