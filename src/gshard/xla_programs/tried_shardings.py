"""Tried shardings: other shardings of arguments with which XLA's partitioner sends or holds less, each compiled.

For the arguments that cause most of what is sent, and those that every device holds whole, each dimension is split over
each mesh axis, one change at a time, and the program is compiled again. A change helps if it lowers what is sent, what
is held or the modelled time, and raises none of the three. The changes that help are then put together, the best first,
as long as each helps. Equal layers change together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.mark import axes_of_entry, spec_of_axes, text_of_spec
from gshard.xla_programs.compiled_program import CompiledProgram
from gshard.xla_programs.compiled_rows import Part
from gshard.xla_programs.tried_changes import ROWS, SAME, WORTH, Figures, Tried, TriedChange, try_changes

SECONDS = 30.0  # how long to try, if nothing else is asked for

Specs = Mapping[int, PartitionSpec]  # by the number of the argument


@dataclasses.dataclass(frozen=True, slots=True)
class TriedSharding(TriedChange):
    """Another sharding of an argument, or of one argument of each of some equal layers."""

    name: str  # of the argument, ``params.embed``; ``layers[*].up`` for equal layers
    arguments: tuple[int, ...]  # their numbers
    before: str  # before, spec: the sharding now, as text, and the other one
    spec: PartitionSpec

    @property
    def parts(self) -> set[Hashable]:
        """The arguments."""
        return {*self.arguments}

    def __str__(self) -> str:
        return f"{self.name}: {text_of_spec(self.spec)} instead of {self.before or 'its sharding'}"


class TriedShardings(Tried[TriedSharding]):
    """What XLA compiles with other shardings of arguments."""

    @property
    def lines(self) -> tuple[str, list[str]]:
        """The result as a title and lines below it."""
        more = "; with more seconds, more are tried" if self.tried < self.changes else ""
        more += f"; jax.jit or XLA refused {self.refused} of them" if self.refused else ""
        if not self.helping:
            return (
                f"Compiled with {self.of} other shardings of arguments: none lowers bytes, memory or time alone{more}",
                [],
            )
        rows = []
        for change in self.helping[:ROWS]:
            assert change.figures is not None, "it helps"
            rows.append(f"{change}: {self.before.change_to(change.figures)}")
        changes, after = self.together
        if len(changes) > 1:
            names = ", ".join(change.name for change in changes)
            rows.append(f"together ({names}): {self.before.change_to(after)}")
        return f"Other shardings of arguments that help, compiled with {self.of}{more}", rows


def try_shardings(
    program: CompiledProgram,
    moved: Sequence[Part],
    leaves: Sequence[Any],
    before: Figures,
    compiled: Callable[[Specs], Figures | None],
    seconds: float = SECONDS,
) -> TriedShardings:
    """Compiles a program with other shardings of its arguments."""

    def changed(changes: Sequence[TriedSharding]) -> Figures | None:
        return compiled({i: change.spec for change in changes for i in change.arguments})

    found = try_changes(before, list(_changes(program, moved, leaves)) if seconds > 0 else [], changed, _helps, seconds)
    return TriedShardings(**vars(found))


def _helps(now: Figures, before: Figures) -> bool:
    """Whether something is lower than before, and nothing higher."""
    pairs = [(now.sent, before.sent), (now.peak, before.peak), (now.seconds, before.seconds)]
    return all(after <= SAME * then for after, then in pairs) and any(after < WORTH * then for after, then in pairs)


def _changes(program: CompiledProgram, moved: Sequence[Part], leaves: Sequence[Any]) -> Iterator[TriedSharding]:
    """The changes to try: of the arguments at which most bytes are at stake first."""
    stake: dict[str, int] = {}
    for part in moved:
        name = part.array.alike.rpartition(" of ")[2]
        stake[name] = stake.get(name, 0) + part.bytes * part.sent.collective.executions
    groups: dict[tuple[str, str], list[int]] = {}
    for i, argument in enumerate(program.arguments):
        groups.setdefault((argument.short.alike, argument.sharding), []).append(i)

    def weight(group: tuple[tuple[str, str], list[int]]) -> int:
        (name, _), members = group
        held = sum(program.arguments[i].local_bytes for i in members if program.arguments[i].is_whole)
        return stake.get(name, 0) + held

    for (name, sharding), members in sorted(groups.items(), key=lambda group: -weight(group)):
        if weight(((name, sharding), members)):
            own = program.arguments[members[0]].short.text if len(members) == 1 else name
            for spec in _specs(leaves[members[0]]):
                yield TriedSharding(own, tuple(members), sharding, spec)


def _specs(leaf: Any) -> Iterator[PartitionSpec]:
    """Other shardings of an array: each dimension over each axis, which then splits no other dimension."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return
    now = [*sharding.spec, *(None for _ in range(len(leaf.shape) - len(sharding.spec)))]
    known = [axes_of_entry(entry) for entry in now]
    seen = {tuple(known)}
    for axis, size in sharding.mesh.shape.items():
        for d, n in enumerate(leaf.shape):
            for kept in ((), tuple(a for a in known[d] if a != axis)):
                dims = [tuple(a for a in own if a != axis) for own in known]
                dims[d] = (*kept, axis)
                parts = math.prod(sharding.mesh.shape[a] for a in dims[d])
                if size > 1 and n % parts == 0 and tuple(dims) not in seen:
                    seen.add(tuple(dims))
                    yield spec_of_axes(dims)
