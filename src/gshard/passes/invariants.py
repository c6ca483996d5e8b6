"""Invariants: what a loop needs in the same place in every round is brought there once, before it.

A weight that is split outside of a loop and gathered in each of its rounds can be gathered once, and stay while the
loop runs. That trades memory for messages, and a step that gathers all weights of a model, one after the other and each
for a moment, must not come to hold them all. So what stays is never more than the largest array that a round holds on
one device anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gshard.core.mesh import Mesh
from gshard.core.plan import Reason, local_bytes, note_cost
from gshard.core.program import Block, Equation, Value
from gshard.core.sharding import Sharding
from gshard.core.split import Split
from gshard.passes.assign import assign, cost_around, cost_of_moving, entering, taken

# Rounds of a loop whose length is not known, at least.
_ROUNDS_OF_WHILE = 2


def bring_in_once(
    loop: Equation,
    shardings: dict[Value, Sharding],
    reasons: dict[tuple[Value, int], Reason],
    mesh: Mesh,
) -> set[Value]:
    """Changes in place how a loop's bodies get what does not change from round to round.

    Args:
        loop: an equation with bodies.
        shardings, reasons: what is known so far.
        mesh: the devices.

    Returns:
        the values that changed.
    """
    unchanging = list(_unchanging(loop))
    splits: dict[Equation, Split] = {}
    for body in loop.blocks if unchanging else ():
        splits |= assign(body, shardings, mesh)
    found = []
    for body, outer, inner in unchanging:
        readers = [e for e in body.equations if inner in e.inputs]
        now = cost_around(readers, shardings, mesh, {inner})
        before = shardings[inner]
        for other in dict.fromkeys(s for e in readers for v, s in _taken(e, splits, shardings) if v is inner):
            if other == before or other.unreduced:
                continue
            shardings[inner] = other
            saved = _rounds(loop) * (now - cost_around(readers, shardings, mesh, {inner}))
            saved += cost_of_moving(outer, shardings[outer], before, mesh)
            saved -= cost_of_moving(outer, shardings[outer], other, mesh)
            shardings[inner] = before
            if saved > 1.0:
                found.append((saved, outer, inner, other))
    room = max((largest(body, splits, shardings, mesh) for body in loop.blocks), default=0) if found else 0
    changed: set[Value] = set()
    for _, outer, inner, other in sorted(found, key=lambda x: -x[0]):
        more = local_bytes(inner, other, mesh) - local_bytes(inner, shardings[inner], mesh)
        if inner in changed or more > room:
            continue
        room -= more
        shardings[inner] = other
        changed.add(inner)
        note_cost(inner, other, loop, outer, reasons)
    return changed


def _unchanging(loop: Equation) -> Iterator[tuple[Block, Value, Value]]:
    """What enters the bodies of a loop whole and is not carried from round to round: body, value outside, inside."""
    bodies = {v: body for body in loop.blocks for v in body.inputs}
    carried = {v for edge in loop.edges for v in (edge.outer, edge.inner) if edge.outer not in loop.inputs}
    if loop.trips < 2 and not carried & bodies.keys():
        return  # branches
    for edge in loop.edges:
        if edge.outer in loop.inputs and edge.inner in bodies and edge.inner not in carried and not edge.stacked:
            yield bodies[edge.inner], edge.outer, edge.inner


def _rounds(loop: Equation) -> int:
    return max(loop.trips, _ROUNDS_OF_WHILE)


def _taken(
    e: Equation, splits: Mapping[Equation, Split], shardings: Mapping[Value, Sharding]
) -> Iterator[tuple[Value, Sharding]]:
    """The operands of an equation or region that are values, and how it takes each."""
    if e.rule is not None:
        yield from taken(e, splits[e])
    else:
        pairs = zip(e.inputs, entering(e, shardings), strict=True)
        yield from ((v, s) for v, s in pairs if isinstance(v, Value))


def largest(body: Block, splits: Mapping[Equation, Split], shardings: Mapping[Value, Sharding], mesh: Mesh) -> int:
    """Bytes of the largest array that a device holds in a round, as it lies or as somebody takes it."""
    sizes = [local_bytes(v, shardings[v], mesh) for e in body.walk() for v in e.outputs]
    sizes += [local_bytes(v, s, mesh) for e in body.walk() for v, s in _taken(e, splits, shardings)]
    return max(sizes, default=0)
