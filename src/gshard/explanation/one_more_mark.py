"""Adds a mark of the user's to a searched program, for ``found.with_mark``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from gshard.core.errors import ArgumentError
from gshard.core.mark import Mark
from gshard.core.mesh import Mesh
from gshard.core.partition_spec import words_of
from gshard.core.program import Program, Value
from gshard.planning.added_marks import with_marks


def with_one_more_mark(program: Program, mesh: Mesh, matching: Sequence[Value], what: str, sharding: Any) -> Program:
    """The program with a mark on values."""
    call = f"found.with_mark({what!r}, {sharding!r})"
    values = [v for v in matching if not v.made] or list(matching)
    if not isinstance(sharding, PartitionSpec):
        raise ArgumentError(
            f"{sharding!r} is no PartitionSpec.", got=call, hint=f"Write P({mesh.axes[0][0]!r}), for example."
        )
    least = min(values, key=lambda v: len(v.shape))
    if len(sharding) > (rank := len(least.shape)):
        raise ArgumentError(
            f"{sharding} has {len(sharding)} entries, and {what!r} names an array of {rank} dimensions.",
            got=f"{least.dtype_name}[{','.join(map(str, least.shape))}]; {len(values)} values match",
            hint="Give an entry for each dimension at most, or more of the name.",
        )
    entries, unreduced_and_reduced = words_of(sharding)
    mark = Mark("spec", spec=entries, axes=tuple(mesh.axes), **unreduced_and_reduced)
    if mark.unreduced and not {*values}.isdisjoint(program.block.inputs):
        raise ArgumentError(
            f"{what!r} is an argument, and what comes into a program is finished.",
            got=call,
            hint="Give a line that computes what is to stay in parts, for example 'model.py:38'.",
        )
    marked = with_marks(program, dict.fromkeys(values, mark))
    if marked is None:
        raise ArgumentError(
            f"{what!r} cannot be marked: it has a mark already, enters a loop, or is no array of yours.",
            got=f"{len(values)} values match",
            hint="Give more of an argument's name, or of a line that found.why(...) shows.",
        )
    return marked
