"""Collectives baseline: a test states that a function sends no more than a recorded version did."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.keywords import keywords
from gshard.core.mesh import MeshLike
from gshard.core.program import format_bytes
from gshard.explanation.compiled_explanation import CompiledExplanation
from gshard.explanation.compiled_rows import CompiledRow, axes_text
from gshard.testing.asserted_collectives import (
    PEAK_CURE,
    check_devices,
    compiled,
    compiled_subject,
    cures_of,
    row_lines,
)
from gshard.xla.hlo_collectives import Sent

# Sent record: what a compiled program sends and holds, as the text of a baseline file and read from it.

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


@keywords("", "gshard.testing")
def assert_no_more_collectives(
    f: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    baseline: str | Path,
    exact: bool = False,
    tolerance: float = 0.02,
    update: bool = False,
    mesh: MeshLike = None,
) -> CompiledExplanation:
    """Checks that a function sends and holds no more than a baseline file says.

    It fails if, of a kind of collective over an axis of the mesh, more run or send more bytes than in the file, if the
    peak memory of a device is larger, or if the mesh is another one. The file is text to review in a pull request: one
    line for each collective with its kind, number, bytes, axes, array and module.

    Args:
        f, args, kwargs, mesh: as for ``assert_collectives``.
        baseline: the file. It must be there, unless ``update``.
        exact: fail on any difference, also if less is sent, or another array.
        tolerance: by which part the peak memory may differ. Numbers and bytes of collectives have no tolerance.
        update: write the file, where it differs, instead of comparing. The fixture ``collectives`` sets it with
            ``pytest --gshard-update``.

    Returns:
        the explanation of the compiled program.

    Raises:
        AssertionError: there is no such file, or the program is not as the file says. The message has the difference,
            the additional collectives with their lines and reasons, and what to do.
        ArgumentError: the file is no baseline; or as for ``assert_collectives``.

    >>> import jax.numpy as jnp, os, tempfile
    >>> from gshard.api.jit import jit
    >>> from gshard.api.marks import split
    >>> def total_of(x):
    ...     return split(x, 0, "data").sum()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file, f, x = os.path.join(folder, "total.txt"), jit(total_of, mesh={"data": 4}), jnp.zeros((8, 2))
    ...     found = assert_no_more_collectives(f, (x,), baseline=file, update=True)
    ...     assert assert_no_more_collectives(f, (x,), baseline=file, exact=True).total_bytes == found.total_bytes
    """
    __tracebackhide__ = True
    found = compiled_subject(f, args, kwargs, mesh)
    check_devices(found)
    path, now = Path(baseline), SentRecord.of(found)
    before = _read(path)
    if update:
        if before is None or before.differs(now, exact=True, tolerance=tolerance):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(now.text(), "utf-8")
        return found
    if before is None:
        raise AssertionError(
            f"there is no baseline of {found.name}.\n  {path}\n"
            "  Write it with pytest --gshard-update, or with update=True. Then review it and commit it."
        )
    if differences := before.differs(now, exact, tolerance):
        raise AssertionError(_message(found, path, before, now, differences, exact))
    return found


def _read(path: Path) -> SentRecord | None:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return None
    try:
        return SentRecord.read(text)
    except ValueError as error:
        raise ArgumentError(
            "this file is no baseline of collectives.",
            user_line(),
            got=f"{path}: {error}",
            hint="Delete it, and write it with pytest --gshard-update or update=True.",
        ) from error


def _message(
    found: CompiledExplanation,
    path: Path,
    before: SentRecord,
    now: SentRecord,
    differences: Sequence[str],
    exact: bool,
) -> str:
    more = before.differs(now, exact=False, tolerance=0.0)
    lines = [f"{compiled(found)} {'does more than' if more else 'is not as'} its baseline says", ""]
    lines += [f"  {text}" for text in differences]
    lines += ["", *difflib.unified_diff(before.body(), now.body(), str(path), "compiled now", lineterm="", n=2)]
    grown = before.grown(now, exact)
    rows = [row for row in found.collectives if as_recorded(row) in grown]
    if rows:
        lines += ["", "collectives that are new or send more, largest first", *row_lines(rows)]
    lines.append("")
    lines += cures_of(rows)
    if any(text.startswith("peak") for text in differences) and now.peak > before.peak:
        lines.append(PEAK_CURE)
    if before.jax != jax.__version__:
        lines.append(
            f"The baseline was written with jax {before.jax}, and this is jax {jax.__version__}: XLA may partition, "
            "combine and hold otherwise."
        )
    if before.platform != now.platform:
        lines.append(f"The baseline was compiled for {before.platform}, and this program for {now.platform}.")
    lines.append(
        "If this is meant, write the baseline again with pytest --gshard-update or update=True, and review it."
    )
    return "\n".join(line.rstrip() for line in lines)
