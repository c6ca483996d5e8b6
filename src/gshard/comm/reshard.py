"""Reshard: the cheapest chain of steps from one sharding to another.

A shortest path (Dijkstra) over shardings; the edges are the steps of ``comm.steps``, their length is the bytes that
each device sends plus a little for each message. Atoms that travel together are moved as one, so that the search
sees a handful of moves however many devices there are. There is no step that gathers everything at once: a
gather appears only where a dimension really has to be made whole.

    >>> mesh = Mesh.abstract(x=2, y=4)
    >>> a, b = Sharding((("y.0", "y.1"), (), ("x",))), Sharding(((), ("x", "y.0", "y.1"), ()))
    >>> [step.kind for step in plan_reshard(a, b, (8, 8, 8), 4, mesh)]
    ['all_to_all', 'all_to_all']
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator

from gshard.comm.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_SLICE,
    ALL_TO_ALL,
    ONE_OWNER,
    PERMUTE,
    REDUCE_SCATTER,
    SILENT,
    Step,
    aligned,
    bytes_sent,
)
from gshard.core.mesh import Atoms, Mesh
from gshard.core.sharding import Sharding

# What one message costs beside its bytes, in bytes: keeps chains short where bytes are equal.
_LATENCY = 64
_MONOIDS_WITH_REDUCE_SCATTER = frozenset({"add"})


@functools.lru_cache(maxsize=65536)
def plan_reshard(
    source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh
) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target``, an array of this global shape.

    A finished value becomes unreduced at the end, for nothing: one device keeps it, the others hold the identity.
    """
    if source == target:
        return ()
    if new := dict(set(target.unreduced) - set(source.unreduced)):
        finished = target.with_unreduced({a: m for a, m in target.unreduced if a not in new})
        chain, here = list(plan_reshard(source, finished, shape, itemsize, mesh)), finished
        for monoid in sorted(set(new.values())):
            atoms = tuple(a for a in mesh.atoms if new.get(a) == monoid)
            after = here.with_unreduced({**dict(here.unreduced), **dict.fromkeys(atoms, monoid)})
            chain.append(Step(ONE_OWNER, atoms, here, after, monoid=monoid))
            here = after
        return tuple(chain)
    start = (0, 0, source)
    queue: list[tuple[int, int, Sharding]] = [start]
    best: dict[Sharding, int] = {source: 0}
    came: dict[Sharding, Step] = {}
    order = itertools.count(1)
    while queue:
        cost, _, here = heapq.heappop(queue)
        if here == target:
            break
        if cost > best[here]:
            continue
        for step in _moves(here, target, shape, mesh):
            total = cost + bytes_sent(step, shape, itemsize, mesh) + _LATENCY * (step.kind not in SILENT) + 1
            if total < best.get(step.after, total + 1):
                best[step.after] = total
                came[step.after] = step
                heapq.heappush(queue, (total, next(order), step.after))
    steps: list[Step] = []
    at = target
    while at != source:
        steps.append(came[at])
        at = came[at].before
    return tuple(reversed(steps))


def reshard_bytes(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that each device sends to get from ``source`` to ``target``."""
    return sum(bytes_sent(s, shape, itemsize, mesh) for s in plan_reshard(source, target, shape, itemsize, mesh))


def _moves(here: Sharding, target: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Step]:
    used = set(here.atoms)
    waiting = dict(here.unreduced)
    keep = dict(target.unreduced)
    groups = _groups(here, target)
    for d, wanted in enumerate(target.dims):
        have = here.dims[d]
        # What the target cuts further: slice it if the atoms are free, scatter it if they are unreduced.
        if wanted[: len(have)] == have:
            for atoms in _prefixes(wanted[len(have) :], groups):
                if not aligned(shape[d], mesh.count(have), mesh.count(atoms)):
                    continue
                cut = _with(here, {d: (*have, *atoms)})
                if not used & set(atoms):
                    yield Step(ALL_SLICE, atoms, here, cut, d)
                monoids = {waiting.get(a) for a in atoms}
                if len(monoids) == 1 and monoids <= _MONOIDS_WITH_REDUCE_SCATTER and not set(atoms) & set(keep):
                    after = cut.with_unreduced({a: m for a, m in waiting.items() if a not in atoms})
                    yield Step(REDUCE_SCATTER, atoms, here, after, d)
        # Atoms that leave this dimension, innermost first: to another dimension, or gathered.
        for atoms in _suffixes(have, groups):
            rest = have[: len(have) - len(atoms)]
            if not aligned(shape[d], mesh.count(rest), mesh.count(atoms)):
                continue
            yield Step(ALL_GATHER, atoms, here, _with(here, {d: rest}), d)
            for e, other in enumerate(here.dims):
                wanted_there = e != d and bool(set(atoms) & set(target.dims[e]))
                if wanted_there and aligned(shape[e], mesh.count(other), mesh.count(atoms)):
                    yield Step(ALL_TO_ALL, atoms, here, _with(here, {d: rest, e: (*other, *atoms)}), d, e)
    for monoid in sorted({m for a, m in waiting.items() if a not in keep}):
        atoms = tuple(a for a, m in here.unreduced if m == monoid and a not in keep)
        free = tuple(a for a in atoms if not any(a in dim for dim in target.dims))
        for some in {atoms, free} - {()}:
            after = here.with_unreduced({a: m for a, m in waiting.items() if a not in some})
            yield Step(ALL_REDUCE, tuple(a for a in mesh.atoms if a in some), here, after, monoid=monoid)
    if here.unreduced == target.unreduced and here.dims != target.dims:
        if all(mesh.count(a) == mesh.count(b) for a, b in zip(here.dims, target.dims, strict=True)):
            yield Step(PERMUTE, mesh.atoms, here, target)


def _groups(here: Sharding, target: Sharding) -> frozenset[tuple[str, str]]:
    """Pairs of neighbouring atoms that stand together both here and in the target, and so travel as one."""

    def neighbours(sharding: Sharding) -> set[tuple[str, str]]:
        return {pair for dim in sharding.dims for pair in itertools.pairwise(dim)}

    def absent(sharding: Sharding, pair: tuple[str, str]) -> bool:
        in_dims = {a for dim in sharding.dims for a in dim}
        return not in_dims & set(pair)

    ours, theirs = neighbours(here), neighbours(target)
    return frozenset(
        p for p in ours | theirs if (p in ours or absent(here, p)) and (p in theirs or absent(target, p))
    )


def _prefixes(atoms: Atoms, groups: frozenset[tuple[str, str]]) -> Iterator[Atoms]:
    for k in range(1, len(atoms) + 1):
        if k == len(atoms) or (atoms[k - 1], atoms[k]) not in groups:
            yield atoms[:k]


def _suffixes(atoms: Atoms, groups: frozenset[tuple[str, str]]) -> Iterator[Atoms]:
    for k in range(len(atoms)):
        if k == 0 or (atoms[k - 1], atoms[k]) not in groups:
            yield atoms[k:]


def _with(sharding: Sharding, changes: dict[int, Atoms]) -> Sharding:
    return Sharding(tuple(changes.get(i, dim) for i, dim in enumerate(sharding.dims)), sharding.unreduced)
