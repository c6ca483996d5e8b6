"""Flip: a chain of values that lie alike changes its sharding together, if that sends less.

Values tied by elementwise operators (an activation and all that is computed from it on the way) must move as one: each
by itself would only add a move. ``settle`` changes one value at a time; here every such group is tried in the
shardings in which the equations at its border (contractions, sums) could make or take it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gshard.core.mesh import Mesh
from gshard.core.plan import Reason
from gshard.core.program import Block, Equation, Value
from gshard.core.rule import PARALLEL
from gshard.core.sharding import Sharding
from gshard.core.split import operand_sharding, result_sharding
from gshard.passes.assign import cost_around
from gshard.passes.candidates import arrays_of, candidates
from gshard.passes.settle import fixed_values, makers_and_readers, note_cost


def flip(
    block: Block, shardings: dict[Value, Sharding], reasons: dict[tuple[Value, int], Reason], mesh: Mesh
) -> bool:
    """Improves the shardings of groups of a block's inner values in place, bodies included; whether any changed."""
    changed = False
    for e in block.equations:
        for body in e.blocks:
            changed |= flip(body, shardings, reasons, mesh)
    makers, readers = makers_and_readers(block)
    position = {e: i for i, e in enumerate(block.equations)}
    for group in _groups(block, makers):
        around = dict.fromkeys(e for v in group for e in (makers[v], *readers.get(v, ())))
        equations = sorted(around, key=position.__getitem__)
        others = _alternatives(group, equations, shardings, mesh)
        if not others:
            continue
        before = {v: shardings[v] for v in group}
        best, least = before, cost_around(equations, shardings, mesh) - 1.0
        for other in others:
            shardings.update(dict.fromkeys(group, other))
            if (trial := cost_around(equations, shardings, mesh)) < least:
                best, least = dict.fromkeys(group, other), trial
        shardings.update(best)
        if best is not before:
            changed = True
            for v in group:
                note_cost(v, shardings[v], makers[v], reasons)
    return changed


def _groups(block: Block, makers: Mapping[Value, Equation]) -> list[list[Value]]:
    """Values that elementwise equations tie together: of one shape, none of them marked or at a border."""
    free = makers.keys() - fixed_values(block)
    leader: dict[Value, Value] = {}

    def root(v: Value) -> Value:
        while leader.get(v, v) is not v:
            v = leader[v]
        return v

    for e in block.equations:
        if not _is_elementwise(e):
            continue
        assert e.rule is not None
        dims, shape = e.rule.results[0], e.outputs[0].shape
        arrays = zip((*e.inputs, *e.outputs), (*e.rule.operands, *e.rule.results), strict=True)
        tied = [v for v, own in arrays if own == dims and isinstance(v, Value) and v.shape == shape and v in free]
        for v in tied:
            leader[root(v)] = root(tied[0])
    groups: dict[Value, list[Value]] = {}
    for v in makers:
        if v in leader:
            groups.setdefault(root(v), []).append(v)
    return [group for group in groups.values() if len(group) > 1]


def _is_elementwise(e: Equation) -> bool:
    rule = e.rule
    return bool(
        rule is not None and e.mark is None and e.outputs and rule.fixed is None and e.outputs[0].shape
        and all(f.kind == PARALLEL for f in rule.factors)
    )  # fmt: skip


def _alternatives(
    group: Iterable[Value], equations: Iterable[Equation], shardings: Mapping[Value, Sharding], mesh: Mesh
) -> list[Sharding]:
    members = set(group)
    found: dict[Sharding, None] = {}
    for e in equations:
        if e.rule is None or _is_elementwise(e):
            continue
        for split in candidates(e.rule, arrays_of(e, shardings), mesh):
            taken = [operand_sharding(e.rule, i, split) for i, v in enumerate(e.inputs) if v in members]
            made = [result_sharding(e.rule, i, split) for i, v in enumerate(e.outputs) if v in members]
            found.update(dict.fromkeys(Sharding(s.dims) for s in (*taken, *made)))
    return [s for s in found if any(shardings[v] != s for v in members)]
