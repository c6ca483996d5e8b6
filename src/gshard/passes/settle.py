"""Settle: values that nobody marked lie where that is cheapest for who makes them and who reads them.

Propagation follows the marks; it may give two gradients that are about to be added the sharding of their sum, and
so move each of them where moving the sum once would do. Here every value whose producer makes it otherwise, or
whose readers want it otherwise, is tried in those shardings. It changes if the equations around it then send fewer
bytes, or as many but later: a move that waits may meet others and become one.

Marks, arguments, and the values at the borders of regions stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gshard.core.mesh import Mesh
from gshard.core.plan import Reason
from gshard.core.program import Block, Equation, Value
from gshard.core.sharding import Sharding
from gshard.core.split import Split, place
from gshard.passes.assign import Available, candidates, cost_of_move, cost_of_split, produced
from gshard.rules.region import REGIONS

_ROUNDS = 3


def settle(
    block: Block,
    shardings: dict[Value, Sharding],
    splits: Mapping[Equation, Split],
    reasons: dict[tuple[Value, int], Reason],
    mesh: Mesh,
) -> set[Value]:
    """Improves the shardings of a block's inner values in place, bodies included.

    Returns:
        the values that changed.
    """
    changed: set[Value] = set()
    for e in block.equations:
        for body in e.blocks:
            changed |= settle(body, shardings, splits, reasons, mesh)
    fixed = _fixed(block)
    readers: dict[Value, list[Equation]] = {}
    for e in block.equations:
        for v in dict.fromkeys(v for v in e.inputs if isinstance(v, Value)):
            readers.setdefault(v, []).append(e)
    makers = {v: e for e in block.equations if e.rule is not None for v in e.outputs}
    best = {e: splits[e] for e in makers.values()}
    for _ in range(_ROUNDS):
        moved = False
        for v, maker in makers.items():
            if v in fixed or not v.shape:
                continue
            others = _alternatives(v, maker, readers.get(v, ()), shardings, best)
            if not others:
                continue
            around = [maker, *readers.get(v, ())]
            made = Sharding(produced(maker, best[maker], maker.outputs.index(v)).dims)
            now = _cost(v, around, shardings, mesh)
            for other in others:
                before, shardings[v] = shardings[v], other
                trial = _cost(v, around, shardings, mesh)
                if trial > now + 1e-6 or (trial > now - 1e-6 and other != made):
                    shardings[v] = before
                else:
                    now, moved = trial, True
                    changed.add(v)
                    _note(v, other, maker, reasons)
            if v in changed:
                for e in around:
                    if e.rule is not None:
                        best[e] = _best(e, shardings, mesh, Available())[0]
        if not moved:
            break
    return changed


def _fixed(block: Block) -> set[Value]:
    """Values whose sharding is not ours to choose: marked ones, and those that cross a region's border."""
    fixed = {v for v in (*block.inputs, *block.outputs) if isinstance(v, Value)}
    for e in block.equations:
        if e.mark is not None or e.rule is None:
            fixed.update(e.outputs)
    return fixed


def _alternatives(
    v: Value,
    maker: Equation,
    readers: Iterable[Equation],
    shardings: Mapping[Value, Sharding],
    best: Mapping[Equation, Split],
) -> list[Sharding]:
    """Shardings other than the present one in which the value is made, or in which some reader wants it."""
    found = [Sharding(produced(maker, best[maker], maker.outputs.index(v)).dims)]
    for e in readers:
        if e.rule is None:
            entry = REGIONS[e.name].entry(e, lambda x: shardings[x] if isinstance(x, Value) else Sharding(()))
            found += [s for x, s in zip(e.inputs, entry, strict=True) if x is v]
        else:
            operands = zip(e.inputs, e.rule.operands, strict=True)
            found += [Sharding(place(dims, best[e])) for x, dims in operands if x is v]
    return [s for s in dict.fromkeys(found) if s != shardings[v]]


def _best(
    e: Equation, shardings: Mapping[Value, Sharding], mesh: Mesh, available: Available
) -> tuple[Split, float]:
    known = {x: shardings[x] for x in (*e.inputs, *e.outputs) if isinstance(x, Value)}
    costs = [(split, cost_of_split(e, split, known, mesh, available)) for split in candidates(e, known, mesh)]
    return min(costs, key=lambda pair: pair[1])


def _cost(v: Value, around: Iterable[Equation], shardings: Mapping[Value, Sharding], mesh: Mesh) -> float:
    """What the equations around a value send; a sharding that two readers want is made once."""
    total, available = 0.0, Available()
    for e in around:
        if e.rule is None:
            entry = REGIONS[e.name].entry(e, lambda x: shardings[x] if isinstance(x, Value) else Sharding(()))
            for x, wanted in zip(e.inputs, entry, strict=True):
                if x is v and not available.has(v, wanted):
                    total += cost_of_move(v, shardings[v], wanted, mesh)
                    available.add(v, wanted)
            continue
        split, cost = _best(e, shardings, mesh, available)
        total += cost
        for x, dims in zip(e.inputs, e.rule.operands, strict=True):
            if x is v:
                available.add(v, Sharding(place(dims, split)))
    return total


def _note(v: Value, sharding: Sharding, maker: Equation, reasons: dict[tuple[Value, int], Reason]) -> None:
    source = next((x for x in maker.inputs if isinstance(x, Value)), None)
    for d, atoms in enumerate(sharding.dims):
        reasons.pop((v, d), None)
        if atoms:
            reasons[v, d] = Reason("cost", maker.line, maker.name, source)
