"""Rows of an explanation and their text: one for each array, and for what collectives move for one reason."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from gshard.core.mesh import Mesh
from gshard.core.number_text import format_seconds
from gshard.core.program import format_bytes
from gshard.device.cost import PricedKernel
from gshard.device.memory import MemoryTotals
from gshard.explanation.places import Place
from gshard.naming.argument_names import ArrayName, without_numbers

_Key = TypeVar("_Key", bound=Hashable)
HIDDEN = 0.005  # of the seconds of collectives: what passes beside kernels is not told if it is less


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRow:
    """One array of the program."""

    name: str  # ``params['up']`` of an argument, or ``%12`` with the primitive and line that made it
    short: ArrayName  # the path of an argument: ``params/blocks/3/up``; empty for other arrays
    sharding: str  # type and sharding, as text
    bytes: int | None  # of the whole array; None if the program does not tell
    local_bytes: int  # of one device's part
    is_argument: bool = True  # whether the caller hands it in
    note: str = ""  # what to know of it where no mark splits it

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of it."""
        return self.bytes == self.local_bytes

    @property
    def why(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension that is split, the reasons from here back to a mark; none if the program does not tell."""
        return ()

    @property
    def reason(self) -> str:
        """The reason for its sharding in one line, if the program gives one."""
        return self.note


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One array that one collective moves."""

    kind: str  # all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute; of XLA also a rarer one
    axes: str  # names of mesh axes, or of their parts; of XLA also the devices of one group
    times: int  # how often the collective runs in one call
    bytes: int  # what each device sends of the array in all these runs
    shape: str  # the local operand
    line: str  # the user's source line outside of helpers; empty if the program does not tell
    cause: Place | None  # the same line, with its path
    # what is moved: a weight by its path, ``gradient of`` one, or the operation that makes it
    array: ArrayName
    module: ArrayName  # of what caused it, ``decoder/layers_0/mlp``; empty if nothing names it
    why: ArrayName  # what needed it
    exact: bool = True  # whether ``times`` is certain; False in a branch, and in a loop whose length depends on data
    source: Any = dataclasses.field(repr=False)  # the collective; XLA lets one move several arrays
    key: int  # the number under which ``Spent`` has the time of the collective


Spent = Mapping[int, tuple[float, float]]
"""Of collectives the seconds that the network takes in one call, and of these what the call waits for."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimedKernel:
    """One kernel of a call."""

    cost: PricedKernel  # what it takes
    name: str  # what it computes, and its result
    kind: str  # its row in the table of times: collectives by their own kinds
    place: Place | None  # the line that causes it
    key: int | None = None  # of a collective (``Moved.key``); None of other kernels


@dataclasses.dataclass(frozen=True, slots=True)
class HeldRows:
    """What a device holds in a call."""

    totals: MemoryTotals
    by: str  # what tells the totals
    moments: Sequence[Any]  # the kernels in order, each with the ``bytes`` of temporaries while it runs;
    named: Callable[[Any], tuple[str, Place | None]]  # and what each of them computes, with its line
    # the temporaries at the peak: type, bytes, name, line, count; the largest first
    alive: Sequence[tuple[str, int, str, Place | None, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """A list of lines about a program."""

    key: str  # its name in the data
    title: str
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Collectives of one kind over the same axes for the same line, and those of equal layers."""

    kind: str  # kind, axes, shape, line: as of ``Moved``
    axes: str
    times: int  # how many run in one call of the program
    bytes: int  # what each device sends in all of them
    shape: str
    line: str
    why: str  # why, array, module: as of ``Moved``, with ``*`` where equal layers differ
    array: str
    module: str
    arrays: int  # how many arrays in modules the row stands for: those of equal layers
    exact: bool  # whether ``times`` is certain
    seconds: float  # of the network, for all of them; 0 where they are not modelled
    exposed: float  # of these, what a call waits for
    sharing: int  # how many rows have arrays in one of its collectives, if XLA combined some; 1 if no other row has
    moved: tuple[Moved, ...] = dataclasses.field(repr=False)  # what is moved, one by one

    @property
    def what(self) -> str:
        """The kind, the array and the module: ``all_gather of params/w in mlp``."""
        return f"{self.kind} of {self.array}{f' in {self.module}' if self.module else ''}"


def collective_rows(moved: Sequence[Moved], spent: Spent) -> tuple[CollectiveRow, ...]:
    """The collectives, most bytes first; what differs in nothing but the layer is one row."""
    together: dict[Hashable, list[int]] = {}
    for i, one in enumerate(moved):
        key = one.kind, one.axes, one.line, one.shape, one.array.alike, one.module.alike, one.why.alike
        together.setdefault(key, []).append(i)
    rows_with = Counter(which for same in together.values() for which in {id(moved[i].source) for i in same})
    seconds = seconds_of(moved, spent)
    rows = []
    for numbers in together.values():
        same = [moved[i] for i in numbers]
        first, times = same[0], {id(one.source): one.times for one in same}
        words = zip(*(one.module.text.split("/") for one in same), strict=True)
        taken, waited = (sum(seconds[i][k] for i in numbers) for k in (0, 1))
        row = CollectiveRow(
            kind=first.kind, axes=first.axes, times=sum(times.values()), bytes=sum(one.bytes for one in same),
            shape=first.shape, line=first.line, why=_common([one.why for one in same]),
            array=_common([one.array for one in same]), module="/".join(map(without_numbers, words)),
            arrays=len({(one.array.text, one.module.text) for one in same}), exact=all(one.exact for one in same),
            seconds=taken, exposed=waited, sharing=max(rows_with[which] for which in times), moved=tuple(same),
        )  # fmt: skip
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def sent_by(moved: Iterable[tuple[_Key, Moved]]) -> dict[_Key, tuple[int, int]]:
    """For each key how many collectives run in one call, each of them counted once, and the bytes that a device sends.

    Args:
        moved: arrays that collectives move, each with its key.
    """
    times: dict[_Key, dict[int, int]] = {}
    sizes = Counter[_Key]()
    for key, one in moved:
        times.setdefault(key, {})[id(one.source)] = one.times
        sizes[key] += one.bytes
    return {key: (sum(runs.values()), sizes[key]) for key, runs in times.items()}


def spent_by(kernels: Iterable[TimedKernel]) -> Spent:
    """What the collectives among the kernels of a call take."""
    found: dict[int, tuple[float, float]] = {}
    for k in kernels:
        if k.key is not None:
            taken, waited = found.get(k.key, (0.0, 0.0))
            found[k.key] = taken + k.cost.duration * k.cost.times, waited + k.cost.total_seconds
    return found


def seconds_of(moved: Sequence[Moved], spent: Spent) -> list[tuple[float, float]]:
    """What moving each array takes, as in ``Spent``: arrays share the time of a collective as they share its bytes."""
    sent, arrays = Counter[int](), Counter(one.key for one in moved)
    for one in moved:
        sent[one.key] += one.bytes
    found = []
    for one in moved:
        share = one.bytes / sent[one.key] if sent[one.key] else 1 / arrays[one.key]
        taken, waited = spent.get(one.key, (0.0, 0.0))
        found.append((share * taken, share * waited))
    return found


def _common(names: Sequence[ArrayName]) -> str:
    return names[0].text if len({name.text for name in names}) == 1 else names[0].alike


# Row text: prints the rows of an explanation, with one line for equal layers.


def array_lines(title: str, rows: Sequence[ArrayRow], most: int) -> list[str]:
    """At most so many lines, with a title; what equal layers have alike in the same sharding, for one reason, in one.

    Of values inside the line has the number of the first, with which ``why`` finds it.
    """
    together: dict[tuple[str, str, str], list[ArrayRow]] = {}
    for row in rows if most else ():
        key = row.short.alike or re.sub(r"^%\d+ ", "", row.name), row.sharding, row.reason
        together.setdefault(key, []).append(row)
    shown = [(same[0], len(same)) for same in together.values()][:most]
    if not shown:
        return []
    names = [f"{row.short.alike or row.name}  x{n}" if n > 1 else row.short.text or row.name for row, n in shown]
    wide, across = (max(map(len, texts)) for texts in (names, [row.sharding for row, _ in shown]))
    lines = [
        f"  {name:<{wide}}  {row.sharding:<{across}}  {format_bytes(row.local_bytes):>10}  {row.reason}".rstrip()
        for name, (row, _) in zip(names, shown, strict=True)
    ]
    title = f"{title} (the largest {sum(n for _, n in shown)} of {len(rows)}; bytes of one device's part)"
    return ["", title, *lines]


def collective_lines(rows: Sequence[CollectiveRow], most: int) -> list[str]:
    """At most so many lines: bytes, axes, array, module, source line, reason, and where it is modelled the time."""
    shown, is_timed = rows[:most], any(row.seconds for row in rows)
    names = [f"{row.array}  x{row.arrays}" if row.arrays > 1 else row.array for row in shown]
    wide, modules = (max(map(len, texts), default=0) for texts in (names, [row.module for row in shown]))
    lines = []
    for row, name in zip(shown, names, strict=True):
        times = f"x{'' if row.exact else '~'}{row.times}{f'/{row.sharing}' if row.sharing > 1 else ''}"
        sent = f"{row.kind:<18} {times:<5} {format_bytes(row.bytes):>10}"
        taken = f"{format_seconds(row.seconds):>8}{_exposed(row):<13}  " if is_timed else ""
        module = f"{row.module:<{modules}}  " if modules else ""
        what = f"{name:<{wide}}  {module}{row.line or '(no line)'}  ({row.why})"
        lines.append(f"  {sent}  over {row.axes:<12} {row.shape:<24} {taken}{what}")
    if rest := rows[most:]:
        lines.append(f"  ... and {len(rest)} more rows with {format_bytes(sum(row.bytes for row in rest))}")
    return lines


def _exposed(row: CollectiveRow) -> str:
    if not row.seconds:
        return ""
    hidden = 1 - row.exposed / row.seconds
    return f" {100 * hidden:.0f} % hidden" if hidden > HIDDEN else " exposed"


def lines_of_parts(rows: Sequence[CollectiveRow], mesh: Mesh) -> list[str]:
    """What the parts of axes are that collectives are over, such as ``data.0``; one line for each axis."""
    over = {name for row in rows for name in row.axes.split(",")}
    return [
        f"  {', '.join(atoms)}: parts of axis {name}, {' x '.join(str(mesh.atom_sizes[a]) for a in atoms)} devices"
        for name, atoms in mesh.atoms_of.items()
        if len(atoms) > 1 and not over.isdisjoint(atoms)
    ]


def listed_lines(lists: Iterable[Listed]) -> list[str]:
    """The lists that are not empty, with their titles."""
    return [line for one in lists if one.lines for line in ("", one.title, *(f"  {text}" for text in one.lines))]


def held_lines(held: HeldRows, most: int) -> list[str]:
    """The peak of a device, and the temporaries that make it, largest first."""
    sizes = f"{format_bytes(held.totals.peak)} at the peak, temporaries {format_bytes(held.totals.temporaries)}"
    lines = ["", f"memory of a device, {held.by}: {sizes}"]
    for kind, size, name, place, count in held.alive[:most]:
        at = "" if place is None else f"  {place.text}"
        lines.append(f"  {format_bytes(size):>10}  {kind}{f' x{count}' if count > 1 else ''}  {name}{at}")
    return lines
