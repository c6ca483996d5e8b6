"""Proposal: a mark more, or one that asks for less, that makes the devices send less, proven by planning again with it.

A collective moves a value from one sharding to another. Marked where it is made as it is wanted, or, a sum, split over
the devices that add it up, the value may need no collective, or less of one; or the need may only move elsewhere. Which
it is, the new plan tells: the bytes of the whole program are compared, and what sends no less is not proposed.

A mark that is there may ask for too much: a dimension that it wants replicated is left open, and what it splits stays.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from gshard.core.errors import GShardError
from gshard.core.mark import Mark, mark_of_cut
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Block, Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.core.spmd import Collective, SpmdProgram
from gshard.language.mark_primitive import mark_p
from gshard.language.region import with_edges
from gshard.language.registry import Call, rule_of


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A mark, and what it brings.

    Attributes:
        mark: as it is written, ``gshard.shard(x, P('data', None))``.
        at: what to mark: an argument's name, or the line and operation that make the value.
        before, after: bytes that each device sends in one call, without and with the mark.
        instead: the mark that is there now, if this one takes its place; ``mark`` is empty if it can just go.
    """

    mark: str
    at: str
    before: int
    after: int
    instead: str = ""

    @property
    def change(self) -> str:
        """What to do: ``gshard.replicate(x) on ...``, ``no replicate(x) at ...``."""
        if not self.instead:
            return f"{self.mark} on {self.at}"
        return f"{self.mark} instead of {self.instead} at {self.at}" if self.mark else f"no {self.instead} at {self.at}"

    def __str__(self) -> str:
        return (
            f"It would go or be less with {self.change}: planned again so, each device sends "
            f"{self.after:,} bytes a call instead of {self.before:,}."
        )


WORTH = 0.98  # of what is sent: what spares less is not worth a mark
REPLANNED = 1000  # equations that are planned again, all in all, to find marks that would remove collectives


def proposals(
    collectives: Sequence[Collective], plan: Plan, equations: int, marked: Callable[[Program], SpmdProgram]
) -> tuple[tuple[Proposal | None, ...], int]:
    """For each collective the mark that would lower the bytes sent, if one is found, and for how many it was sought.

    A mark that asks for too much is proposed for the first, which sends most.

    Args:
        collectives: one of each kind, those that send most first.
        plan: the plan they were made from.
        equations: of the program; large ones are planned again for few marks, or for none.
        marked: what a program with other marks becomes.
    """
    sent = sum(c.total_bytes for c in collectives)
    times = REPLANNED // max(equations, 1)
    budget = iter(range(times - times // 3))
    found: list[Proposal | None] = []
    tried = 0
    for c in collectives:
        left = operator.length_hint(budget)
        found.append(proposal(c, plan, sent, budget, marked) if left else None)
        tried += operator.length_hint(budget) < left
    less = _with_less_asked(plan, sent, times // 3 + operator.length_hint(budget), marked) if found and sent else None
    if less is not None and (found[0] is None or less.after < found[0].after):
        found[0] = less
    return tuple(found), tried


def _with_less_asked(plan: Plan, sent: int, times: int, marked: Callable[[Program], SpmdProgram]) -> Proposal | None:
    """The best of the marks inside that want a dimension replicated, without that."""
    marks: dict[tuple[str, str], list[Equation]] = {}  # a line's, and those of its derivative
    for e in plan.program.block.walk():
        if e.mark is not None and e.line and not plan.sharding(e.outputs[0]).unreduced:
            marks.setdefault((e.line, str(e.mark)), []).append(e)
    found = None
    for (line, text), same in list(marks.items())[:times]:
        dims = plan.sharding(same[0].outputs[0]).dims
        opened = {e: mark_of_cut([a or None for a in plan.sharding(e.outputs[0]).dims], plan.mesh) for e in same}
        if all(dims):
            continue
        again = _sent(dataclasses.replace(plan.program, block=_with_other_marks(plan.program.block, opened)), marked)
        if again is not None and again < (found.after if found else WORTH * sent):
            spec = spec_of_cut(Sharding(dims), plan.mesh)
            weaker = "" if spec is None or not any(dims) else f"gshard.shard(x, P({_opened(spec)}))"
            found = Proposal(weaker, line, sent, again, text)
    return found


def _opened(spec: PartitionSpec) -> str:
    return ", ".join("P.UNCONSTRAINED" if entry is None else repr(entry) for entry in spec)


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


def proposal(
    c: Collective, plan: Plan, sent: int, budget: Iterator[int], marked: Callable[[Program], SpmdProgram]
) -> Proposal | None:
    """The mark on the value of a collective with which the whole program sends least, if that is much less than now.

    Args:
        c: the collective.
        plan: the plan it was made from.
        sent: bytes that each device sends in one call as it is.
        budget: one is taken for each time that the program is planned again; where none is left, nothing is proposed.
        marked: as for ``proposals``.
    """
    if c.value is None or c.before is None or c.after is None:
        return None
    found = None
    for sharding in _wanted(c.value, c.before, c.after, plan):
        text = text_of_mark(sharding, plan.mesh)
        if text is None or next(budget, None) is None:
            continue
        again = _sent_with(plan, c.value, sharding, marked)
        if again is not None and again < (found.after if found else WORTH * sent):
            found = Proposal(text, _place(c.value, plan.program), sent, again)
    return found


def _wanted(value: Value, before: Sharding, after: Sharding, plan: Plan) -> Iterator[Sharding]:
    """How the value might be sharded: as it is wanted; a sum, split over those that add it up."""
    here = plan.sharding(value)
    seen = {here.dims}
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


def _sent_with(plan: Plan, value: Value, sharding: Sharding, marked: Callable[[Program], SpmdProgram]) -> int | None:
    """Bytes that each device sends where the value is marked; None if it cannot be marked so."""
    program = with_marks(plan.program, {value: mark_of_cut(sharding.dims, plan.mesh)})
    return None if program is None else _sent(program, marked)


def _sent(program: Program, marked: Callable[[Program], SpmdProgram]) -> int | None:
    """Bytes that each device sends in one call; None if its marks cannot be kept."""
    try:
        return sum(c.total_bytes for c in marked(program).collectives)
    except GShardError:
        return None


def with_marks(program: Program, marks: Mapping[Value, Mark]) -> Program | None:
    """The program with these values marked too; None where one cannot be.

    It is marked already, an input of a body, or not an array of the user's.
    """
    if any(v.made for v in marks):
        return None
    inputs, captured = program.block.inputs, len(program.captured)
    arguments = list(program.argument_marks)
    wanted = dict(marks)
    for i, v in enumerate(inputs):
        if v in wanted:
            if i < captured or arguments[i - captured] is not None:
                return None
            arguments[i - captured] = wanted.pop(v)
    block = _marked(program.block, wanted) if wanted else program.block
    return None if wanted else dataclasses.replace(program, block=block, argument_marks=tuple(arguments))


def _marked(block: Block, wanted: dict[Value, Mark]) -> Block:
    """The block with these of its values marked, which are taken from what is wanted."""
    now: dict[Value, Value] = {}
    equations = []
    for e in block.equations:
        bodies = tuple(_marked(body, wanted) for body in e.blocks)
        reads = tuple(now.get(x, x) if isinstance(x, Value) else x for x in e.inputs)
        if any(a is not b for a, b in zip((*bodies, *reads), (*e.blocks, *e.inputs), strict=True)):
            e = dataclasses.replace(e, blocks=bodies, inputs=reads)
            e = with_edges(e) if e.blocks else e
        equations.append(e)
        for value in e.outputs if e.mark is None else ():
            if value in wanted:
                mark = wanted.pop(value)
                marked = now[value] = Value(value.shape, value.dtype, value.index)
                call = Call(mark_p.name, {"mark": mark}, (value.shape,), (value.shape,), (value.dtype,), mark_p)
                rule = rule_of(call, None)
                equations.append(Equation(mark_p, {"mark": mark}, (value,), (marked,), rule, e.source_info, mark=mark))
    if len(equations) == len(block.equations) and all(a is b for a, b in zip(equations, block.equations, strict=True)):
        return block
    outputs = tuple(now.get(v, v) if isinstance(v, Value) else v for v in block.outputs)
    return Block(block.inputs, tuple(equations), outputs)


def text_of_mark(sharding: Sharding, mesh: Mesh) -> str | None:
    """The mark as users write it; None where it is about a part of an axis that has no name."""
    spec = spec_of_cut(sharding, mesh)
    if spec is None:
        return None
    return f"gshard.shard(x, P({', '.join(map(repr, spec))}))" if sharding.atoms else "gshard.replicate(x)"


def spec_of_cut(sharding: Sharding, mesh: Mesh) -> PartitionSpec | None:
    """How the dimensions are cut as a ``PartitionSpec``; None where it takes a part of an axis that has no name."""
    entries = []
    for atoms in sharding.dims:
        names = mesh.format_atoms(atoms).split(",") if atoms else []
        if any(name not in mesh.atoms_of for name in names):
            return None
        entries.append(None if not names else names[0] if len(names) == 1 else tuple(names))
    return PartitionSpec(*entries)


def _place(value: Value, program: Program) -> str:
    if value in program.block.inputs:
        return f"the argument {program.names[program.block.inputs.index(value)]}"
    producer = next((e for e in program.block.walk() if value in e.outputs), None)
    return "" if producer is None else f"the result of {producer.name} at {producer.line}"
