"""Plans the cheapest sequence of collectives that moves an array from one sharding to another.

The plan is a shortest path over shardings (A*). Edges are ``comm.steps``; their length is the bytes sent plus
``MESSAGE`` for each message, or seconds (``Mesh.times``). Atoms that move together are one block.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

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
    can_be_exchanged,
    can_change,
    moved,
    rounds,
)
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding, common_prefix

# The cost of a message in bytes, in addition to its content; also used by ``planning.objective``. During the latency of
# a hop a TPU sends 1e5 bytes and a GPU 1e6. But a plan without a machine should equal the plan of the same program at
# full size, where the latency of messages is a thousandth of the time. With 1 KiB, 8 of the 235 programs of
# ``benchmarks/against_xla_programs.py`` send more, and 4 take longer on ``h100:1x8``; with 4 KiB a pipeline holds 12 %
# more. The plans at full size are equal for all these values.
MESSAGE = 256
# Among chains that send equally many bytes, the search prefers the one that sends fewer over the outer axes of the
# mesh, along which devices are farther apart (nodes, slices). Such a chain gathers along these axes first, while parts
# are small.
_OUTER = 1e-9
# Seconds added to each step, to prefer short chains among chains of equal time.
_TIE = 1e-12
# Two or three blocks of atoms may move anywhere. More blocks, a single one, and parts of blocks, into which a permute
# may divide them, move only directly towards the target.
_FEW = 3
_WITH_REDUCE_SCATTER = frozenset({"add", "pick"})


def plan_reshard(
    source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh
) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target``.

    If the target is unreduced and the source is not, the last steps convert the value locally: one device keeps it, and
    the others hold the identity of the monoid.
    """
    if source == target:
        return ()
    size = math.prod(shape)
    if mesh.times is None and size and all(n % mesh.size == 0 for n in shape):
        # All splits are even, so the plan depends only on the order of magnitude of the size. Equal plans are shared.
        shape, size = (mesh.size,) * len(shape), size * itemsize // mesh.size ** len(shape)
        itemsize = 1 << (size - 1).bit_length()
    return _planned(source, target, shape, itemsize, mesh)


@tabulated(65536)
def _planned(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> tuple[Step, ...]:
    if new := dict(set(target.unreduced) - set(source.unreduced)):
        reduced = target.with_unreduced({a: m for a, m in target.unreduced if a not in new})
        chain = list(plan_reshard(source, reduced, shape, itemsize, mesh))
        here = reduced
        for monoid in sorted(set(new.values())):
            atoms = tuple(a for a in mesh.atoms if new.get(a) == monoid)
            after = here.with_unreduced({**dict(here.unreduced), **dict.fromkeys(atoms, monoid)})
            chain.append(Step(TO_PARTIAL, atoms, here, after, monoid=monoid))
            here = after
        return tuple(chain)
    # Atoms at their final place need not move, unless a part is too small to be split there.
    last_step = _search(source, target, _blocks(source, target, mesh, True), shape, itemsize, mesh)
    if target not in last_step:
        last_step = _search(source, target, _blocks(source, target, mesh, False), shape, itemsize, mesh)
    steps: list[Step] = []
    current = target
    while current != source:
        steps.append(last_step[current])
        current = last_step[current].before
    return tuple(reversed(steps))


def _search(
    source: Sharding, target: Sharding, blocks: tuple[Atoms, ...], shape: tuple[int, ...], itemsize: int, mesh: Mesh
) -> dict[Sharding, Step]:
    """The last step of the cheapest chain to each sharding that the search visits; includes the target if reached."""
    whole = itemsize * math.prod(shape)
    share = whole // _parts(target, mesh)
    queue: list[tuple[float, int, float, Sharding]] = [(0, 0, 0, source)]
    best: dict[Sharding, float] = {source: 0}
    last_step: dict[Sharding, Step] = {}
    least_of: dict[int, float] = {}
    order = itertools.count(1)

    def least(after: Sharding) -> float:
        """A lower bound of the remaining cost: a device must receive what it holds in the end and not here."""
        held = -(-whole // _parts(after, mesh))
        if mesh.times is None:
            return share - held + MESSAGE + 1 if share > held else int(after != target)
        if after == target:
            return 0.0
        if held not in least_of:
            least_of[held] = mesh.times.least(held, share)
        return least_of[held]

    while queue:
        _, _, cost, here = heapq.heappop(queue)
        if here == target:
            break
        if cost > best[here]:
            continue
        for step, sent in _moves(here, target, blocks, shape, itemsize, mesh):
            if best.get(step.after, cost + 1) <= cost:
                continue  # no step has a negative cost
            remaining = least(step.after)
            if cost + remaining > best.get(target, math.inf):
                continue  # so it is not necessary to price the step
            if mesh.times is None:
                total = cost + sent * (1 + _OUTER * _outermost(step, mesh)) + MESSAGE * rounds(step, mesh) + 1
            else:
                total = cost + _seconds(step, shape, itemsize, mesh) + _TIE
            if total < best.get(step.after, total + 1) and total < best.get(target, total + 1):
                best[step.after] = total
                last_step[step.after] = step
                heapq.heappush(queue, (total + remaining, next(order), total, step.after))
    return last_step


@tabulated(65536)
def _seconds(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
    """The seconds of a step on a machine. Memoised, because many searches use the same step."""
    assert mesh.times is not None
    return mesh.times.seconds(step, shape, itemsize, mesh)


def _outermost(step: Step, mesh: Mesh) -> float:
    """1 for a step over the outermost atom of the mesh, less for a step over inner atoms only."""
    return 1 - min(map(mesh.atoms.index, step.atoms), default=0) / len(mesh.atoms)


def _parts(sharding: Sharding, mesh: Mesh) -> int:
    return math.prod(mesh.count(atoms) for atoms in sharding.dims)


def reshard_bytes(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that each device sends in the reshard from ``source`` to ``target``."""
    return sum(bytes_sent(s, shape, itemsize, mesh) for s in plan_reshard(source, target, shape, itemsize, mesh))


def _moves(
    here: Sharding, target: Sharding, blocks: tuple[Atoms, ...], shape: tuple[int, ...], itemsize: int, mesh: Mesh
) -> Iterator[tuple[Step, int]]:
    """The steps from a sharding that may lead to the target, each with the bytes that each device sends."""
    keep = frozenset(a for a, _ in target.unreduced)
    steps = single_steps(here, keep, blocks, shape, itemsize, mesh)
    anywhere = 1 < len(blocks) <= _FEW and not _divides(here, blocks)
    yield from steps if anywhere else (s for s in steps if _is_straight(s[0], target))
    others = list(_at_once(here, target, keep, shape, mesh))
    arranged = _arranged(here, target, mesh)
    if arranged is not None and arranged != here:
        others.append(Step(PERMUTE, mesh.atoms, here, arranged))
    others += _exchanges(here, target, shape, mesh)
    for step in others:
        yield step, bytes_sent(step, shape, itemsize, mesh)


def _exchanges(here: Sharding, target: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Step]:
    """All-to-alls of tiles and exchanges, to the target or to a sharding that a gather converts to the target."""
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
    """Splits of a dimension over several atoms of the target at once, which may be aligned if single ones are not."""
    for d, (have, wanted) in enumerate(zip(here.dims, target.dims, strict=True)):
        for end in range(len(have) + 1, len(wanted) + 1) if wanted[: len(have)] == have else ():
            step = _cut_further(here, d, wanted[len(have) : end], keep, shape, mesh)
            if step is not None:
                yield step


def _cut_further(
    here: Sharding, d: int, atoms: Atoms, keep: frozenset[str], shape: tuple[int, ...], mesh: Mesh
) -> Step | None:
    """Splits a dimension over more atoms: a slice over free atoms, a reduce-scatter over unreduced ones, else None."""
    have, partial = here.dims[d], dict(here.unreduced)
    free = partial.keys().isdisjoint(atoms) and not any(a in dim for dim in here.dims for a in atoms)
    if not free:
        monoids = {partial.get(a, "") for a in atoms}
        if not (keep.isdisjoint(atoms) and len(monoids) == 1 and monoids <= _WITH_REDUCE_SCATTER):
            return None
    if not aligned(shape[d], mesh.count(have), mesh.count(atoms)):
        return None
    cut = _with(here, {d: (*have, *atoms)})
    if free:
        return Step(ALL_SLICE, atoms, here, cut, d)
    return Step(REDUCE_SCATTER, atoms, here, _without(cut, atoms), d, monoid=partial[atoms[0]])


def _divides(sharding: Sharding, blocks: tuple[Atoms, ...]) -> bool:
    """Whether a dimension of a sharding is split over some atoms of a block, but not over all of them in a row."""
    for block in blocks:
        for dim in sharding.dims if len(block) > 1 else ():
            if not set(block).isdisjoint(dim):
                start = dim.index(block[0]) if block[0] in dim else 0
                if dim[start : start + len(block)] != block:
                    return True
    return False


def _is_straight(step: Step, target: Sharding) -> bool:
    """Whether a step leads directly towards the target."""
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
    """All steps from a sharding that move whole blocks, except permutes, each with the bytes that each device sends."""
    return tuple((s, bytes_sent(s, shape, itemsize, mesh)) for s in steps_from(here, keep, blocks, shape, mesh))


def steps_from(
    here: Sharding, keep: frozenset[str], blocks: tuple[Atoms, ...], shape: tuple[int, ...], mesh: Mesh
) -> list[Step]:
    """The steps of ``single_steps``, without bytes."""
    steps: list[Step] = []
    partial = dict(here.unreduced)
    for d, have in enumerate(here.dims):
        for atoms in blocks:
            if (step := _cut_further(here, d, atoms, keep, shape, mesh)) is not None:
                steps.append(step)
        # Innermost atoms leave this dimension: they move to another dimension, or the dimension is gathered.
        for atoms in _suffixes(have, blocks):
            rest = have[: len(have) - len(atoms)]
            steps.append(Step(ALL_GATHER, atoms, here, _with(here, {d: rest}), d))
            if not aligned(shape[d], mesh.count(rest), mesh.count(atoms)):
                continue
            for e, other in enumerate(here.dims):
                if e != d and aligned(shape[e], mesh.count(other), mesh.count(atoms)):
                    after = _with(here, {d: rest, e: (*other, *atoms)})
                    steps.append(Step(ALL_TO_ALL, atoms, here, after, d, e))
    for monoid in sorted(set(partial.values())):
        reducible = [b for b in blocks if all(partial.get(a) == monoid and a not in keep for a in b)]
        for k in range(1, len(reducible) + 1) if len(blocks) <= _FEW else {1, len(reducible)} - {0}:
            for subset in itertools.combinations(reducible, k):
                atoms = tuple(a for a in mesh.atoms if any(a in b for b in subset))
                steps.append(Step(ALL_REDUCE, atoms, here, _without(here, atoms), monoid=monoid))
    return steps


def _arranged(here: Sharding, target: Sharding, mesh: Mesh) -> Sharding | None:
    """The same numbers of parts over the atoms of the target where possible, else over others; None if impossible."""
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
    """Atoms that may move together: adjacent both in the source and in the target, or equally absent."""

    def follow(a: str, b: str, sharding: Sharding) -> bool:
        if any((a, b) in itertools.pairwise(dim) for dim in sharding.dims):
            return True
        partial = dict(sharding.unreduced)
        return not any(x in dim for x in (a, b) for dim in sharding.dims) and partial.get(a) == partial.get(b)

    # Atoms in neither sharding may help to reduce parts: each copy can reduce a part of the array. For other purposes
    # they are useless, because the array would have to be gathered again.
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
    # Divide few blocks such that a part of one has the size of another: the two can be exchanged.
    was_divided = True
    while was_divided and len(blocks) < _FEW:
        was_divided = False
        sizes = {mesh.count(block) for block in blocks}
        for i, block in enumerate(blocks):
            positions = range(1, len(block))
            k = next((k for k in positions if {mesh.count(block[:k]), mesh.count(block[k:])} & sizes), None)
            if k is not None:
                blocks[i : i + 1] = [block[:k], block[k:]]
                was_divided = True
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
