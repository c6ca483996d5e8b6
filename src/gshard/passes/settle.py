"""Settle: values that nobody marked lie where that is cheapest for who makes them and who reads them.

Propagation follows the marks; it may give two gradients that are about to be added the sharding of their sum, and
so move each of them where moving the sum once would do. Here every value whose producer makes it otherwise, or
whose readers want it otherwise, is tried in those shardings. It changes if the equations around it then send fewer
bytes, or as many but later: a move that waits may meet others and become one. So parts still to be combined travel on
through linear operators to the place where combining them costs least.

Marks, arguments, and the values at the borders of regions stay as they are. Results that nobody marked leave in the way
in which making them sends least; but a result that lies as an argument of its shape does (a state, to be given to
the next call) stays like that.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from gshard.core.mesh import Mesh
from gshard.core.plan import Reason, local_bytes, note_cost
from gshard.core.program import Block, Equation, Program, Value
from gshard.core.rule import REDUCE
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.core.uneven import evened
from gshard.passes.assign import (
    Available,
    assign,
    assign_and_cost,
    best_split,
    cost_around,
    cost_of_moving,
    entering,
    sends_more,
    taken,
)
from gshard.passes.candidates import arrays_of, candidates
from gshard.passes.invariants import bring_in_once, largest

_ROUNDS = 3
# A value with more readers than this is not asked how they take it.
_MANY = 32


def settle(
    block: Block,
    shardings: dict[Value, Sharding],
    splits: Mapping[Equation, Split],
    reasons: dict[tuple[Value, int], Reason],
    mesh: Mesh,
    leaving: frozenset[Value] = frozenset(),
) -> set[Value]:
    """Improves the shardings of a block's inner values in place, bodies included.

    Args:
        block: the program's, or a body.
        shardings, splits, reasons: what is known so far.
        mesh: the devices.
        leaving: results that may leave as they like.

    Returns:
        the values that changed.
    """
    changed: set[Value] = set()
    for e in block.equations:
        for body in e.blocks:
            changed |= settle(body, shardings, splits, reasons, mesh)
        changed |= _combine_after_the_loop(e, shardings, reasons, mesh)
        changed |= bring_in_once(e, shardings, reasons, mesh)
    makers, readers = makers_and_readers(block)
    free = makers.keys() - (fixed_values(block) - leaving)
    best = {e: splits[e] for e in block.equations if e.rule is not None}
    stale = set(free)  # values near which something has changed since they were looked at
    for _ in range(_ROUNDS):
        for v, maker in makers.items():
            if v not in stale:
                continue
            stale.discard(v)
            made = _made(v, maker, best[maker])
            if v in leaving:
                others = _ways_to_leave(v, maker, shardings, mesh)
            else:
                others = _alternatives(v, maker, readers.get(v, ()), shardings, best, mesh)
            if not others:
                continue
            around = [maker, *readers.get(v, ())]
            elsewhere = _elsewhere(maker, around, readers, best)
            now, lay = cost_around(around, shardings, mesh, {v}, elsewhere), shardings[v]
            for other in others:
                before, shardings[v] = shardings[v], other
                later = len(other.unreduced) > len(before.unreduced) or (other == made and not before.unreduced)
                most = now + 1e-6 if later else now - 1e-6
                trial = cost_around(around, shardings, mesh, {v}, elsewhere, most)
                if trial > most or sends_more(around, {v: before}, shardings, mesh, {v}, elsewhere):
                    shardings[v] = before
                else:
                    now = trial
                    changed.add(v)
                    note_cost(v, other, maker, first_operand(maker), reasons)
            if shardings[v] != lay:
                stale |= _near(around, readers) & free
                for e in around:
                    if e.rule is not None:
                        best[e] = best_split(e, shardings, mesh, Available())[0]
        if not stale:
            break
    # Waiting that brought nothing is undone, from the end on: parts are combined where they are made.
    for v, maker in reversed(makers.items()):
        if v in changed and shardings[v].unreduced:
            around = [maker, *readers.get(v, ())]
            now, waiting = cost_around(around, shardings, mesh, {v}), shardings[v]
            shardings[v] = Sharding(waiting.dims)
            if cost_around(around, shardings, mesh, {v}) > now + 1e-6:
                shardings[v] = waiting
    return changed


def _near(around: Sequence[Equation], readers: Mapping[Value, Sequence[Equation]]) -> set[Value]:
    """The values whose cost depends on how some equations take their operands, or on the arrays of these."""
    found: set[Value] = set()
    for e in around:
        found.update(e.outputs)
        for x in e.inputs:
            if isinstance(x, Value):
                found.add(x)
                others = readers.get(x, ())
                found.update(v for other in others if len(others) <= _MANY for v in other.outputs)
    return found


def _elsewhere(
    maker: Equation,
    around: Sequence[Equation],
    readers: Mapping[Value, Sequence[Equation]],
    best: Mapping[Equation, Split],
) -> Available:
    """The shardings in which others take the operands of an equation: to take them so too costs nothing."""
    found = Available()
    for x in maker.inputs:
        others = readers.get(x, ()) if isinstance(x, Value) else ()
        for e in others if len(others) <= _MANY else ():
            if e.rule is not None and e not in around:
                for value, sharding in taken(e, best[e]):
                    if value is x:
                        found.add(value, sharding)
    return found


def free_results(program: Program, shardings: Mapping[Value, Sharding]) -> frozenset[Value]:
    """The results of a program that may leave as they like."""
    block = program.block
    kept = {(v.shape, v.dtype, shardings[v]) for v in block.inputs}
    rules = [e for e in block.equations if e.rule is not None and e.mark is None and e.rule.fixed is None]
    made = {v for e in rules for v in e.outputs}
    crossing = {v for e in block.equations if e.rule is None for v in (*e.inputs, *e.outputs) if isinstance(v, Value)}
    return frozenset(
        v for v in block.outputs if v in made and v not in crossing and (v.shape, v.dtype, shardings[v]) not in kept
    )


def _combine_after_the_loop(
    e: Equation, shardings: dict[Value, Sharding], reasons: dict[tuple[Value, int], Reason], mesh: Mesh
) -> set[Value]:
    """Lets what a loop only adds to (gradients of micro-batches) be combined once, after it, if that is cheaper."""
    carries = _accumulators(e)
    if not carries:
        return set()
    (body,) = e.blocks
    splits, before = assign_and_cost(body, shardings, mesh)
    waiting = {result_sharding(x.rule, 0, split).unreduced for x, split in splits.items() if x.rule and x.outputs}
    makers = {x: q for q in body.equations for x in q.outputs}
    stacks = {c: _stacked(c[3], makers) for c in carries}
    room = largest(body, splits, shardings, mesh)
    for unreduced in sorted(waiting - {()}):
        group = _who_may_wait(carries, dict(unreduced), shardings, room, mesh)
        while group:
            trial, noted = dict(shardings), dict(reasons)
            for inner, end, _, _ in group:
                trial[inner] = trial[end] = _waiting(shardings[inner], unreduced)
            for v in (v for c in group for v in stacks[c]):
                trial[v] = _waiting(shardings[v], unreduced)
            changed = settle(body, trial, assign(body, trial, mesh), noted, mesh)
            helped = [c for c in group if set(unreduced) <= set(trial[c[3]].unreduced)]
            if helped != group:
                group = helped
                continue
            _, after = assign_and_cost(body, trial, mesh)
            saved = e.trips * (before - after)
            for inner, _, outer, _ in group:
                saved += cost_of_moving(outer, shardings[inner], shardings[outer], mesh)
                saved -= cost_of_moving(outer, trial[inner], shardings[outer], mesh)
            if saved > 1e-6:
                shardings.update(trial)
                reasons.clear()
                reasons.update(noted)
                return changed | {v for inner, end, _, _ in group for v in (inner, end)}
            break
    return set()


def _accumulators(e: Equation) -> list[tuple[Value, Value, Value, Value]]:
    """Carried values of a loop to which its body only adds: carry in, carry out, result of the loop, what is added."""
    if len(e.blocks) != 1 or e.trips < 2:
        return []
    (body,) = e.blocks
    readers: dict[Value, list[Equation | None]] = {}
    for q in body.equations:
        for x in (x for x in q.inputs if isinstance(x, Value)):
            readers.setdefault(x, []).append(q)
    for x in (x for x in body.outputs if isinstance(x, Value)):
        readers.setdefault(x, []).append(None)
    makers = {v: q for q in body.equations for v in q.outputs}
    found = []
    inner_of = {edge.outer: edge.inner for edge in e.edges if edge.outer in body.inputs}
    for edge in e.edges:
        start = next((i for i, end in inner_of.items() if end is edge.inner), None)
        if edge.outer not in e.outputs or edge.stacked or start is None:
            continue
        maker, at = makers.get(edge.inner), _carried_along(start, readers)
        if maker is None or maker.rule is None or maker.mark is not None or at not in maker.inputs:
            continue
        others = [v for v in maker.inputs if v is not at]
        adds = any(len(operands) == 2 for _, operands in maker.rule.linear)
        once = len(readers[at]) == len(readers[edge.inner]) == 1
        if adds and once and len(others) == 1 and isinstance(others[0], Value):
            found.append((start, edge.inner, edge.outer, others[0]))
    return found


def _carried_along(v: Value, readers: Mapping[Value, Sequence[Equation | None]]) -> Value:
    """Where a value is after operators that do nothing but pass it on (conversions, reshapes), each its only reader."""
    while len(readers.get(v, ())) == 1:
        e = readers[v][0]
        if e is None or e.rule is None or len(e.inputs) != 1 or not e.rule.linear or e.mark is not None:
            break
        v = e.outputs[0]
    return v


def _who_may_wait(
    carries: Sequence[tuple[Value, Value, Value, Value]],
    unreduced: Container[str],
    shardings: Mapping[Value, Sharding],
    room: int,
    mesh: Mesh,
) -> list[tuple[Value, Value, Value, Value]]:
    """The carries that may wait over these atoms: undivided along them, as many as there is ``room`` for."""
    found = []
    for carry in sorted(carries, key=lambda c: -c[0].bytes):
        inner, end, _, _ = carry
        lies = shardings[inner]
        if lies.unreduced or shardings[end] != lies:
            continue
        more = local_bytes(inner, _without(lies, unreduced), mesh) - local_bytes(inner, lies, mesh)
        if more <= room:
            room -= more
            found.append(carry)
    return found


def _stacked(v: Value, makers: Mapping[Value, Equation]) -> tuple[Value, ...]:
    """What is added, before it was passed on or scaled, if an inner loop stacked it: the stack and a round's part."""
    behind, seen = [v], set()
    while behind:
        v = behind.pop()
        e = makers.get(v) if v not in seen else None
        seen.add(v)
        if e is not None and e.rule is None:
            if found := next(((v, edge.inner) for edge in e.edges if edge.stacked and edge.outer is v), ()):
                return found
        elif e is not None and e.rule is not None and e.mark is None:
            added = {i for monoid, operands in e.rule.linear if monoid == "add" for i in operands}
            behind += [x for i, x in enumerate(e.inputs) if i in added and isinstance(x, Value)]
    return ()


def _waiting(sharding: Sharding, unreduced: tuple[tuple[str, str], ...]) -> Sharding:
    return _without(sharding, dict(unreduced)).with_unreduced(dict(unreduced))


def _without(sharding: Sharding, atoms: Container[str]) -> Sharding:
    """The same, not split over some atoms."""
    return Sharding(tuple(tuple(a for a in dim if a not in atoms) for dim in sharding.dims))


def makers_and_readers(block: Block) -> tuple[dict[Value, Equation], dict[Value, list[Equation]]]:
    """Who makes each value of a block (regions left out) and who reads it, in program order."""
    readers: dict[Value, list[Equation]] = {}
    for e in block.equations:
        for v in dict.fromkeys(v for v in e.inputs if isinstance(v, Value)):
            readers.setdefault(v, []).append(e)
    return {v: e for e in block.equations if e.rule is not None for v in e.outputs}, readers


def fixed_values(block: Block) -> set[Value]:
    """Values whose sharding is not ours to choose: marked ones, and those that cross a region's border."""
    fixed = {v for v in (*block.inputs, *block.outputs) if isinstance(v, Value)}
    for e in block.equations:
        if e.mark is not None or e.rule is None:
            fixed.update(e.outputs)
    return fixed


def _alternatives(
    v: Value,
    maker: Equation,
    readers: Sequence[Equation],
    shardings: Mapping[Value, Sharding],
    best: Mapping[Equation, Split],
    mesh: Mesh,
) -> list[Sharding]:
    """Shardings other than the present one in which the value is made, or in which some reader wants it."""
    made = _made(v, maker, best[maker])
    found = [made, Sharding(made.dims)]
    may_wait = any(shardings[x].unreduced for x in maker.inputs if isinstance(x, Value))
    if maker.rule is not None and (may_wait or any(f.kind == REDUCE for f in maker.rule.factors)):
        ways = (_made(v, maker, s) for s in candidates(maker.rule, arrays_of(maker, shardings), mesh))
        found += [s for s in ways if s.unreduced]
    for e in readers:
        if e.rule is None:
            entered = [s for x, s in zip(e.inputs, entering(e, shardings), strict=True) if x is v]
            found += [*entered, *(Sharding(s.dims) for s in entered)]
        else:
            found += [operand_sharding(e.rule, i, best[e]) for i, x in enumerate(e.inputs) if x is v]
    passable = dict.fromkeys(monoid for s in found for _, monoid in s.unreduced)
    passable = {monoid: all(_passes(v, monoid, e) for e in readers) for monoid in passable}
    return [s for s in dict.fromkeys(found) if s != shardings[v] and all(passable[m] for _, m in s.unreduced)]


def _ways_to_leave(v: Value, maker: Equation, shardings: Mapping[Value, Sharding], mesh: Mesh) -> list[Sharding]:
    """Shardings in which a result would be made, were it to leave so: it is not cut in order to be left cut."""
    assert maker.rule is not None
    around = {x: shardings[x] for x in (*maker.inputs, *maker.outputs) if isinstance(x, Value)}

    def is_made(way: Sharding) -> bool:
        split, _ = best_split(maker, {**around, v: way}, mesh, Available())
        return way in _leaving(_made(v, maker, split), v, mesh)

    splits = candidates(maker.rule, arrays_of(maker, shardings), mesh)
    ways = dict.fromkeys(way for split in splits for way in _leaving(_made(v, maker, split), v, mesh))
    return [way for way in ways if way != shardings[v] and is_made(way)]


def _leaving(made: Sharding, v: Value, mesh: Mesh) -> list[Sharding]:
    """How what is made like this may leave: as it is, or uneven parts moved to another dimension."""
    if made.unreduced:
        return []
    return [made] if made.is_even(mesh, v.shape) else evened(made, v.shape, mesh)


def _passes(v: Value, monoid: str, reader: Equation) -> bool:
    """Whether a reader can take a value uncombined. If one cannot, all others may as well use what it is given."""
    if reader.rule is None or not reader.rule.linear:
        return False
    at = {i for i, x in enumerate(reader.inputs) if x is v}
    return any(m == monoid and at <= operands for m, operands in reader.rule.linear)


def _made(v: Value, maker: Equation, split: Split) -> Sharding:
    assert maker.rule is not None
    return result_sharding(maker.rule, maker.outputs.index(v), split)


def first_operand(maker: Equation) -> Value | None:
    """The value that a result's sharding is said to come from."""
    return next((x for x in maker.inputs if isinstance(x, Value)), None)
