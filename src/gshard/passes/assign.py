"""Assign: the split of each equation, once the shardings of its arrays are known (or guessed).

The candidates are what the arrays themselves suggest: each array in turn leads, the others add what does not
contradict it, largest first. The cost of a candidate is what each device sends to bring operands into place and
results where they belong, plus a little for computing: an equation that could be split is not computed by all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from gshard.comm.reshard import plan_reshard, reshard_bytes
from gshard.comm.steps import SILENT
from gshard.core.mesh import Mesh
from gshard.core.program import Block, Constant, Equation, Value, itemsize
from gshard.core.rule import PARALLEL, WHOLE
from gshard.core.sharding import Sharding
from gshard.core.split import Split, is_valid, operand_sharding, project, result_sharding

# Floating-point operations that take as long as sending one byte; only ties between splits depend on it.
FLOPS_PER_BYTE = 1000


@dataclasses.dataclass(slots=True)
class Available:
    """Which other shardings of a value have been made already, so that using them again costs nothing."""

    made: dict[Value, set[Sharding]] = dataclasses.field(default_factory=dict)

    def has(self, value: Value, sharding: Sharding) -> bool:
        """Whether an earlier equation needed the value so."""
        return sharding in self.made.get(value, ())

    def add(self, value: Value, sharding: Sharding) -> None:
        """Notes that the value has been brought into this sharding."""
        self.made.setdefault(value, set()).add(sharding)


def assign(block: Block, shardings: Mapping[Value, Sharding], mesh: Mesh) -> dict[Equation, Split]:
    """The cheapest candidate of every equation of a block and its bodies, in program order."""
    return assign_and_cost(block, shardings, mesh, count=False)[0]


def assign_and_cost(
    block: Block, shardings: Mapping[Value, Sharding], mesh: Mesh, *, count: bool = True
) -> tuple[dict[Equation, Split], float]:
    """The same with what all equations cost together; bodies count as often as they run."""
    splits: dict[Equation, Split] = {}
    total = 0.0
    available = Available()
    for e in block.equations:
        for body in e.blocks:
            inner, cost = assign_and_cost(body, shardings, mesh, count=count)
            splits.update(inner)
            total += e.trips * cost
        if e.rule is None:
            continue
        known = {v: shardings[v] for v in (*e.inputs, *e.outputs) if isinstance(v, Value)}
        choices = candidates(e, known, mesh)
        best = choices[0]
        if len(choices) > 1 or count:
            costs = [cost_of_split(e, s, known, mesh, available) for s in choices]
            best = choices[costs.index(min(costs))]
            total += min(costs)
        splits[e] = best
        for i, value in enumerate(e.inputs):
            if isinstance(value, Value):
                available.add(value, operand_sharding(e.rule, i, best))
    return splits, total


def candidates(equation: Equation, shardings: Mapping[Value, Sharding], mesh: Mesh) -> list[Split]:
    """Splits worth considering, without duplicates; the last one splits nothing (unless there is no choice)."""
    rule = equation.rule
    assert rule is not None
    if rule.fixed is not None:
        return [rule.fixed(mesh)]
    tensors = [
        (value.bytes, project(dims, shardings[value].dims, rule.factors, mesh), value, dims)
        for value, dims in zip((*equation.inputs, *equation.outputs), (*rule.operands, *rule.results), strict=True)
        if isinstance(value, Value)
    ]
    claims = [(size, claim) for size, claim, _, _ in sorted(tensors, key=lambda t: -t[0]) if claim]
    found: dict[tuple[tuple[int, tuple[str, ...]], ...], Split] = {}

    def note(split: Split) -> None:
        found.setdefault(tuple(sorted((f, a) for f, a in split.items() if a)), split)

    leaders = [claim for _, claim in claims]
    leaders += [{f: atoms} for claim in leaders if len(claim) > 1 for f, atoms in claim.items()]
    for leader in leaders:
        split = _extend({}, leader, equation, mesh)
        for _, claim in claims:
            split = _extend(split, claim, equation, mesh)
        note(split)
    for split in list(found.values()) or [{}]:
        for moved in _rehomed(equation, split, shardings, mesh):
            note(moved)
    note({})
    for split in list(found.values()):
        for passed in _passing(equation, split, shardings, mesh):
            note(passed)
    return list(found.values())


def _extend(split: Split, claim: Split, equation: Equation, mesh: Mesh) -> Split:
    """Adds the factors of a claim that do not contradict the split."""
    rule = equation.rule
    assert rule is not None
    for f, atoms in claim.items():
        have = split.get(f, ())
        if atoms[: len(have)] != have or len(atoms) == len(have):
            continue
        used = {a for g, own in split.items() if g != f and rule.component[g] == rule.component[f] for a in own}
        larger = {**split, f: atoms}
        if not used & set(atoms) and is_valid(rule, larger, mesh):
            split = larger
    return split


def _passing(equation: Equation, split: Split, shardings: Mapping[Value, Sharding], mesh: Mesh) -> Iterator[Split]:
    """The split with parts of unreduced operands passing through, where the equation is linear in them."""
    rule = equation.rule
    assert rule is not None
    for k, (monoid, operands) in enumerate(rule.linear):
        waiting = {
            a: None
            for i in sorted(operands)
            if isinstance(v := equation.inputs[i], Value)
            for a, m in shardings[v].unreduced
            if m == monoid
        }
        atoms = tuple(a for a in mesh.atoms if a in waiting)
        if atoms and is_valid(rule, passed := {**split, -1 - k: atoms}, mesh):
            yield passed


def _rehomed(equation: Equation, split: Split, shardings: Mapping[Value, Sharding], mesh: Mesh) -> Iterator[Split]:
    """Splits in which atoms that stand on a whole factor move to a parallel one: an all-to-all, not a gather."""
    rule = equation.rule
    assert rule is not None
    used = {a for atoms in split.values() for a in atoms}
    for value, dims in zip(equation.inputs, rule.operands, strict=True):
        if not isinstance(value, Value):
            continue
        for factors, atoms in zip(dims, shardings[value].dims, strict=True):
            if not atoms or used & set(atoms) or not any(rule.factors[f].kind == WHOLE for f in factors):
                continue
            for other in dims:
                for f in other:
                    factor, have = rule.factors[f], split.get(f, ())
                    if factor.kind == PARALLEL and factor.size % mesh.count((*have, *atoms)) == 0:
                        moved = {**split, f: (*have, *atoms)}
                        if is_valid(rule, moved, mesh):
                            yield moved


def cost_of_split(
    equation: Equation, split: Split, shardings: Mapping[Value, Sharding], mesh: Mesh, available: Available
) -> float:
    """Bytes that each device sends if the equation is split like this, plus computing as a tie-breaker."""
    rule = equation.rule
    assert rule is not None
    total = 0.0
    for i, value in enumerate(equation.inputs):
        if isinstance(value, Constant):
            continue
        target = operand_sharding(rule, i, split)
        if not available.has(value, target):
            total += cost_of_move(value, shardings[value], target, mesh)
    for i, value in enumerate(equation.outputs):
        total += cost_of_move(value, result_sharding(rule, i, split), shardings[value], mesh)
    if rule.sends is not None:
        total += rule.sends(mesh, split)
    parts = mesh.count([a for f, atoms in split.items() if f >= 0 for a in atoms])
    return total + rule.flops / parts / FLOPS_PER_BYTE


def cost_of_move(value: Value, source: Sharding, target: Sharding, mesh: Mesh) -> float:
    """Bytes that each device sends to move a value, and a little for each message: prefer fewer of them."""
    if source == target:
        return 0.0
    size = itemsize(value.dtype)
    steps = plan_reshard(source, target, value.shape, size, mesh)
    messages = sum(step.kind not in SILENT for step in steps)
    return reshard_bytes(source, target, value.shape, size, mesh) + 16.0 * messages
