"""Changes: finds marks to add, loosen or remove so that the devices may send less.

A collective moves a value from one sharding to another. A mark where the value is made can ask for the second sharding
at once. For a sum, a mark can split the result over the devices that add it up. Then the value may need no collective,
or a smaller one. An existing mark may also ask for too much: the change opens its replicated dimensions and keeps its
splits.

Only planning again shows whether a change helps (``trials``), and that takes time. So the changes are ordered by the
bytes that they may save: first marks that move an array themselves, because few do, and most of those are left over by
mistake; then the other marks, by the bytes of the collectives that they are about or that go back to them; last, marks
that ask for what planning could have chosen itself. Equal layers are changed together, since one line of the user's
program is behind them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import is_transposed
from gshard.core.mark import Mark, mark_of_cut, resolve
from gshard.core.plan import Plan, Reason
from gshard.core.program import Block, Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.core.spmd import Collective
from gshard.explanation.roots import direct_roots, roots
from gshard.language.region import with_edges
from gshard.planning.added_marks import spec_of_cut, text_of_mark, with_marks


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """A change of marks that may lower what is sent."""

    mark: str  # mark, at, instead: as of ``proposal.Proposal``
    at: str
    instead: str
    row: int  # the number of the collectives that it is for
    direct: int  # bytes that each device sends in the collectives that it is about;
    indirect: int  # and in all that go back to the mark
    program: Callable[[], Program | None] = dataclasses.field(repr=False)  # the program with the change
    as_wanted: bool = False  # whether it marks a value as what reads it wants it. Planning could have chosen that.

    @property
    def turn(self) -> int:
        """When it is tried: first marks that move an array themselves, last what planning could have chosen."""
        return 0 if self.instead and self.direct else 2 if self.as_wanted else 1


def changes_of(rows: Sequence[Sequence[Collective]], plan: Plan) -> list[Change]:
    """The changes that are worth a try, those at which most bytes are at stake first."""
    found = [*_loosened(rows, plan), *_added(rows, plan)]
    return sorted(found, key=lambda c: (c.turn, -max(c.direct, c.indirect), not c.instead))


def _added(rows: Sequence[Sequence[Collective]], plan: Plan) -> Iterator[Change]:
    """Marks on the values that collectives move."""
    program = plan.program
    producers = {v: e for e in program.block.walk() for v in e.outputs}
    free, results = _unmarked(program), {v for v in program.block.outputs if isinstance(v, Value)}
    seen = set()
    for row, same in enumerate(rows):
        sent = sum(c.total_bytes for c in same)
        wanted: dict[Sharding, dict[Value, None]] = {}
        for c in same:
            if c.value in free and c.before is not None and c.after is not None:
                for sharding in _wanted(c.value, c.before, c.after, plan, c.value in results):
                    wanted.setdefault(sharding, {})[c.value] = None
        for sharding, values in wanted.items():
            text, key = text_of_mark(sharding, plan.mesh), (sharding, frozenset(values))
            if text is None or key in seen:
                continue
            seen.add(key)
            marks = dict.fromkeys(values, mark_of_cut(sharding.dims, plan.mesh))
            yield Change(
                text,
                _place(list(values), program, producers),
                "",
                row,
                sent,
                sent,
                functools.partial(with_marks, program, marks),
                same[0].after is not None and sharding.dims == same[0].after.dims,
            )


def _unmarked(program: Program) -> set[Value]:
    """The values that a mark can be put on."""
    first = len(program.captured)
    arguments = zip(program.block.inputs[first:], program.argument_marks, strict=True)
    found = {v for v, mark in arguments if mark is None and not v.made}
    return found | {v for e in program.block.walk() if e.mark is None for v in e.outputs if not v.made}


def _wanted(value: Value, before: Sharding, after: Sharding, plan: Plan, is_result: bool = False) -> Iterator[Sharding]:
    """Shardings that the value might get: the wanted one; for a sum, split over the devices that add it up.

    A result may also keep its sharding: without a mark it leaves replicated, or with the sharding of an argument.
    """
    here = plan.sharding(value)
    seen = {here.dims}
    if is_result and here.atoms:
        yield Sharding(here.dims)
    whole = Sharding(after.dims)
    if whole.dims not in seen:
        seen.add(whole.dims)
        yield whole
    summed = tuple(a for a, _ in before.unreduced if a not in whole.atoms)
    for d, n in enumerate(value.shape if summed else ()):
        dims = tuple((*atoms, *summed) if i == d else atoms for i, atoms in enumerate(whole.dims))
        if dims not in seen and n % plan.mesh.count(dims[d]) == 0:
            seen.add(dims)
            yield Sharding(dims)


def _place(values: Sequence[Value], program: Program, producers: Mapping[Value, Equation]) -> str:
    """What to mark, as text: an argument, or the operation and the line, and how many there are."""
    value, others = values[0], len(values) - 1
    if value in program.block.inputs:
        name = program.names[program.block.inputs.index(value)]
        return f"the argument {name}" + (f" and {others} like it" if others else "")
    e = producers.get(value)
    if e is None:
        return ""
    made = f"the result of {e.name} {'in the gradient of' if is_transposed(e.source_info) else 'at'} {e.line}"
    return f"{made}, {len(values)} times" if others else made


def _loosened(rows: Sequence[Sequence[Collective]], plan: Plan) -> Iterator[Change]:
    """The marks that want a dimension replicated, without that: those of a line together, with their derivatives'."""
    marks: dict[Reason, list[Equation]] = {}
    for e in plan.program.block.walk():
        if e.mark is not None and e.line and not plan.sharding(e.outputs[0]).unreduced:
            marks.setdefault(Reason("mark", e.line, str(e.mark)), []).append(e)
    direct, indirect, largest = _at_stake(rows, plan)
    for root, same in marks.items():
        opened = {e: mark for e in same if (mark := _opened(e, plan)) is not None}
        if not opened:
            continue
        dims = plan.sharding(next(iter(opened)).outputs[0]).dims
        spec = spec_of_cut(Sharding(dims), plan.mesh)
        weaker = "" if spec is None or not any(dims) else f"gshard.shard(x, P({_with_open(spec)}))"
        yield Change(
            weaker, root.line, root.equation, largest.get(root, 0), direct[root], indirect[root],
            functools.partial(_with_opened, plan.program, opened),
        )  # fmt: skip


def _at_stake(
    rows: Sequence[Sequence[Collective]], plan: Plan
) -> tuple[collections.Counter[Reason], collections.Counter[Reason], dict[Reason, int]]:
    """Bytes of the collectives that each mark causes itself, of all that go back to it, and the largest row of them."""
    producers = {v: e for e in plan.program.block.walk() for v in e.outputs}
    direct: collections.Counter[Reason] = collections.Counter()
    indirect: collections.Counter[Reason] = collections.Counter()
    largest: dict[Reason, int] = {}
    for row, same in enumerate(rows):
        for c in same:
            for root in {*direct_roots(c)}:
                direct[root] += c.total_bytes
        sent = sum(c.total_bytes for c in same)
        for root in roots(same[0], plan, producers):
            indirect[root] += sent
            largest.setdefault(root, row)
    return direct, indirect, largest


def _opened(e: Equation, plan: Plan) -> Mark | None:
    """The mark of an equation, leaving open what it replicates; None if it replicates nothing."""
    assert e.mark is not None
    value = e.outputs[0]
    dims = plan.sharding(value).dims
    try:
        already = resolve(e.mark, plan.mesh, value.shape, e.line).open
    except GShardError:  # it is about the automatic axes of a shard_map only
        already = (False,) * len(dims)
    if all(is_open or atoms for is_open, atoms in zip(already, dims, strict=True)):
        return None
    kept = [None if is_open or not atoms else atoms for is_open, atoms in zip(already, dims, strict=True)]
    return mark_of_cut(kept, plan.mesh)


def _with_open(spec: PartitionSpec) -> str:
    return ", ".join("P.UNCONSTRAINED" if entry is None else repr(entry) for entry in spec)


def _with_opened(program: Program, marks: Mapping[Equation, Mark]) -> Program:
    return dataclasses.replace(program, block=_with_other_marks(program.block, marks))


def _with_other_marks(block: Block, marks: Mapping[Equation, Mark]) -> Block:
    """The block with other marks on values that are marked."""
    equations = []
    for e in block.equations:
        if e in marks:
            e = dataclasses.replace(e, mark=marks[e], params={"mark": marks[e]})
        elif e.blocks:
            bodies = tuple(_with_other_marks(body, marks) for body in e.blocks)
            if any(a is not b for a, b in zip(bodies, e.blocks, strict=True)):
                e = with_edges(dataclasses.replace(e, blocks=bodies))
        equations.append(e)
    if all(a is b for a, b in zip(equations, block.equations, strict=True)):
        return block
    return dataclasses.replace(block, equations=tuple(equations))
