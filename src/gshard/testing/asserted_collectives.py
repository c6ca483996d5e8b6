"""Asserted collectives: a test states how many collectives a function runs, and what it may send and hold."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from gshard.api.compiled_programs import (
    explain_compiled,
    explain_compiled_by_gshard,
    is_compiled,
    is_from_jax_jit,
    lowered_by_jax,
    names_of_arrays,
    on_first_devices,
)
from gshard.api.jit import Jitted
from gshard.api.lowered import Compiled, Lowered
from gshard.api.specs import told
from gshard.core.errors import ArgumentError, MeshError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.keywords import keywords
from gshard.core.mesh import MeshLike
from gshard.core.program import format_bytes
from gshard.remat.rematerialise import MemoryLimitError, bytes_of
from gshard.xla.hlo_collectives import KINDS, Sent, pairs_of
from gshard.xla_programs.compiled_explanation import CompiledExplanation
from gshard.xla_programs.compiled_program import CompiledArgument, CompiledProgram
from gshard.xla_programs.compiled_rows import CompiledRow, collective_lines_of, memory_lines, whole_lines

# Collective limits: what a program may send and hold, and what of it exceeds that.

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


# Compiled subject: whatever a test gives, compiled and read.


def compiled_subject(
    f: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, mesh: MeshLike = None
) -> CompiledExplanation:
    """Compiles a function and reads the program; reads a program that is compiled."""
    if isinstance(args, Mapping | str) or not isinstance(args, Sequence):
        raise ArgumentError(
            "the arguments of the function stand in a tuple.",
            user_line(),
            got=f"args: {told(args)}",
            hint="Write assert_collectives(jax.jit(step), (state, batch), all_gather=0).",
        )
    kwargs = kwargs or {}
    is_function = isinstance(f, Jitted) or (is_from_jax_jit(f) and not isinstance(f, Lowered | Compiled))
    if not is_function and (args or kwargs):
        if callable(f) and not is_compiled(f) and not isinstance(f, Compiled):
            raise _not_jitted(f)
        raise ArgumentError(
            "a compiled program takes no arguments here.",
            user_line(),
            got=f"{told(f)} and {len(args) + len(kwargs)} arguments",
            hint="Give the function itself with its arguments, or the compiled program alone.",
        )
    if is_function and mesh is not None:
        raise ArgumentError(
            "mesh= is for a text and for an exported function.",
            user_line(),
            got=f"mesh={mesh!r} for {told(f)}",
            hint="Place the arguments of jax.jit; give the mesh to gshard.jit.",
        )
    if isinstance(f, CompiledExplanation):
        return f
    if isinstance(f, Jitted):
        return _of_jitted(f, args, kwargs)
    if isinstance(f, Lowered):
        return explain_compiled_by_gshard(f.compile())
    if isinstance(f, Compiled):
        return explain_compiled_by_gshard(f)
    if is_compiled(f):
        return explain_compiled(f, mesh)
    if is_function:
        return explain_compiled(_lowered(f, args, kwargs), names=names_of_arrays(f, tuple(args), kwargs))
    raise _not_jitted(f)


def _lowered(f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> jax.stages.Lowered:
    try:
        return lowered_by_jax(f, args, kwargs)
    except ValueError as error:
        if "AbstractMesh" not in str(error):
            raise
        raise ArgumentError.like(
            error,
            "the shardings inside this function are on an abstract mesh, for which XLA cannot compile.",
            user_line(),
            hint="Check it inside `with jax.set_mesh(jax.make_mesh((8,), ('data',))):`, with the axes of that mesh.",
        ) from error


def _of_jitted(f: Jitted, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CompiledExplanation:
    mesh = f.options.mesh
    if mesh is not None and mesh.devices is None:
        f = f.on(mesh.on_first_devices())
    args, kwargs = on_first_devices((tuple(args), dict(kwargs)))
    return explain_compiled_by_gshard(f.lower(*args, **kwargs).compile())


def _not_jitted(f: Any) -> ArgumentError:
    return ArgumentError(
        f"there is no compiled program of {told(f)}.",
        user_line(),
        hint="Give jax.jit(f) or gshard.jit(f) and its arguments, or what one of them has compiled.",
    )


ROWS, HELD = 12, 6  # that a message lists at most


@keywords("", "gshard.testing")
def assert_collectives(
    f: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    all_gather: Times | None = None,
    all_reduce: Times | None = None,
    reduce_scatter: Times | None = None,
    all_to_all: Times | None = None,
    collective_permute: Times | None = None,
    total: Times | None = None,
    at_most: Mapping[str, int] | None = None,
    max_bytes: Size | Mapping[str, Size] | None = None,
    max_peak: Size | None = None,
    max_whole: Size | None = None,
    over: str | Sequence[str] | None = None,
    mesh: MeshLike = None,
) -> CompiledExplanation:
    """Checks how many collectives run in one call of a function, and what each device sends and holds.

    XLA compiles the function, and gshard reads the compiled program. So functions from ``jax.jit`` and ``gshard.jit``
    are counted in one way. Nothing runs. CPUs suffice: ``XLA_FLAGS=--xla_force_host_platform_device_count=8``. XLA
    combines and orders collectives differently for GPUs and TPUs, so state the numbers of the devices that compile.

    Collectives in a loop count once for each iteration. A collective that moves several arrays counts once. One in a
    branch counts as if it runs, and one in a loop whose length depends on data counts as one iteration.

    Args:
        f: a function from ``jax.jit`` whose arguments have shardings, which XLA's partitioner splits; a function
            from ``gshard.jit``, which gshard splits before XLA compiles it; a stage of either (``f.lower(...)``,
            ``.compile()``); a ``jax.export.Exported``; the text of a compiled program, or the path of a file with it;
            or what this function returned, which is not compiled again.
        args, kwargs: the arguments of the function: arrays, or ``jax.ShapeDtypeStruct`` with shardings. A sharding on a
            ``jax.sharding.AbstractMesh`` takes the first devices.
        all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute: how many of this kind run: the exact
            number, or a ``range`` of allowed numbers (``range(3)`` allows 0, 1 and 2). None allows any.
        total: the same for the collectives of all kinds.
        at_most: the largest allowed number, by kind or for ``"total"``.
        max_bytes: the most bytes that each device sends in one call: a number or a text (``"50MiB"``), or these by
            kind. The limit itself is allowed.
        max_peak: the most bytes that a device holds, as the compiler reports.
        max_whole: the most bytes of an argument that each device holds whole.
        over: count only collectives between devices that are apart along this axis of the mesh, or one of these axes.
            ``max_peak`` and ``max_whole`` do not depend on it.
        mesh: the devices and the names of their axes, for a text and an exported function.

    Returns:
        the explanation of the compiled program, which further checks can take as ``f``.

    Raises:
        AssertionError: the program exceeds a limit. The message lists what is allowed, what was found, the collectives
            with their arrays, lines and reasons, and what to do.
        ArgumentError: nothing is limited; or the program was compiled for one device, where it sends nothing; or an
            argument is not what it must be. MeshError: there are fewer devices than the mesh has.

    >>> import jax.numpy as jnp
    >>> from gshard.api.jit import jit
    >>> from gshard.api.marks import split
    >>> total_of = jit(lambda x: split(x, 0, "data").sum(), mesh={"data": 4})
    >>> assert_collectives(total_of, (jnp.zeros((8, 2)),), all_reduce=1, total=1, max_bytes="1KiB").times_by_kind
    {'all_reduce': 1}
    """
    __tracebackhide__ = True
    times = {
        "all_gather": all_gather, "all_reduce": all_reduce, "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all, "collective_permute": collective_permute, TOTAL: total,
    }  # fmt: skip
    limits = limits_of(times, at_most, max_bytes, max_peak, max_whole, over)
    if not (limits.times or limits.most_times or limits.most_bytes) and limits.peak is None and limits.whole is None:
        raise ArgumentError(
            "assert_collectives is given no limit, so it could not fail.",
            user_line(),
            hint='Limit something: all_gather=0, total=range(4), max_bytes="50MiB", max_peak="12GiB".',
        )
    found = compiled_subject(f, args, kwargs, mesh)
    check_devices(found, limits)
    if wrong := limits.exceeded(found):
        raise AssertionError(message_of(found, wrong, limits))
    return found


def check_devices(found: CompiledExplanation, limits: Limits | None = None) -> None:
    """Refuses a program on one device, which sends nothing whatever its text."""
    if found.mesh.size == 1 and (limits is None or not limits.is_of_one_device):
        raise ArgumentError(
            f"{found.name} was compiled for one device, where no program sends anything.",
            user_line(),
            hint="Give its arguments shardings: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, "
            'P("data"))), or arrays that jax.device_put has placed. Or give jax.jit in_shardings.',
        )


def message_of(found: CompiledExplanation, wrong: Sequence[Exceeded], limits: Limits) -> str:
    """What is allowed, what was found, what exceeds it, and what to do."""
    over = f", counted over {' and '.join(limits.over)}" if limits.over else ""
    lines = [f"{compiled(found)} exceeds what is allowed{over}", ""]
    table = [("", "allowed", "found"), *((e.what, e.allowed, e.found) for e in wrong)]
    first, second = (max(len(row[i]) for row in table) for i in (0, 1))
    lines += [f"  {what:<{first}}  {allowed:<{second}}  {got}" for what, allowed, got in table]
    # Those that the limits have in common stand once, largest first.
    listed = {id(row) for e in wrong for row in e.rows}
    rows = [row for row in found.collectives if id(row) in listed]
    if rows:
        lines += ["", "collectives of these kinds, largest first", *row_lines(rows)]
    elif any(not (e.arguments or e.is_peak) for e in wrong):
        lines += ["", "there are no such collectives"]
    if any(e.is_peak for e in wrong):
        lines += memory_lines(found.program, HELD)
    lines += whole_lines([a for e in wrong for a in e.arguments])
    lines += ["", *dict.fromkeys(cure for e in wrong for cure in e.cures)]
    lines.append(f"If this is meant, allow it: {', '.join(e.argument for e in wrong)}.")
    return "\n".join(line.rstrip() for line in lines)


def compiled(found: CompiledExplanation) -> str:
    """A program in the first line of a message."""
    by = f" for {found.program.platform}" if found.program.platform else ""
    return f"{found.name}, compiled by XLA{by}, on {found.mesh.size} devices ({found.mesh}),"


def row_lines(rows: Sequence[CompiledRow], most: int = ROWS) -> list[str]:
    """Collectives as an explanation prints them, without modelled times."""
    lines = collective_lines_of([dataclasses.replace(row, seconds=0.0) for row in rows], most)
    moved = [{id(part.sent) for part in row.parts} for row in rows[:most]]
    if sum(map(len, moved)) > len(set().union(*moved)):
        lines.append("  a collective that moves several arrays has several rows, and counts once")
    if any(not row.exact for row in rows[:most]):
        lines.append("  ~ marks a number that depends on data: a branch counts as taken, a loop as one iteration")
    return lines
