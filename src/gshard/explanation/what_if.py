"""What if: plans the program again under other marks, and prices the result.

``instead`` tries the other shardings of one value, ``trials`` the changes of marks that may remove a collective. Both
plan, partition and price the whole program, as a user would who edits the mark.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from gshard.core.errors import GShardError
from gshard.core.mark import mark_of_cut
from gshard.core.number_text import format_seconds
from gshard.core.plan import Plan
from gshard.core.program import Program, Value, format_bytes
from gshard.core.spmd import SpmdProgram
from gshard.device.cost import Cost, cost
from gshard.planning.added_marks import text_of_mark, with_marks
from gshard.planning.strategies import shardings

Planner = Callable[[Program], SpmdProgram]

_EQUATIONS = 40_000  # that are planned again, all in all,
_MOST = 24  # and shardings that are tried


@dataclasses.dataclass(frozen=True)
class Instead:
    """Another sharding, and what a call takes with it."""

    sharding: str  # as text
    mark: str  # as text
    cost: Cost  # of the program with that mark;
    now: Cost  # of the program without it

    @property
    def seconds(self) -> float:
        """How much longer a call takes with it."""
        return self.cost.seconds - self.now.seconds

    def __str__(self) -> str:
        sent, held = self.cost.sent - self.now.sent, self.cost.peak - self.now.peak
        amounts = (f"{_signed(sent)} sent by each device", f"{_signed(held)} at the peak")
        return f"{self.sharding}: {format_seconds(self.seconds, '+')} a call, {', '.join(amounts)}   {self.mark}"


def replanned(planner: Planner, program: Program | None) -> SpmdProgram | None:
    """What a program with other marks becomes; None where there is none, or where its marks fit no plan."""
    try:
        return None if program is None else planner(program)
    except GShardError:
        return None


def instead(plan: Plan, value: Value, now: Cost, donated: Sequence[int], marked: Planner) -> tuple[Instead, ...]:
    """The other shardings of a value over whole axes, the fastest first; none for one that cannot be marked."""
    equations = sum(1 for _ in plan.program.block.walk())
    most = max(1, min(_MOST, _EQUATIONS // max(equations, 1)))
    found = itertools.islice(_tried(plan, value, now, donated, marked), most)
    return tuple(sorted(found, key=lambda row: (row.cost.seconds, row.cost.sent, row.sharding)))


def _tried(plan: Plan, value: Value, now: Cost, donated: Sequence[int], marked: Planner) -> Iterator[Instead]:
    axes = tuple(atoms for atoms in plan.mesh.atoms_of.values() if atoms)
    ways = shardings(value.shape, plan.mesh, axes, even=value in plan.program.block.inputs)
    # Those over the fewest axes first: the others come last where not all can be tried.
    for way in sorted(ways, key=lambda way: len(way.atoms)):
        text = text_of_mark(way, plan.mesh)
        program = with_marks(plan.program, {value: mark_of_cut(way.dims, plan.mesh)})
        if way.dims == plan.sharding(value).dims or text is None or program is None:
            continue
        spmd = replanned(marked, program)
        if spmd is None:
            continue
        shown = way.format(plan.mesh, value.shape, value.dtype_name)
        yield Instead(shown, text, cost(spmd, now.machine, donated), now)


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"
