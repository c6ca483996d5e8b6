"""Collective limits: what a program may send and hold, and what of it exceeds that.

A number of collectives is an ``int``, which is exact, or a ``range``, which holds the allowed numbers as Python's does:
``range(3)`` allows 0, 1 and 2. A limit of bytes is a number or a text such as ``"50MiB"``, and is itself allowed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from gshard.core.errors import ArgumentError, MeshError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.program import format_bytes
from gshard.remat.rematerialise import MemoryLimitError, bytes_of
from gshard.xla.hlo_collectives import KINDS, Sent, pairs_of
from gshard.xla_programs.compiled_explanation import CompiledExplanation
from gshard.xla_programs.compiled_program import CompiledArgument, CompiledProgram
from gshard.xla_programs.compiled_rows import CompiledRow

TOTAL = "total"
Times = int | range
Size = int | str

_RESHARDED = (
    "an array is split in one way where it is made and in another where it is read. Split it in one way, with "
    "jax.lax.with_sharding_constraint or gshard.split."
)
CURES = {
    "all_gather": "an operator reads an array whole that is split, or split otherwise. Split its operands and its "
    "result alike, with jax.lax.with_sharding_constraint or gshard.split at the line of the row.",
    "all_reduce": "each device computes a part of a sum, because a dimension that is summed over is split. Split "
    "another dimension, or split the result over the same axis, so that a reduce_scatter suffices.",
    "reduce_scatter": "each device computes a part of a sum, because a dimension that is summed over is split. Split "
    "another dimension.",
    "all_to_all": _RESHARDED,
    "collective_permute": _RESHARDED,
}
PEAK_CURE = (
    "peak memory: split what is large over one more axis, donate arguments that results replace (donate_argnums), or "
    "recompute values with jax.checkpoint."
)
WHOLE_CURE = "whole arguments: give them a sharding that splits a dimension, or mark them with gshard.split."


@dataclasses.dataclass(frozen=True)
class Exceeded:
    """One limit that a program does not keep."""

    what: str  # what is limited
    allowed: str  # allowed, found: as text
    found: str
    argument: str  # the argument of ``assert_collectives`` that allows what was found
    rows: tuple[CompiledRow, ...] = ()  # the collectives that it limits
    cures: tuple[str, ...] = ()  # what to do, a sentence each
    arguments: tuple[CompiledArgument, ...] = ()  # the arguments of the program that are larger than allowed
    is_peak: bool = False  # whether memory is limited


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may send and hold."""

    times: Mapping[str, Times]  # allowed numbers of collectives, by kind or for all (``TOTAL``);
    most_times: Mapping[str, int]  # and the largest allowed ones
    most_bytes: Mapping[str, int]  # that a device may send in one call, by kind or in all
    peak: int | None  # bytes that a device may hold; None for any
    whole: int | None  # bytes of the largest argument that each device may hold whole; None for any
    over: tuple[str, ...]  # only collectives that cross one of these axes count; none for all

    @property
    def is_empty(self) -> bool:
        """Whether nothing is limited."""
        return not (self.times or self.most_times or self.most_bytes) and self.peak is None and self.whole is None

    @property
    def is_of_one_device(self) -> bool:
        """Whether only memory is limited, which a program on one device has too."""
        return not (self.times or self.most_times or self.most_bytes) and self.whole is None

    def exceeded(self, found: CompiledExplanation) -> list[Exceeded]:
        """The limits that a program does not keep, in the order of the arguments."""
        program = found.program
        if unknown := [axis for axis in self.over if axis not in dict(found.mesh.axes)]:
            raise MeshError(
                f"the mesh has no axis {unknown[0]!r}.",
                user_line(),
                got=f"mesh: {found.mesh}",
                hint=known_names(unknown[0], dict(found.mesh.axes)),
            )
        counted = [sent for sent in program.sent if not self.over or crosses(program, sent, self.over)]
        kept = {id(sent) for sent in counted}
        rows = [row for row in found.collectives if id(row.parts[0].sent) in kept]
        times: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for sent in counted:
            for key in (sent.collective.kind, TOTAL):
                times[key] += sent.collective.executions
                size[key] += sent.collective.total_bytes
        wrong = []
        for kind, allowed in self.times.items():
            n, numbers = times[kind], allowed if isinstance(allowed, range) else (allowed,)
            if n not in numbers:
                text, is_less = _allowed(allowed), n < min(numbers)
                wrong.append(_exceeded(_plural(kind), text, str(n), f"{kind}={n}", rows, kind, is_less))
        for kind, most in self.most_times.items():
            if (n := times[kind]) > most:
                argument = f'at_most={{"{kind}": {n}}}'
                wrong.append(_exceeded(_plural(kind), f"at most {most}", str(n), argument, rows, kind))
        for kind, most in self.most_bytes.items():
            if (n := size[kind]) > most:
                what, argument = f"bytes of {kind}", f'max_bytes={{"{kind}": {n}}}'
                if kind == TOTAL:
                    what, argument = "bytes sent", f"max_bytes={n}"
                wrong.append(_exceeded(what, _most(most), _exactly(n), argument, rows, kind))
        return [*wrong, *self._held(found)]

    def _held(self, found: CompiledExplanation) -> list[Exceeded]:
        """The limits of memory that a program does not keep."""
        wrong = []
        if self.peak is not None and found.peak > self.peak:
            allowed, argument = _most(self.peak), f"max_peak={found.peak}"
            got = _exactly(found.peak)
            wrong.append(Exceeded("peak memory", allowed, got, argument, cures=(PEAK_CURE,), is_peak=True))
        if self.whole is None or found.mesh.size == 1:
            return wrong
        if found.arguments and all(a.bytes is None for a in found.arguments):
            raise ArgumentError(
                "max_whole= limits arguments that each device holds whole, and this program does not tell them.",
                user_line(),
                hint="Give the function or what jax.jit compiled; a text that has no shardings does not tell.",
            )
        large = tuple(a for a in found.arguments if a.is_whole and a.local_bytes > self.whole)
        if large:
            allowed, argument = _most(self.whole), f"max_whole={large[0].local_bytes}"
            got, what = _exactly(large[0].local_bytes), "whole argument"
            wrong.append(Exceeded(what, allowed, got, argument, cures=(WHOLE_CURE,), arguments=large))
        return wrong


def limits_of(
    times: Mapping[str, Times | None],
    at_most: Mapping[str, int] | None,
    max_bytes: Size | Mapping[str, Size] | None,
    max_peak: Size | None,
    max_whole: Size | None,
    over: str | Sequence[str] | None,
) -> Limits:
    """The arguments of ``assert_collectives`` as limits."""
    sizes = max_bytes if isinstance(max_bytes, Mapping) else {} if max_bytes is None else {TOTAL: max_bytes}
    for name, given in (("at_most", at_most or {}), ("max_bytes", sizes)):
        for kind in given:
            if kind not in (*KINDS, TOTAL):
                raise ArgumentError(
                    f"there is no kind of collective {kind!r}.",
                    user_line(),
                    got=f"{name}={dict(given)!r}",
                    hint=known_names(str(kind), (*KINDS, TOTAL), "There are"),
                )
    return Limits(
        {kind: _checked(kind, given) for kind, given in times.items() if given is not None},
        {kind: _whole_number(f"at_most[{kind!r}]", given) for kind, given in (at_most or {}).items()},
        {kind: _size("max_bytes", given) for kind, given in sizes.items()},
        None if max_peak is None else _size("max_peak", max_peak),
        None if max_whole is None else _size("max_whole", max_whole),
        (over,) if isinstance(over, str) else tuple(over or ()),
    )


def crosses(program: CompiledProgram, sent: Sent, axes: Iterable[str]) -> bool:
    """Whether devices that communicate are apart along one of these axes of the mesh."""
    mesh = program.mesh
    if sent.collective.kind == "collective_permute":
        pairs = pairs_of(sent.itself)
    else:
        pairs = [(group[0], device) for group in sent.collective.groups for device in group[1:]]
    stride, strides = mesh.size, {}
    for name, size in mesh.axes:
        stride //= size
        strides[name] = (stride, size)
    return any(a // strides[x][0] % strides[x][1] != b // strides[x][0] % strides[x][1] for x in axes for a, b in pairs)


def cures_of(rows: Iterable[CompiledRow]) -> tuple[str, ...]:
    """What to do against collectives, a sentence for each kind."""
    kinds = dict.fromkeys(row.kind for row in rows)
    return tuple(f"{kind}: {CURES[kind]}" for kind in kinds if kind in CURES)


def _exceeded(
    what: str, allowed: str, found: str, argument: str, rows: Sequence[CompiledRow], kind: str, is_less: bool = False
) -> Exceeded:
    own = tuple(row for row in rows if kind in (row.kind, TOTAL))
    cures = (f"{what}: fewer run than the test states.",) if is_less else cures_of(own)
    return Exceeded(what, allowed, found, argument, own, cures)


def _plural(kind: str) -> str:
    return "collectives" if kind == TOTAL else kind


def _allowed(times: Times) -> str:
    if isinstance(times, int):
        return str(times)
    numbers = f"{times[0]} to {times[-1]}" if len(times) > 1 else str(times[0])
    return numbers if abs(times.step) == 1 else f"{numbers}, in steps of {abs(times.step)}"


def _most(size: int) -> str:
    return f"at most {_exactly(size)}"


def _exactly(size: int) -> str:
    short = format_bytes(size)
    return short if size < 1024 else f"{short} ({size:,} bytes)"


def _checked(kind: str, given: Times) -> Times:
    if isinstance(given, range):
        if len(given) and min(given) >= 0:
            return given
        raise ArgumentError(
            f"{kind}={given!r} allows no number.", user_line(), hint="range(3) allows 0, 1 and 2; range(2, 5) 2 to 4."
        )
    return _whole_number(kind, given)


def _whole_number(name: str, given: int) -> int:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    raise ArgumentError(
        f"{name}={given!r} is no number of collectives.",
        user_line(),
        hint="Give the exact number, as all_gather=2; the allowed ones, as all_gather=range(3); or the largest, as "
        'at_most={"all_gather": 2}.',
    )


def _size(name: str, given: Size) -> int:
    if given == 0 and not isinstance(given, bool | str):
        return 0
    try:
        return bytes_of(given)
    except MemoryLimitError as error:
        raise ArgumentError(
            f"{name}={given!r} is no number of bytes.", user_line(), hint='Write bytes, or "50MiB", "12GiB".'
        ) from error
