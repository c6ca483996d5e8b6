"""Reshard: plan the collectives that move an array from one sharding to another, at the least cost.

The plan is a shortest path (A*) over shardings. Its edges are the steps of ``comm.steps``. The length of an edge is the
bytes that each device sends, plus ``MESSAGE`` bytes for each message, or the seconds that the step takes on a machine
(``Mesh.times``). Atoms that move together form one block, so the search has a handful of moves however many devices
there are. No step gathers all dimensions at once: a dimension is gathered only where it has to become whole.

    >>> mesh = Mesh.abstract(x=2, y=4)
    >>> a, b = Sharding((("y.0", "y.1"), (), ("x",))), Sharding(((), ("x", "y.0", "y.1"), ()))
    >>> [step.kind for step in plan_reshard(a, b, (8, 8, 8), 4, mesh)]
    ['all_to_all']
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from gshard.comm.exchange import can_change
from gshard.comm.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_SLICE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    TO_PARTIAL,
    Step,
    aligned,
    bytes_sent,
    rounds,
)
from gshard.comm.tiles import can_be_exchanged, moved
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding, common_prefix

# Bytes that a message counts beside its own, here and in ``planning.objective``. In the time of a hop a
# TPU sends 1e5 bytes and a GPU 1e6. But a plan without a machine should be that of the same program at true size, where
# the latency of messages is a thousandth of the time. With 1 KiB, 8 of the 235 programs of
# ``benchmarks/against_xla_programs.py`` send more, and 4 take longer on ``h100:1x8``; with 4 KiB a pipeline holds 12 %
# more. Plans at true size are the same with all of them.
MESSAGE = 256
# Of chains that send equally many bytes, the search takes the one that sends fewer of them over the outer axes of the
# mesh, along which devices are farther apart (nodes, slices): a part is gathered along these first, while it is small.
_OUTER = 1e-9
# Seconds that are no difference: keeps chains short where times are equal.
_TIE = 1e-12
# Two or three blocks of atoms are moved in every way; more of them, or a single one, only directly to the target.
_FEW = 3
_WITH_REDUCE_SCATTER = frozenset({"add", "pick"})


def plan_reshard(
    source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh
) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target``, an array of this global shape.

    A finished value becomes unreduced at the end, for nothing: one device keeps it, the others hold the identity.
    """
    if source == target:
        return ()
    size = math.prod(shape)
    if mesh.times is None and size and all(n % mesh.size == 0 for n in shape):
        # All parts of all cuts are equal, so that only the size of the whole matters, and of that only the order.
        shape, size = (mesh.size,) * len(shape), size * itemsize // mesh.size ** len(shape)
        itemsize = 1 << (size - 1).bit_length()
    return _planned(source, target, shape, itemsize, mesh)


@tabulated(65536)
def _planned(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> tuple[Step, ...]:
    if new := dict(set(target.unreduced) - set(source.unreduced)):
        finished = target.with_unreduced({a: m for a, m in target.unreduced if a not in new})
        chain, here = list(plan_reshard(source, finished, shape, itemsize, mesh)), finished
        for monoid in sorted(set(new.values())):
            atoms = tuple(a for a in mesh.atoms if new.get(a) == monoid)
            after = here.with_unreduced({**dict(here.unreduced), **dict.fromkeys(atoms, monoid)})
            chain.append(Step(TO_PARTIAL, atoms, here, after, monoid=monoid))
            here = after
        return tuple(chain)
    # What already is where it belongs need not move, unless a part is too small to be cut where it is.
    came = _search(source, target, _blocks(source, target, mesh, True), shape, itemsize, mesh)
    if target not in came:
        came = _search(source, target, _blocks(source, target, mesh, False), shape, itemsize, mesh)
    steps: list[Step] = []
    at = target
    while at != source:
        steps.append(came[at])
        at = came[at].before
    return tuple(reversed(steps))


def _search(
    source: Sharding, target: Sharding, blocks: tuple[Atoms, ...], shape: tuple[int, ...], itemsize: int, mesh: Mesh
) -> dict[Sharding, Step]:
    """The last step of the cheapest chain to each sharding that the search visits; includes the target if reached.

    Args:
        source, target: from where to where.
        blocks: atoms that move together.
        shape, itemsize: of the array.
        mesh: the devices.
    """
    whole = itemsize * math.prod(shape)
    share = whole // _parts(target, mesh)
    queue: list[tuple[float, int, float, Sharding]] = [(0, 0, 0, source)]
    best: dict[Sharding, float] = {source: 0}
    came: dict[Sharding, Step] = {}
    order = itertools.count(1)
    while queue:
        _, _, cost, here = heapq.heappop(queue)
        if here == target:
            break
        if cost > best[here]:
            continue
        for step, sent in _moves(here, target, blocks, shape, itemsize, mesh):
            if best.get(step.after, cost + 1) <= cost:
                continue  # however short the step is
            if mesh.times is None:
                total = cost + sent * (1 + _OUTER * _outermost(step, mesh)) + MESSAGE * rounds(step, mesh) + 1
            else:
                total = cost + _seconds(step, shape, itemsize, mesh) + _TIE
            if total < best.get(step.after, total + 1) and total < best.get(target, total + 1):
                best[step.after] = total
                came[step.after] = step
                # A lower bound of the rest: what a device holds in the end and does not hold here arrives in a message.
                held = -(-whole // _parts(step.after, mesh))
                if mesh.times is None:
                    least = share - held + MESSAGE + 1 if share > held else int(step.after != target)
                else:
                    least = mesh.times.least(held, share)
                heapq.heappush(queue, (total + least, next(order), total, step.after))
    return came


@tabulated(65536)
def _seconds(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
    """What a step takes on a machine: many searches for an array meet it."""
    assert mesh.times is not None
    return mesh.times.seconds(step, shape, itemsize, mesh)


def _outermost(step: Step, mesh: Mesh) -> float:
    """1 for a step over the outermost atom of the mesh, less for one over inner atoms only."""
    return 1 - min(map(mesh.atoms.index, step.atoms), default=0) / len(mesh.atoms)


def _parts(sharding: Sharding, mesh: Mesh) -> int:
    return math.prod(mesh.count(atoms) for atoms in sharding.dims)


def reshard_bytes(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that each device sends to get from ``source`` to ``target``."""
    return sum(bytes_sent(s, shape, itemsize, mesh) for s in plan_reshard(source, target, shape, itemsize, mesh))


def _moves(
    here: Sharding, target: Sharding, blocks: tuple[Atoms, ...], shape: tuple[int, ...], itemsize: int, mesh: Mesh
) -> Iterator[tuple[Step, int]]:
    """The steps from here that may lead to the target, and what each device sends in them."""
    keep = frozenset(a for a, _ in target.unreduced)
    steps = single_steps(here, keep, blocks, shape, itemsize, mesh)
    yield from steps if 1 < len(blocks) <= _FEW else (s for s in steps if _is_straight(s[0], target))
    others = list(_at_once(here, target, keep, shape, mesh))
    arranged = _arranged(here, target, mesh)
    if arranged is not None and arranged != here:
        others.append(Step(PERMUTE, mesh.atoms, here, arranged))
    others += _exchanges(here, target, shape, mesh)
    for step in others:
        yield step, bytes_sent(step, shape, itemsize, mesh)


def _exchanges(here: Sharding, target: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Step]:
    """Tiles, all to all or in rounds: to the target, or to cuts of its parts that are gathered then."""
    more = tuple(a for dim in here.dims for a in dim if not any(a in wanted for wanted in target.dims))
    after = Sharding(target.dims, here.unreduced)
    for cut in (_with(after, {d: (*dim, *more)}) for d, dim in enumerate(after.dims)) if more else (after,):
        if can_be_exchanged(here, cut, shape, mesh):
            yield Step(ALL_TO_ALL, moved(here.dims, cut.dims), here, cut)
        elif can_change(here, cut, shape, mesh):
            yield Step(PERMUTE, mesh.atoms, here, cut)


def _at_once(
    here: Sharding, target: Sharding, keep: frozenset[str], shape: tuple[int, ...], mesh: Mesh
) -> Iterator[Step]:
    """Cuts of a dimension as the target cuts it: parts that do not line up one by one may line up together."""
    for d, (have, wanted) in enumerate(zip(here.dims, target.dims, strict=True)):
        if wanted[: len(have)] == have != wanted:
            step = _cut_further(here, d, wanted[len(have) :], keep, shape, mesh)
            if step is not None:
                yield step


def _cut_further(
    here: Sharding, d: int, atoms: Atoms, keep: frozenset[str], shape: tuple[int, ...], mesh: Mesh
) -> Step | None:
    """A dimension cut over more atoms: sliced if they are free, scattered if they are to be combined."""
    have, partial = here.dims[d], dict(here.unreduced)
    free = set(here.atoms).isdisjoint(atoms)
    monoids = {partial.get(a, "") for a in atoms}
    if not free and not (keep.isdisjoint(atoms) and len(monoids) == 1 and monoids <= _WITH_REDUCE_SCATTER):
        return None
    if not aligned(shape[d], mesh.count(have), mesh.count(atoms)):
        return None
    cut = _with(here, {d: (*have, *atoms)})
    if free:
        return Step(ALL_SLICE, atoms, here, cut, d)
    return Step(REDUCE_SCATTER, atoms, here, _without(cut, atoms), d, monoid=monoids.pop())


def _is_straight(step: Step, target: Sharding) -> bool:
    """Whether a step does what the target asks for, and nothing else."""
    if step.kind in (ALL_SLICE, REDUCE_SCATTER):
        return target.dims[step.dim][: len(step.after.dims[step.dim])] == step.after.dims[step.dim]
    return step.kind != ALL_TO_ALL or not set(step.atoms).isdisjoint(target.dims[step.to])


@tabulated(65536)
def single_steps(
    here: Sharding,
    keep: frozenset[str],
    blocks: tuple[Atoms, ...],
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
) -> tuple[tuple[Step, int], ...]:
    """All steps from here that move whole blocks, and what each device sends in them; but for permutations.

    Args:
        here: where from.
        keep: atoms that stay unreduced.
        blocks: atoms that move together.
        shape, itemsize: of the array.
        mesh: the devices.
    """
    return tuple((s, bytes_sent(s, shape, itemsize, mesh)) for s in steps_from(here, keep, blocks, shape, mesh))


def steps_from(
    here: Sharding, keep: frozenset[str], blocks: tuple[Atoms, ...], shape: tuple[int, ...], mesh: Mesh
) -> list[Step]:
    """The steps of ``single_steps``."""
    found: list[Step] = []
    partial = dict(here.unreduced)
    for d, have in enumerate(here.dims):
        for atoms in blocks:
            if (step := _cut_further(here, d, atoms, keep, shape, mesh)) is not None:
                found.append(step)
        # Atoms that leave this dimension, innermost first: to another dimension, or gathered.
        for atoms in _suffixes(have, blocks):
            rest = have[: len(have) - len(atoms)]
            found.append(Step(ALL_GATHER, atoms, here, _with(here, {d: rest}), d))
            if not aligned(shape[d], mesh.count(rest), mesh.count(atoms)):
                continue
            for e, other in enumerate(here.dims):
                if e != d and aligned(shape[e], mesh.count(other), mesh.count(atoms)):
                    after = _with(here, {d: rest, e: (*other, *atoms)})
                    found.append(Step(ALL_TO_ALL, atoms, here, after, d, e))
    for monoid in sorted(set(partial.values())):
        one_by_one = [b for b in blocks if all(partial.get(a) == monoid and a not in keep for a in b)]
        for k in range(1, len(one_by_one) + 1) if len(blocks) <= _FEW else {1, len(one_by_one)} - {0}:
            for some in itertools.combinations(one_by_one, k):
                atoms = tuple(a for a in mesh.atoms if any(a in b for b in some))
                found.append(Step(ALL_REDUCE, atoms, here, _without(here, atoms), monoid=monoid))
    return found


def _arranged(here: Sharding, target: Sharding, mesh: Mesh) -> Sharding | None:
    """The same cuts, over the target's atoms as far as they go and then over any others."""
    partial = set(dict(here.unreduced))
    spare = [a for a in dict.fromkeys((*here.atoms, *mesh.atoms)) if not any(a in dim for dim in target.dims)]
    dims = []
    for have, wanted in zip(here.dims, target.dims, strict=True):
        atoms: list[str] = []
        for a in (*wanted, *spare):
            if mesh.count(have) % mesh.count((*atoms, a)) == 0:
                atoms.append(a)
        if mesh.count(atoms) != mesh.count(have) or not partial.isdisjoint(atoms):
            return None
        spare = [a for a in spare if a not in atoms]
        dims.append(tuple(atoms))
    return Sharding(tuple(dims), here.unreduced)


@tabulated(4096)
def _blocks(source: Sharding, target: Sharding, mesh: Mesh, stay: bool) -> tuple[Atoms, ...]:
    """Atoms that may move as one: neighbours both in the source and in the target, or alike in not being there.

    Args:
        source, target: from where to where.
        mesh: the devices.
        stay: whether what already is where it belongs stays there.
    """

    def follow(a: str, b: str, sharding: Sharding) -> bool:
        if any((a, b) in itertools.pairwise(dim) for dim in sharding.dims):
            return True
        partial = dict(sharding.unreduced)
        return not any(x in dim for x in (a, b) for dim in sharding.dims) and partial.get(a) == partial.get(b)

    # Those that are in neither may help to combine parts: copies need not all combine the same. To cut over them for
    # any other purpose saves nothing, since it would have to be gathered again.
    combines = source.unreduced != target.unreduced
    atoms = tuple(a for a in mesh.atoms if combines or a in source.atoms or a in target.atoms)
    if len(mesh.atoms) <= _FEW:
        return tuple((a,) for a in atoms)
    blocks: list[list[str]] = []
    for sharding in (source, target, Sharding((atoms,))):
        for dim in sharding.dims:
            for a in dim:
                if any(a in block for block in blocks):
                    continue
                last = blocks[-1][-1] if blocks else ""
                if last and follow(last, a, source) and follow(last, a, target):
                    blocks[-1].append(a)
                else:
                    blocks.append([a])
    if stay and len(blocks) > 1:
        placed = {a for have, wanted in zip(source.dims, target.dims, strict=True) for a in common_prefix(have, wanted)}
        blocks = [block for block in blocks if not placed.issuperset(block)]
    # Few of them may be cut where a part of one is as large as another: the two can change places.
    cut = True
    while cut and len(blocks) < _FEW:
        sizes, cut = {mesh.count(block) for block in blocks}, False
        for i, block in enumerate(blocks):
            at = next((k for k in range(1, len(block)) if {mesh.count(block[:k]), mesh.count(block[k:])} & sizes), None)
            if at is not None:
                blocks[i : i + 1], cut = [block[:at], block[at:]], True
                break
    return tuple(map(tuple, blocks))


def _suffixes(atoms: Atoms, blocks: Sequence[Atoms]) -> Iterator[Atoms]:
    firsts = {block[0] for block in blocks}
    for k, a in enumerate(atoms):
        if a in firsts:
            yield atoms[k:]


def _with(sharding: Sharding, changes: dict[int, Atoms]) -> Sharding:
    return Sharding(tuple([changes.get(i, dim) for i, dim in enumerate(sharding.dims)]), sharding.unreduced)


def _without(sharding: Sharding, atoms: Atoms) -> Sharding:
    return sharding.with_unreduced({a: m for a, m in sharding.unreduced if a not in atoms})
