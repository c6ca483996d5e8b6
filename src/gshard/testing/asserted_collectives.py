"""Asserted collectives: a test states how many collectives a function runs, and what it may send and hold."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from gshard.api.compiled_programs import on_first_devices
from gshard.api.explained import explain
from gshard.api.jit import Jitted
from gshard.api.marks import told
from gshard.core.errors import ArgumentError, MeshError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mesh import MeshLike
from gshard.core.program import format_bytes
from gshard.explanation.compiled_program import CompiledArgument, CompiledProgram
from gshard.explanation.compiled_rows import atoms_apart, whole_arguments_listed
from gshard.explanation.compiled_source import CompiledSource
from gshard.explanation.explain import Explanation
from gshard.explanation.rows import CollectiveRow, collective_lines, held_lines, listed_lines, sent_by
from gshard.remat.rematerialise import MemoryLimitError, bytes_of
from gshard.xla.hlo_collectives import KINDS, CompiledCollective, pairs_of

# Collective limits: what a program may send and hold, and what of it exceeds that.

TOTAL, PEAK, WHOLE = "total", "peak memory", "whole argument"  # kinds of limits beside the kinds of collectives
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
    PEAK: "split what is large over one more axis, donate arguments that results replace (donate_argnums), or "
    "recompute values with jax.checkpoint.",
    WHOLE: "give it a sharding that splits a dimension, or mark it with gshard.split.",
}


@dataclasses.dataclass(frozen=True)
class Limit:
    """The numbers that a program may have of one thing."""

    what: str  # what is limited
    kind: str  # the kind of the collectives that count, or ``TOTAL``, ``PEAK`` or ``WHOLE``
    allowed: range  # the allowed numbers
    argument: str  # the argument of ``assert_collectives`` that states it, with N for the number
    in_bytes: bool = True  # whether bytes count, or collectives

    @property
    def text(self) -> str:
        """The allowed numbers."""
        first, last, step = self.allowed[0], self.allowed[-1], abs(self.allowed.step)
        if self.in_bytes:
            return f"at most {_bytes(last)}"
        return f"{first} to {last}{f', in steps of {step}' if step > 1 else ''}" if first != last else str(first)

    def cures(self, n: int, rows: Iterable[CollectiveRow]) -> list[str]:
        """What to do if the number is ``n``."""
        if n < min(self.allowed[0], self.allowed[-1]):
            return [f"{self.what}: fewer run than the test states."]
        return cures_of([row.kind for row in rows if self.kind in (row.kind, TOTAL)] or [self.kind])


def limits_of(
    times: Mapping[str, Times | None], max_bytes: Size | Mapping[str, Size] | None, **memory: Size | None
) -> list[Limit]:
    """The arguments of ``assert_collectives`` as limits."""
    sizes = max_bytes if isinstance(max_bytes, Mapping) else {} if max_bytes is None else {TOTAL: max_bytes}
    if unknown := [kind for kind in sizes if kind not in (*KINDS, TOTAL)]:
        raise ArgumentError(
            f"there is no kind of collective {unknown[0]!r}.",
            user_line(),
            got=f"max_bytes={dict(sizes)!r}",
            hint=known_names(str(unknown[0]), (*KINDS, TOTAL), "There are"),
        )
    limits = [
        Limit("collectives" if kind == TOTAL else kind, kind, _numbers(kind, given), f"{kind}=N", in_bytes=False)
        for kind, given in times.items()
        if given is not None
    ]
    for kind, given in sizes.items():
        what, argument = f"bytes of {kind}", f'max_bytes={{"{kind}": N}}'
        if kind == TOTAL:
            what, argument = "bytes sent", "max_bytes=N"
        limits.append(Limit(what, kind, _up_to("max_bytes", given), argument))
    for (name, most), kind in zip(memory.items(), (PEAK, WHOLE), strict=True):
        if most is not None:
            limits.append(Limit(kind, kind, _up_to(name, most), f"{name}=N"))
    return limits


def _numbers(kind: str, given: Times) -> range:
    """The allowed numbers of collectives."""
    if isinstance(given, range) and len(given) and min(given) >= 0:
        return given
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return range(given, given + 1)
    raise ArgumentError(
        f"{kind}={given!r} is no number of collectives.",
        user_line(),
        hint="Give the exact number, as all_gather=2, or the allowed ones: range(3) allows 0, 1 and 2; range(2, 5) "
        "allows 2 to 4.",
    )


def _up_to(name: str, given: Size) -> range:
    """The numbers up to so many bytes."""
    try:
        return range((0 if given == 0 and not isinstance(given, bool | str) else bytes_of(given)) + 1)
    except MemoryLimitError as error:
        raise ArgumentError(
            f"{name}={given!r} is no number of bytes.", user_line(), hint='Write bytes, or "50MiB", "12GiB".'
        ) from error


def _bytes(size: int) -> str:
    short = format_bytes(size)
    return short if size < 1024 else f"{short} ({size:,} bytes)"


@dataclasses.dataclass(frozen=True)
class Counted:
    """What a program sends and holds, of the collectives that cross some axes."""

    rows: list[CollectiveRow]  # the collectives
    whole: list[CompiledArgument]  # the arguments that each device holds whole
    numbers: Mapping[tuple[str, bool], int]  # by kind, the number; and with True the bytes

    @staticmethod
    def of(found: Explanation, over: Sequence[str]) -> Counted:
        """Counts what a compiled program has; of all collectives if no axis is named."""
        program = source_of(found).program
        if unknown := [axis for axis in over if axis not in dict(found.mesh.axes)]:
            raise MeshError(
                f"the mesh has no axis {unknown[0]!r}.",
                user_line(),
                got=f"mesh: {found.mesh}",
                hint=known_names(unknown[0], dict(found.mesh.axes)),
            )
        kept = {id(sent) for sent in program.sent if not over or crosses(program, sent, over)}
        rows = [row for row in found.collectives if id(row.moved[0].source) in kept]
        sent = sent_by((kind, one) for row in rows for kind in (row.kind, TOTAL) for one in row.moved)
        numbers = Counter({(kind, bool(i)): pair[i] for kind, pair in sent.items() for i in (0, 1)})
        whole = [a for a in source_of(found).arrays if a.is_whole and found.mesh.size > 1]
        numbers[PEAK, True], numbers[WHOLE, True] = found.peak, max((a.local_bytes for a in whole), default=0)
        return Counted(rows, whole, numbers)


def crosses(program: CompiledProgram, sent: CompiledCollective, axes: Iterable[str]) -> bool:
    """Whether devices that communicate are apart along one of these axes of the mesh."""
    groups = [(group[0], device) for group in sent.groups for device in group[1:]]
    apart = atoms_apart(program.mesh, groups or pairs_of(sent.itself))
    return any(not {*program.mesh.atoms_of[axis]}.isdisjoint(apart) for axis in axes)


def cures_of(kinds: Iterable[str]) -> list[str]:
    """What to do, a sentence for each kind."""
    return [f"{kind}: {CURES[kind]}" for kind in dict.fromkeys(kinds) if kind in CURES]


# Compiled subject: whatever a test gives, compiled and read.


def compiled_subject(
    f: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, mesh: MeshLike = None
) -> Explanation:
    """Compiles a function and reads the program; reads a program that is compiled."""
    if isinstance(args, Mapping | str) or not isinstance(args, Sequence):
        raise ArgumentError(
            "the arguments of the function stand in a tuple.",
            user_line(),
            got=f"args: {told(args)}",
            hint="Write assert_collectives(jax.jit(step), (state, batch), all_gather=0).",
        )
    kwargs = kwargs or {}
    if isinstance(f, Explanation) and f.is_compiled and not (args or kwargs):
        return f
    if isinstance(f, Jitted):
        if f.options.mesh is not None and f.options.mesh.devices is None:
            f = f.on(f.options.mesh.on_first_devices())
        args, kwargs = on_first_devices((tuple(args), dict(kwargs)))
        return explain(f.lower(*args, **kwargs), mesh=mesh, partitioner="xla")
    return explain(f, *args, mesh=mesh, partitioner="xla", **kwargs)


ROWS, HELD = 12, 6  # that a message lists at most


@without_our_frames
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
    max_bytes: Size | Mapping[str, Size] | None = None,
    max_peak: Size | None = None,
    max_whole: Size | None = None,
    over: str | Sequence[str] | None = None,
    mesh: MeshLike = None,
) -> Explanation:
    """Checks how many collectives run in one call of a function, and what each device sends and holds.

    XLA compiles the function, and gshard reads the compiled program. So functions from ``jax.jit`` and ``gshard.jit``
    are counted in one way. Nothing runs. CPUs suffice: ``XLA_FLAGS=--xla_force_host_platform_device_count=8``. XLA
    combines and orders collectives differently for GPUs and TPUs, so state the numbers of the devices that compile.

    Collectives in a loop count once for each iteration. A collective that moves several arrays counts once. One in a
    branch counts as if it runs, and one in a loop whose length depends on data counts as one iteration.

    Args:
        f: a function from ``jax.jit`` whose arguments have shardings, which XLA's partitioner splits; a function
            from ``gshard.jit``, which gshard splits before XLA compiles it; a stage of either (``f.lower(...)``,
            ``.compile()``); the text of a compiled program, or the path of a file with it;
            or what this function returned, which is not compiled again.
        args, kwargs: the arguments of the function: arrays, or ``jax.ShapeDtypeStruct`` with shardings. A sharding on a
            ``jax.sharding.AbstractMesh`` takes the first devices.
        all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute: how many of this kind run: the exact
            number, or a ``range`` of allowed numbers (``range(3)`` allows 0, 1 and 2). None allows any.
        total: the same for the collectives of all kinds.
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
    limits = limits_of(times, max_bytes, max_peak=max_peak, max_whole=max_whole)
    if not limits:
        raise ArgumentError(
            "assert_collectives is given no limit, so it could not fail.",
            user_line(),
            hint='Limit something: all_gather=0, total=range(4), max_bytes="50MiB", max_peak="12GiB".',
        )
    found = compiled_subject(f, args, kwargs, mesh)
    if any(limit.kind != PEAK for limit in limits):
        check_devices(found)
    if any(limit.kind == WHOLE for limit in limits) and found.tensors and all(a.bytes is None for a in found.tensors):
        raise ArgumentError(
            "max_whole= limits arguments that each device holds whole, and this program does not tell them.",
            user_line(),
            hint="Give the function or what jax.jit compiled; a text that has no shardings does not tell.",
        )
    over = (over,) if isinstance(over, str) else tuple(over or ())
    counted = Counted.of(found, over)
    if any(counted.numbers[limit.kind, limit.in_bytes] not in limit.allowed for limit in limits):
        raise AssertionError(message_of(found, limits, counted, over))
    return found


def check_devices(found: Explanation) -> None:
    """Refuses a program on one device, which sends nothing whatever its text."""
    if found.mesh.size == 1:
        raise ArgumentError(
            f"{found.name} was compiled for one device, where no program sends anything.",
            user_line(),
            hint="Give its arguments shardings: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, "
            'P("data"))), or arrays that jax.device_put has placed. Or give jax.jit in_shardings.',
        )


def message_of(found: Explanation, limits: Iterable[Limit], counted: Counted, over: Sequence[str]) -> str:
    """What is allowed, what was found, what exceeds it, and what to do."""
    each = [(limit, counted.numbers[limit.kind, limit.in_bytes]) for limit in limits]
    wrong = [(limit, n) for limit, n in each if n not in limit.allowed]
    along = f", counted over {' and '.join(over)}" if over else ""
    lines = [f"{compiled(found)} exceeds what is allowed{along}", ""]
    table = [("", "allowed", "found")]
    table += [(limit.what, limit.text, _bytes(n) if limit.in_bytes else str(n)) for limit, n in wrong]
    first, second = (max(len(row[i]) for row in table) for i in (0, 1))
    lines += [f"  {what:<{first}}  {allowed:<{second}}  {got}" for what, allowed, got in table]
    kinds = {limit.kind for limit, _ in wrong}
    # Those that the limits have in common stand once, largest first.
    rows = [row for row in counted.rows if kinds & {row.kind, TOTAL}]
    if rows:
        lines += ["", "collectives of these kinds, largest first", *row_lines(rows)]
    elif kinds - {PEAK, WHOLE}:
        lines += ["", "there are no such collectives"]
    if PEAK in kinds:
        lines += held_lines(source_of(found).held(), HELD)
    for limit, _ in wrong:
        large = [a for a in counted.whole if limit.kind == WHOLE and a.local_bytes not in limit.allowed]
        lines += listed_lines([whole_arguments_listed(large)])
    lines += ["", *dict.fromkeys(cure for limit, n in wrong for cure in limit.cures(n, rows))]
    arguments = [limit.argument.replace("N", str(n)) for limit, n in wrong]
    lines.append(f"If this is meant, allow it: {', '.join(arguments)}.")
    return "\n".join(line.rstrip() for line in lines)


def source_of(found: Explanation) -> CompiledSource:
    """The compiled program that was read."""
    assert isinstance(found.source, CompiledSource), "it is compiled"
    return found.source


def compiled(found: Explanation) -> str:
    """A program in the first line of a message."""
    platform = source_of(found).program.platform
    by = f" for {platform}" if platform else ""
    return f"{found.name}, compiled by XLA{by}, on {found.mesh.size} devices ({found.mesh}),"


def row_lines(rows: Sequence[CollectiveRow]) -> list[str]:
    """Collectives as an explanation prints them, without modelled times."""
    lines = collective_lines([dataclasses.replace(row, seconds=0.0) for row in rows], ROWS)
    moved = [{id(one.source) for one in row.moved} for row in rows[:ROWS]]
    if sum(map(len, moved)) > len(set().union(*moved)):
        lines.append("  a collective that moves several arrays has several rows, and counts once")
    if any(not row.exact for row in rows[:ROWS]):
        lines.append("  ~ marks a number that depends on data: a branch counts as taken, a loop as one iteration")
    return lines


# Baseline: what a compiled program sends and holds, as the text of a baseline file and read from it.

IN_ALL = "in all"
_UNNAMED = "(not named)"
_APART = re.compile(r"\s{2,}")
# The version of JAX with the platform, the mesh, and the bytes at the peak.
_HEAD = r"^# (jax .*)$", r"^mesh  (.+)$", r"^peak  ([\d,]+) bytes$"

Key = tuple[str, str, str, str]  # kind, axes, array, module
Sums = Mapping[tuple[str, str], tuple[int, int]]  # of a kind over axes: how many run, and the bytes of all


@dataclasses.dataclass(frozen=True)
class SentRecord:
    """What a compiled program sends and holds."""

    mesh: str  # the axes of the mesh with their sizes
    peak: int  # bytes that a device holds
    # of each array how many collectives move it, and the bytes that each device sends in all of them
    rows: Mapping[Key, tuple[int, int]]
    sums: Sums  # the same of all collectives of a kind over the same axes; one that moves several arrays counts once
    compiler: str  # the version of JAX and the platform, ``jax 0.10.2, cpu``

    @staticmethod
    def of(found: Explanation) -> SentRecord:
        """Records a compiled program."""
        every = [(as_recorded(row), one) for row in found.collectives for one in row.moved]
        rows, sums = sent_by(every), sent_by((key[:2], one) for key, one in every)
        program = source_of(found).program
        mesh = _word(" ".join(f"{name}={size}" for name, size in found.mesh.axes))
        compiler = f"jax {jax.__version__}, {program.platform or 'unknown devices'}"
        return SentRecord(mesh, found.peak, rows, sums, compiler)

    def text(self, name: str) -> str:
        """The file of a function with this name."""
        head = [
            f"# Collectives in one call of {name}: number, bytes that each device sends, axes, array, module.",
            "# gshard writes this file: review it, and write it again with pytest --gshard-update.",
            f"# {self.compiler}",
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
        for line in text.splitlines():
            if not line.strip() or line.startswith(("#", "mesh  ", "peak  ")):
                continue
            try:
                kind, times, size, axes, array, *module = _APART.split(line.strip())
                counted = int(times.removeprefix("x")), int(size.replace(",", ""))
            except ValueError:
                raise ValueError(f"cannot read {line.strip()!r}") from None
            axes = axes.removeprefix("over ")
            if array != IN_ALL:
                rows[kind, axes, array, " ".join(module)] = counted
            elif kind != "total":
                sums[kind, axes] = counted
        compiler, mesh, peak = (re.search(pattern, text, re.MULTILINE) for pattern in _HEAD)
        if mesh is None or peak is None:
            raise ValueError("it has no line 'mesh' or no line 'peak'")
        known = compiler[1] if compiler else "an unknown version"
        return SentRecord(mesh[1], int(peak[1].replace(",", "")), rows, sums, known)

    def differs(self, now: SentRecord, exact: bool, tolerance: float) -> list[str]:
        """How another record exceeds this one, or differs from it, in words; nothing if it does not."""
        found = [] if self.mesh == now.mesh else [f"mesh: {now.mesh}, was {self.mesh}"]
        for where in sorted({*self.sums, *now.sums}):
            before, after = self.sums.get(where, (0, 0)), now.sums.get(where, (0, 0))
            if _is_more(after, before) or (exact and after != before):
                found.append(
                    f"{where[0]} over {where[1]}: {after[0]} in one call, {format_bytes(after[1])}; "
                    f"was {before[0]}, {format_bytes(before[1])}"
                )
        if now.peak > self.peak * (1 + tolerance) or (exact and now.peak < self.peak * (1 - tolerance)):
            found.append(f"peak memory: {format_bytes(now.peak)}, was {format_bytes(self.peak)}")
        if exact and self.sums == now.sums and self.rows != now.rows:
            found.append("other arrays, or other modules, are sent in the same number of collectives")
        return found

    def grown(self, now: SentRecord, exact: bool) -> set[Key]:
        """The rows of another record that are not here, run more often or send more."""
        more = {where for where, of in now.sums.items() if exact or _is_more(of, self.sums.get(where, (0, 0)))}
        return {key for key, of in now.rows.items() if key[:2] in more and _is_more(of, self.rows.get(key, (0, 0)))}


def as_recorded(row: CollectiveRow) -> Key:
    """A collective without its lines, its shape and its reason."""
    return row.kind, _word(row.axes), _word(row.array) or _UNNAMED, _word(row.module)


def _is_more(now: tuple[int, int], before: tuple[int, int]) -> bool:
    """Whether more run, or they send more."""
    return now[0] > before[0] or now[1] > before[1]


def _word(text: str) -> str:
    return " ".join(text.split())


def _line(kind: str, axes: str, array: str, module: str, times: int, size: int) -> str:
    return f"{kind:<18}  {f'x{times}':<6}  {size:>15,}  over {axes:<10}  {array:<24}  {module}".rstrip()


@without_our_frames
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
) -> Explanation:
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
    before = _read(path) if path.is_file() else None
    if update:
        if before is None or before.differs(now, exact=True, tolerance=tolerance):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(now.text(found.name), "utf-8")
        return found
    if before is None:
        raise AssertionError(
            f"there is no baseline of {found.name}.\n  {path}\n"
            "  Write it with pytest --gshard-update, or with update=True. Then review it and commit it."
        )
    if differences := before.differs(now, exact, tolerance):
        raise AssertionError(_message(found, path, before, now, differences, exact))
    return found


def _read(path: Path) -> SentRecord:
    try:
        return SentRecord.read(path.read_text("utf-8"))
    except ValueError as error:
        raise ArgumentError(
            "this file is no baseline of collectives.",
            user_line(),
            got=f"{path}: {error}",
            hint="Delete it, and write it with pytest --gshard-update or update=True.",
        ) from error


def _message(
    found: Explanation, path: Path, before: SentRecord, now: SentRecord, differences: Sequence[str], exact: bool
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
    lines += cures_of(row.kind for row in rows)
    if any(text.startswith("peak") for text in differences) and now.peak > before.peak:
        lines += cures_of([PEAK])
    if before.compiler != now.compiler:
        lines.append(
            f"The baseline was written with {before.compiler}, and this is {now.compiler}: XLA may partition, combine "
            "and hold otherwise."
        )
    lines.append(
        "If this is meant, write the baseline again with pytest --gshard-update or update=True, and review it."
    )
    return "\n".join(line.rstrip() for line in lines)
