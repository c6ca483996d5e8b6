"""Rings: finds the contractions of a plan that can be collective matmuls.

The plan's splits stay as they are. A contraction that takes an operand by an all-gather, or gives its result to a
reduce-scatter, can run around a ring instead (``core.ring``); where two of them concern the same factor, both may
rotate (Cannon's algorithm). A ``Policy`` decides which of them are worth it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Protocol

from gshard.comm.reshard import plan_reshard, reshard_bytes
from gshard.comm.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, aligned
from gshard.core.plan import Plan, local_bytes
from gshard.core.planning_tables import with_tables
from gshard.core.program import Block, Equation, Value, itemsize
from gshard.core.ring import Ring, entering
from gshard.core.sharding import Sharding
from gshard.core.split import operand_sharding, result_sharding
from gshard.language.region import REGIONS


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A ring that is possible, for one array.

    Attributes:
        ring: it.
        bytes: of the array as each device would hold it without the ring.
        shared: whether others need the whole array too, so that each who lets it come by in parts sends it again.
        whole: whether every device needs the sums, which are gathered afterwards: the second half of an all-reduce.
    """

    ring: Ring
    bytes: int
    shared: bool = False
    whole: bool = False


Needs = dict[Value, dict[Sharding, list[tuple[Equation, int] | None]]]
"""Who needs a value in a sharding: an equation and the position of the operand, or another user."""


class Chooser(Protocol):
    """What of one plan is worth being a collective matmul."""

    def chosen(self, equation: Equation, offers: tuple[Offer, ...]) -> Ring | None:
        """The ring for an equation, perhaps of two offers; None if it runs unchanged."""


class Policy(Protocol):
    """What is worth being a collective matmul."""

    def on(self, plan: Plan) -> Chooser:
        """What decides for the equations of a plan."""


@with_tables
def windowed(plan: Plan, policy: Policy | None) -> Plan:
    """The plan with the rings that a policy wants.

    An array is gathered all the same if one of those who need it whole cannot take it in parts; then none does.
    """
    if policy is None:
        return plan
    rings: dict[Equation, Ring] = {}
    shardings, chooser = dict(plan.shardings), policy.on(plan)
    for block in _blocks(plan.program.block):
        needs = _needs(block, plan)
        found = _rings_of_block(block, plan, chooser, needs)
        shardings.update({v: _target(v, plan, needs) for e, ring in found.items() if ring.result for v in e.outputs})
        rings.update(found)
    return dataclasses.replace(plan, shardings=shardings, rings=rings)


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for e in block.walk():
        yield from e.blocks


def _rings_of_block(block: Block, plan: Plan, chooser: Chooser, needs: Needs) -> dict[Equation, Ring]:
    banned: set[tuple[Equation, int]] = set()
    while True:
        rings: dict[Equation, Ring] = {}
        for e in block.equations:
            offers = tuple(_offers(e, plan, needs, banned))
            ring = chooser.chosen(e, offers) if offers else None
            if ring is not None:
                rings[e] = ring
        rotates = {(e, i) for e, ring in rings.items() for i, _ in ring.operands}
        wasted = {(e, i) for e, i in rotates if not rotates.issuperset(_users(e, i, plan, needs))}
        if not wasted:
            return rings
        banned |= wasted


def _needs(block: Block, plan: Plan) -> Needs:
    needs: Needs = {}
    for e in block.equations:
        if e.rule is None:
            wanted = REGIONS[e.name].entry(e, plan.sharding)
        else:
            wanted = [operand_sharding(e.rule, i, plan.splits[e]) for i in range(len(e.inputs))]
        for i, (v, sharding) in enumerate(zip(e.inputs, wanted, strict=True)):
            if isinstance(v, Value):
                needs.setdefault(v, {}).setdefault(sharding, []).append((e, i) if e.rule is not None else None)
    for v in block.outputs:
        if isinstance(v, Value):
            needs.setdefault(v, {}).setdefault(plan.sharding(v), []).append(None)
    return needs


def _target(v: Value, plan: Plan, needs: Needs) -> Sharding:
    """Where a result goes first: to its own sharding, or directly to the sharding that its only user needs."""
    wanted = list(needs.get(v, ()))
    return wanted[0] if len(wanted) == 1 else plan.sharding(v)


def _users(e: Equation, i: int, plan: Plan, needs: Needs) -> list[tuple[Equation, int] | None]:
    """Who needs what operand ``i`` is taken as, the equation itself included."""
    value = e.inputs[i]
    assert e.rule is not None
    assert isinstance(value, Value)
    return needs[value][operand_sharding(e.rule, i, plan.splits[e])]


def _offers(e: Equation, plan: Plan, needs: Needs, banned: set[tuple[Equation, int]]) -> Iterator[Offer]:
    """Rings in which one array rotates; none for what ``compute_on`` computes elsewhere: a ring communicates inside."""
    if e.rule is None or e.rule.part is None or e.context.compute_type is not None:
        return
    if not all(math.prod(v.shape) for v in (*e.inputs, *e.outputs)):
        return
    for i, v in enumerate(e.inputs):
        if isinstance(v, Value) and (e, i) not in banned:
            shared = len(_users(e, i, plan, needs)) > 1
            found = [
                Offer(ring, local_bytes(v, operand_sharding(e.rule, i, plan.splits[e]), plan.mesh), shared)
                for ring in _gathers(e, i, plan)
            ]
            yield from found[-1:]
    yield from _scatters(e, plan, needs)


def _gathers(e: Equation, i: int, plan: Plan) -> Iterator[Ring]:
    """An operand that is gathered along a factor."""
    v, mesh, split = e.inputs[i], plan.mesh, plan.splits[e]
    assert e.rule is not None
    assert isinstance(v, Value)
    here, target = plan.sharding(v), operand_sharding(e.rule, i, split)
    steps = plan_reshard(here, target, v.shape, itemsize(v.dtype), mesh)
    for step in steps:
        if step.kind != ALL_GATHER or mesh.count(step.atoms) < 2 or len(e.rule.operands[i][step.dim]) != 1:
            continue
        (f,), atoms = e.rule.operands[i][step.dim], step.atoms
        if set(atoms) & {*target.atoms, *(a for a, _ in target.unreduced)}:
            continue
        if not aligned(v.shape[step.dim], mesh.count(target.dims[step.dim]), mesh.count(atoms)):
            continue
        ring = Ring(f, ((i, atoms),))
        parts = entering(e.rule, split, ring, i)
        sent = reshard_bytes(here, parts, v.shape, itemsize(v.dtype), mesh)
        sent += (mesh.count(atoms) - 1) * local_bytes(v, parts, mesh)
        if sent <= reshard_bytes(here, target, v.shape, itemsize(v.dtype), mesh):
            yield ring


def _scatters(e: Equation, plan: Plan, needs: Needs) -> Iterator[Offer]:
    """A result that is reduce-scattered at once, or all-reduced: then its first dimension that can be is scattered."""
    assert e.rule is not None
    (v,) = e.outputs
    made, target = result_sharding(e.rule, 0, plan.splits[e]), _target(v, plan, needs)
    steps = plan_reshard(made, target, v.shape, itemsize(v.dtype), plan.mesh)
    if steps and steps[0].kind == REDUCE_SCATTER and len(e.rule.results[0][steps[0].dim]) == 1:
        (f,) = e.rule.results[0][steps[0].dim]
        yield Offer(Ring(f, (), steps[0].atoms), local_bytes(v, made, plan.mesh))
    if [step.kind for step in steps] == [ALL_REDUCE]:
        count = plan.mesh.count(steps[0].atoms)
        for n, have, factors in zip(v.shape, made.dims, e.rule.results[0], strict=True):
            if len(factors) == 1 and n >= count * plan.mesh.count(have) and aligned(n, plan.mesh.count(have), count):
                ring = Ring(factors[0], (), steps[0].atoms)
                yield Offer(ring, local_bytes(v, made, plan.mesh), whole=True)
                return


def together(a: Ring, b: Ring, equation: Equation, plan: Plan) -> Ring | None:
    """One ring in which what rotates in either rotates, if they are about one factor and over different atoms.

    Where one has more parts than the other, what is left of it is gathered before or scattered after.
    """
    mesh = plan.mesh
    if a.factor != b.factor or set(a.rotating[0]) & set(b.rotating[0]) or (a.result and b.result):
        return None
    counts = [
        {mesh.count(atoms[:k]): atoms[:k] for k in range(1, len(atoms) + 1)} for atoms in (*a.rotating, *b.rotating)
    ]
    common = max(set(counts[0]) & set(counts[1]), default=1)
    assert equation.rule is not None
    have = plan.splits[equation].get(a.factor, ())
    if common < 2 or not aligned(equation.rule.factors[a.factor].size, mesh.count(have), common):
        return None
    first, second = (found[common] for found in counts)
    operands = [(i, atoms) for ring, atoms in ((a, first), (b, second)) for i, _ in ring.operands]
    result = next((atoms for ring, atoms in ((a, first), (b, second)) if ring.result), ())
    return Ring(a.factor, tuple(sorted(operands)), result, a.both_ways or b.both_ways)
