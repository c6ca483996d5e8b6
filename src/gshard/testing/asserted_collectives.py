"""Asserted collectives: a test states how many collectives a function runs, and what it sends and holds.

gshard.testing.assert_collectives(jax.jit(step), (state, batch), all_gather=0, max_bytes="50MiB", max_peak="12GiB")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.keywords import keywords
from gshard.core.mesh import MeshLike
from gshard.testing.collective_limits import TOTAL, Exceeded, Limits, Size, Times, limits_of
from gshard.testing.compiled_subject import compiled_subject
from gshard.xla_programs.compiled_explanation import CompiledExplanation
from gshard.xla_programs.compiled_rows import CompiledRow
from gshard.xla_programs.compiled_text import collective_lines_of, memory_lines, whole_lines

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
    if limits.is_empty:
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
