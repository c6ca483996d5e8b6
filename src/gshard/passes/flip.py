"""Flip: a chain of values that lie alike changes its sharding together, if that sends less.

Values tied by elementwise operators (an activation and all that is computed from it on the way) must move as one: each
by itself would only add a move. ``settle`` changes one value at a time; here every such group is tried in the
shardings in which the equations at its border (contractions, sums) could make or take it. What is made of them may
follow. So is a sum that all devices are given and multiply: each may go on with a part of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from gshard.core.mesh import Mesh
from gshard.core.plan import Reason, note_cost
from gshard.core.program import Block, Equation, Value
from gshard.core.rule import PARALLEL, Rule
from gshard.core.sharding import Sharding
from gshard.core.split import operand_sharding, parts, result_sharding
from gshard.passes.assign import Available, best_choice, cost_around, is_product, priced_near, sends_more
from gshard.passes.candidates import Arrays, arrays_of, candidates
from gshard.passes.settle import first_operand, fixed_values, makers_and_readers

# How far the readers of a flipped group follow it.
_STEPS = 6


def flip(
    block: Block,
    shardings: dict[Value, Sharding],
    reasons: dict[tuple[Value, int], Reason],
    mesh: Mesh,
    leaving: frozenset[Value] = frozenset(),
) -> bool:
    """Improves the shardings of groups of a block's inner values in place, bodies included; whether any changed.

    Args:
        block: the program's, or a body.
        shardings, reasons: what is known so far.
        mesh: the devices.
        leaving: results that may leave as they like.
    """
    changed = False
    for e in block.equations:
        for body in e.blocks:
            changed |= flip(body, shardings, reasons, mesh)
    makers, readers = makers_and_readers(block)
    free = makers.keys() - (fixed_values(block) - leaving)
    position = {e: i for i, e in enumerate(block.equations)}

    def around(values: Iterable[Value]) -> list[Equation]:
        found = dict.fromkeys(e for v in values for e in (makers[v], *readers.get(v, ())))
        return sorted(found, key=position.__getitem__)

    chains = ((g, _alternatives(g, around(g), shardings, mesh), False) for g in _groups(block, makers))
    sums = (([v], ways, True) for v, ways in _scattered(makers, readers, free, shardings, mesh))
    for group, others, may_send_more in itertools.chain(chains, sums):
        for other in others:
            trial = _followed(dict.fromkeys(group, other), shardings, readers, free, mesh)
            touched = around(trial)
            before = {v: shardings[v] for v in trial}
            now = cost_around(touched, shardings, mesh)
            shardings.update(trial)
            # A product is not computed by all devices in order to send a little less.
            better = cost_around(touched, shardings, mesh, most=now - 1.0) < now - 1.0
            if better and (may_send_more or not sends_more(touched, before, shardings, mesh)):
                changed = True
                for v, sharding in trial.items():
                    if sharding != before[v]:
                        note_cost(v, sharding, makers[v], first_operand(makers[v]), reasons)
            else:
                shardings.update(before)
    return changed


def _followed(
    flipped: dict[Value, Sharding],
    shardings: Mapping[Value, Sharding],
    readers: Mapping[Value, Sequence[Equation]],
    free: Container[Value],
    mesh: Mesh,
) -> dict[Value, Sharding]:
    """What is flipped, and after it what its readers then make without moving anything, and so on for some steps."""
    trial = dict(flipped)
    frontier = list(dict.fromkeys(e for v in flipped for e in readers.get(v, ())))
    for _ in range(_STEPS):
        following = {}
        for e in frontier:
            if e.rule is None or e.mark is not None or e.rule.fixed is not None:
                continue
            lying = {v: trial.get(v, shardings[v]) for v in (*e.inputs, *e.outputs) if isinstance(v, Value)}
            kept = [v for v in e.outputs if v not in trial and v in free]
            if len(kept) != len(e.outputs):
                continue
            for made, v in zip(_made_in_place(e.rule, arrays_of(e, lying), mesh), kept, strict=True):
                now = shardings[v]
                waiting = now.unreduced if set(now.unreduced) <= set(made.unreduced) else ()
                if made.dims != now.dims and made.is_even(mesh, v.shape):
                    following[v] = Sharding(made.dims, waiting)
        if not following:
            break
        trial.update(following)
        frontier = list(dict.fromkeys(e for v in following for e in readers.get(v, ())))
    return trial


@functools.lru_cache(maxsize=16384)
def _made_in_place(rule: Rule, arrays: Arrays, mesh: Mesh) -> tuple[Sharding, ...]:
    """How an equation makes its results if it moves its operands as little as it can."""
    choices = priced_near(rule, arrays, mesh)
    split = min(choices, key=lambda choice: (sum(choice.moves), -parts(choice.split, mesh))).split
    return tuple(result_sharding(rule, i, split) for i in range(len(rule.results)))


def _scattered(
    makers: Mapping[Value, Equation],
    readers: Mapping[Value, Sequence[Equation]],
    free: Container[Value],
    shardings: Mapping[Value, Sharding],
    mesh: Mesh,
) -> Iterator[tuple[Value, list[Sharding]]]:
    """Sums that all devices are given though each could have a part, and products of them then be split."""
    computed_by_all = {
        e
        for e in makers.values()
        if e.rule is not None
        and is_product(e.rule)
        and parts(best_choice(e, shardings, mesh, Available())[0].split, mesh) == 1
    }
    if mesh.size == 1 or not computed_by_all:
        return
    for v, e in makers.items():
        if v not in free or e.rule is None or shardings[v].unreduced or not _leads_to(v, computed_by_all, readers):
            continue
        made = result_sharding(e.rule, e.outputs.index(v), best_choice(e, shardings, mesh, Available())[0].split)
        summed = tuple(a for a, monoid in made.unreduced if monoid == "add" and a not in shardings[v].atoms)
        dims = shardings[v].dims
        ways = [
            Sharding(tuple((*own, *summed) if i == d else own for i, own in enumerate(dims)))
            for d, n in enumerate(v.shape if summed else ())
            if n and n % mesh.count((*dims[d], *summed)) == 0
        ]
        if ways:
            yield v, ways


def _leads_to(v: Value, ends: Container[Equation], readers: Mapping[Value, Sequence[Equation]]) -> bool:
    """Whether an equation of these reads a value, or what some steps make of it."""
    frontier = [v]
    for _ in range(_STEPS):
        following = [e for x in frontier for e in readers.get(x, ())]
        if any(e in ends for e in following):
            return True
        frontier = list(dict.fromkeys(x for e in following if e.rule is not None for x in e.outputs))
    return False


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
