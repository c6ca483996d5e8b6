"""Finds the contractions of a plan that can run as collective matmuls.

The splits of the plan stay as they are. A contraction whose operand is all-gathered, or whose result is
reduce-scattered, can run around a ring instead (``core.ring``). If two rings of a contraction concern the same factor,
both arrays may rotate (Cannon's algorithm). A ``Policy`` decides which rings are worth it.
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
    """A possible ring of a contraction, in which one array rotates."""

    ring: Ring  # the ring
    bytes: int  # bytes of the array on each device without the ring
    # whether other equations need the whole array too. Each contraction in which it rotates then sends it again.
    shared: bool = False
    # whether every device needs the sums, so that gshard gathers them afterwards (the second half of an all-reduce)
    whole: bool = False


Needs = dict[Value, dict[Sharding, list[tuple[Equation, int] | None]]]
"""For each value and sharding, the readers that need it: an equation and the operand's index, or None for others."""


class Chooser(Protocol):
    """Chooses the collective matmuls of one plan."""

    def chosen(self, equation: Equation, offers: tuple[Offer, ...]) -> Ring | None:
        """The ring of an equation, which may join two offers; None if the equation runs unchanged."""


class Policy(Protocol):
    """Decides which contractions are worth being collective matmuls."""

    def on(self, plan: Plan) -> Chooser:
        """The chooser for the equations of a plan."""


@with_tables
def windowed(plan: Plan, policy: Policy | None) -> Plan:
    """The plan with the rings that a policy chooses.

    An array does not rotate at all if one of its readers cannot use it in parts: then gshard gathers it for all.
    """
    if policy is None:
        return plan
    rings: dict[Equation, Ring] = {}
    shardings, chooser = dict(plan.shardings), policy.on(plan)
    for block in _all_blocks(plan.program.block):
        needs = _needs(block, plan)
        block_rings = _rings_of_block(block, plan, chooser, needs)
        shardings.update(
            {v: _target(v, plan, needs) for e, ring in block_rings.items() if ring.result for v in e.outputs}
        )
        rings.update(block_rings)
    return dataclasses.replace(plan, shardings=shardings, rings=rings)


def _all_blocks(block: Block) -> Iterator[Block]:
    yield block
    for e in block.walk():
        yield from e.blocks


def _rings_of_block(block: Block, plan: Plan, chooser: Chooser, needs: Needs) -> dict[Equation, Ring]:
    """The rings of a block, chosen again without operands that would be gathered for another reader all the same."""
    banned: set[tuple[Equation, int]] = set()
    while True:
        rings: dict[Equation, Ring] = {}
        for e in block.equations:
            offers = tuple(_offers(e, plan, needs, banned))
            ring = chooser.chosen(e, offers) if offers else None
            if ring is not None:
                rings[e] = ring
        rotating = {(e, i) for e, ring in rings.items() for i, _ in ring.operands}
        gathered_anyway = {(e, i) for e, i in rotating if not rotating.issuperset(_users(e, i, plan, needs))}
        if not gathered_anyway:
            return rings
        banned |= gathered_anyway


def _needs(block: Block, plan: Plan) -> Needs:
    """The shardings in which the equations and the outputs of a block need their values."""
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
    """The first sharding to which a result is moved: its own, or the one that all its readers need."""
    wanted = list(needs.get(v, ()))
    return wanted[0] if len(wanted) == 1 else plan.sharding(v)


def _users(e: Equation, i: int, plan: Plan, needs: Needs) -> list[tuple[Equation, int] | None]:
    """The readers that need operand ``i`` in the sharding in which this equation reads it, this equation included."""
    value = e.inputs[i]
    assert e.rule is not None
    assert isinstance(value, Value)
    return needs[value][operand_sharding(e.rule, i, plan.splits[e])]


def _offers(e: Equation, plan: Plan, needs: Needs, banned: set[tuple[Equation, int]]) -> Iterator[Offer]:
    """Rings in which one array rotates. None under ``compute_on``, because a ring communicates in the equation."""
    if e.rule is None or e.rule.part is None or e.context.compute_type is not None:
        return
    if not all(math.prod(v.shape) for v in (*e.inputs, *e.outputs)):
        return
    for i, v in enumerate(e.inputs):
        if isinstance(v, Value) and (e, i) not in banned:
            shared = len(_users(e, i, plan, needs)) > 1
            offers = [
                Offer(ring, local_bytes(v, operand_sharding(e.rule, i, plan.splits[e]), plan.mesh), shared)
                for ring in _gathers(e, i, plan)
            ]
            yield from offers[-1:]
    yield from _scatters(e, plan, needs)


def _gathers(e: Equation, i: int, plan: Plan) -> Iterator[Ring]:
    """Rings for the gathers of an operand along one factor."""
    v, mesh, split = e.inputs[i], plan.mesh, plan.splits[e]
    assert e.rule is not None
    assert isinstance(v, Value)
    source, target = plan.sharding(v), operand_sharding(e.rule, i, split)
    steps = plan_reshard(source, target, v.shape, itemsize(v.dtype), mesh)
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
        sent = reshard_bytes(source, parts, v.shape, itemsize(v.dtype), mesh)
        sent += (mesh.count(atoms) - 1) * local_bytes(v, parts, mesh)
        if sent <= reshard_bytes(source, target, v.shape, itemsize(v.dtype), mesh):
            yield ring


def _scatters(e: Equation, plan: Plan, needs: Needs) -> Iterator[Offer]:
    """Rings for a result that is reduce-scattered, or all-reduced: then its first possible dimension is scattered."""
    assert e.rule is not None
    (v,) = e.outputs
    source, target = result_sharding(e.rule, 0, plan.splits[e]), _target(v, plan, needs)
    steps = plan_reshard(source, target, v.shape, itemsize(v.dtype), plan.mesh)
    if steps and steps[0].kind == REDUCE_SCATTER and len(e.rule.results[0][steps[0].dim]) == 1:
        (f,) = e.rule.results[0][steps[0].dim]
        yield Offer(Ring(f, (), steps[0].atoms), local_bytes(v, source, plan.mesh))
    if [step.kind for step in steps] == [ALL_REDUCE]:
        count = plan.mesh.count(steps[0].atoms)
        for n, atoms, factors in zip(v.shape, source.dims, e.rule.results[0], strict=True):
            if len(factors) == 1 and n >= count * plan.mesh.count(atoms) and aligned(n, plan.mesh.count(atoms), count):
                ring = Ring(factors[0], (), steps[0].atoms)
                yield Offer(ring, local_bytes(v, source, plan.mesh), whole=True)
                return


def together(a: Ring, b: Ring, equation: Equation, plan: Plan) -> Ring | None:
    """Joins two rings about one factor over different atoms, so that the arrays of both rotate; None if impossible.

    If one ring has more parts than the other, the rest of it is gathered before or scattered after the ring.
    """
    mesh = plan.mesh
    if a.factor != b.factor or set(a.rotating[0]) & set(b.rotating[0]) or (a.result and b.result):
        return None
    atoms_by_count = [
        {mesh.count(atoms[:k]): atoms[:k] for k in range(1, len(atoms) + 1)} for atoms in (*a.rotating, *b.rotating)
    ]
    common = max(set(atoms_by_count[0]) & set(atoms_by_count[1]), default=1)
    assert equation.rule is not None
    factor_atoms = plan.splits[equation].get(a.factor, ())
    if common < 2 or not aligned(equation.rule.factors[a.factor].size, mesh.count(factor_atoms), common):
        return None
    first, second = (by_count[common] for by_count in atoms_by_count)
    operands = [(i, atoms) for ring, atoms in ((a, first), (b, second)) for i, _ in ring.operands]
    result = next((atoms for ring, atoms in ((a, first), (b, second)) if ring.result), ())
    return Ring(a.factor, tuple(sorted(operands)), result, a.both_ways or b.both_ways)
