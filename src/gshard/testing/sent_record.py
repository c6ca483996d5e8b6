"""Sent record: what a compiled program sends and holds, as the text of a baseline file and read from it.

# Collectives in one call of step: number, bytes that each device sends, axes, array, module.
# gshard writes this file: review it, and write it again with pytest --gshard-update.
# jax 0.10.2, cpu

mesh  data=8
peak  1,089,856 bytes

all_gather          x12           2,752,512  over data        params.w
all_gather          x12           2,752,512  over data        in all

total               x12           2,752,512  over all axes    in all
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping

import jax

from gshard.core.program import format_bytes
from gshard.xla.hlo_collectives import Sent
from gshard.xla_programs.compiled_explanation import CompiledExplanation
from gshard.xla_programs.compiled_rows import CompiledRow
from gshard.xla_programs.moved_parts import axes_text

IN_ALL = "in all"
_UNNAMED = "(not named)"
_APART = re.compile(r"\s{2,}")
_VERSION = re.compile(r"# jax (\S+), (\S+)")

Key = tuple[str, str, str, str]  # kind, axes, array, module
Sums = Mapping[tuple[str, str], tuple[int, int]]  # of a kind over axes: how many run, and the bytes of all


@dataclasses.dataclass(frozen=True)
class SentRecord:
    """What a compiled program sends and holds."""

    name: str  # of the function
    mesh: str  # the axes of the mesh with their sizes
    peak: int  # bytes that a device holds
    # of each array how many collectives move it, and the bytes that each device sends in all of them
    rows: Mapping[Key, tuple[int, int]]
    sums: Sums  # the same of all collectives of a kind over the same axes; one that moves several arrays counts once
    jax: str  # the version
    platform: str  # what it was compiled for

    @staticmethod
    def of(found: CompiledExplanation) -> SentRecord:
        """Records a compiled program."""
        runs: dict[Key, dict[Sent, int]] = {}
        sizes: Counter[Key] = Counter()
        for row in found.collectives:
            key = as_recorded(row)
            runs.setdefault(key, {}).update((part.sent, part.sent.collective.executions) for part in row.parts)
            sizes[key] += row.bytes
        rows = {key: (sum(times.values()), sizes[key]) for key, times in runs.items()}
        times_of: Counter[tuple[str, str]] = Counter()
        size_of: Counter[tuple[str, str]] = Counter()
        for sent in found.program.sent:
            where = sent.collective.kind, _word(axes_text(found.program, sent))
            times_of[where] += sent.collective.executions
            size_of[where] += sent.collective.total_bytes
        sums = {where: (times_of[where], size_of[where]) for where in times_of}
        mesh = _word(" ".join(f"{name}={size}" for name, size in found.mesh.axes))
        return SentRecord(
            found.name, mesh, found.peak, rows, sums, jax.__version__, found.program.platform or "unknown devices"
        )

    def text(self) -> str:
        """The file."""
        head = [
            f"# Collectives in one call of {self.name}: number, bytes that each device sends, axes, array, module.",
            "# gshard writes this file: review it, and write it again with pytest --gshard-update.",
            f"# jax {self.jax}, {self.platform}",
            "",
        ]
        return "\n".join([*head, *self.body(), ""])

    def body(self) -> list[str]:
        """The lines of the file that are no comments."""
        lines = [f"mesh  {self.mesh}", f"peak  {self.peak:,} bytes"]
        for where, (times, size) in sorted(self.sums.items()):  # whatever the figures: a difference is short
            own = [(key, of) for key, of in self.rows.items() if key[:2] == where]
            lines.append("")
            lines += [_line(*key, *of) for key, of in sorted(own)]
            lines.append(_line(*where, IN_ALL, "", times, size))
        times, size = (sum(of[i] for of in self.sums.values()) for i in (0, 1))
        return [*lines, "", _line("total", "all axes", IN_ALL, "", times, size)]

    @staticmethod
    def read(text: str) -> SentRecord:
        """Reads a file."""
        rows: dict[Key, tuple[int, int]] = {}
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        told: dict[str, str] = {}
        version = _VERSION.search(text)
        name = re.search(r"^# Collectives in one call of (.*?):", text, re.MULTILINE)
        for line in text.splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            kind, *cells = _APART.split(line.strip())
            if len(cells) == 1:
                told[kind] = cells[0]
                continue
            try:
                times, size, axes, array, *module = cells
                counted = int(times.removeprefix("x")), int(size.replace(",", ""))
            except ValueError:
                raise ValueError(f"cannot read {line.strip()!r}") from None
            axes = axes.removeprefix("over ")
            if array != IN_ALL:
                rows[kind, axes, array, " ".join(module)] = counted
            elif kind != "total":
                sums[kind, axes] = counted
        if not {"mesh", "peak"} <= told.keys() or not told["peak"].endswith(" bytes"):
            raise ValueError("it has no line 'mesh' or no line 'peak'")
        peak = int(told["peak"].removesuffix(" bytes").replace(",", ""))
        known = version.groups() if version else ("unknown", "unknown devices")
        return SentRecord(name[1] if name else "", told["mesh"], peak, rows, sums, *known)

    def differs(self, now: SentRecord, exact: bool, tolerance: float) -> list[str]:
        """How another record exceeds this one, or differs from it, in words; nothing if it does not."""
        return list(self._differences(now, exact, tolerance))

    def _differences(self, now: SentRecord, exact: bool, tolerance: float) -> Iterator[str]:
        if self.mesh != now.mesh:
            yield f"mesh: {now.mesh}, was {self.mesh}"
        for where in sorted({*self.sums, *now.sums}):
            before, after = self.sums.get(where, (0, 0)), now.sums.get(where, (0, 0))
            if _is_more(after, before) or (exact and after != before):
                yield (
                    f"{where[0]} over {where[1]}: {after[0]} in one call, {format_bytes(after[1])}; "
                    f"was {before[0]}, {format_bytes(before[1])}"
                )
        if now.peak > self.peak * (1 + tolerance) or (exact and now.peak < self.peak * (1 - tolerance)):
            yield f"peak memory: {format_bytes(now.peak)}, was {format_bytes(self.peak)}"
        if exact and self.sums == now.sums and self.rows != now.rows:
            yield "other arrays, or other modules, are sent in the same number of collectives"

    def grown(self, now: SentRecord, exact: bool) -> set[Key]:
        """The rows of another record that are not here, run more often or send more."""
        more = {where for where, of in now.sums.items() if exact or _is_more(of, self.sums.get(where, (0, 0)))}
        return {key for key, of in now.rows.items() if key[:2] in more and _is_more(of, self.rows.get(key, (0, 0)))}


def as_recorded(row: CompiledRow) -> Key:
    """A collective without its lines, its shape and its reason."""
    return row.kind, _word(row.axes), _word(row.array) or _UNNAMED, _word(row.module)


def _is_more(now: tuple[int, int], before: tuple[int, int]) -> bool:
    """Whether more run, or they send more."""
    return now[0] > before[0] or now[1] > before[1]


def _word(text: str) -> str:
    return " ".join(text.split())


def _line(kind: str, axes: str, array: str, module: str, times: int, size: int) -> str:
    return f"{kind:<18}  {f'x{times}':<6}  {size:>15,}  over {axes:<10}  {array:<24}  {module}".rstrip()
