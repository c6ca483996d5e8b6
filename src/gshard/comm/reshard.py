"""Plans the cheapest sequence of collectives that moves an array from one sharding to another.

Few things of a reshard matter: atoms that leave dimensions, the dimensions that they go to, and what divides evenly.
So a reshard becomes a small ``Problem``, which many reshards share: dimensions that do not change and atoms that stay
are left out, atoms that move together are one block, and dimensions stand in a fixed order. A* finds the shortest path
over the shardings of the problem. Its edges are the steps of ``comm.steps``. Their lengths are bytes sent and messages:
``ways`` are the sequences that are cheapest for some price of a message, and ``plan_reshard`` takes the cheapest of
them for an array, by ``step_bytes`` or by the seconds of the steps on a machine (``Mesh.times``). The planner prices
reshards by the same function, so the price of a reshard is the price of what is emitted. No step gathers several
dimensions at once.

    >>> mesh = Mesh.abstract(x=2, y=4)
    >>> a, b = Sharding((("y.0", "y.1"), (), ("x",))), Sharding(((), ("x", "y.0", "y.1"), ()))
    >>> [step.kind for step in plan_reshard(a, b, (8, 8, 8), 4, mesh)]
    ['all_to_all']
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gshard.comm.reshard_search import BYTES, FEW, TIMES, Dim, Problem, shortest_paths
from gshard.comm.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    LOCAL,
    PERMUTE,
    REDUCE_SCATTER,
    TO_PARTIAL,
    Step,
    bytes_sent,
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
# A step that sends nothing. It breaks ties in favour of fewer steps.
_SILENT = 1e-2


def plan_reshard(
    source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh
) -> tuple[Step, ...]:
    """The cheapest steps from ``source`` to ``target``.

    Args:
        source: the sharding before. It may be unreduced over atoms that split the target, or that the target lacks.
        target: the sharding after.
        shape: the global shape of the array.
        itemsize: the bytes of one element.
        mesh: the mesh; with ``times``, steps cost seconds.
    """
    found = ways(source, target, shape, mesh)
    if len(found) == 1:
        return found[0]
    if mesh.times is None:
        return min(found, key=lambda way: sum(step_bytes(step, shape, itemsize, mesh) for step in way))
    return min(found, key=lambda way: sum(mesh.times.seconds(step, shape, itemsize, mesh) for step in way))


def step_bytes(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
    """The cost of a step without a machine: bytes that each device sends, with messages as bytes."""
    if step.kind in LOCAL:
        return _SILENT
    return bytes_sent(step, shape, itemsize, mesh) + MESSAGE * rounds(step, mesh)


def reshard_bytes(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that each device sends in the reshard from ``source`` to ``target``."""
    return sum(bytes_sent(s, shape, itemsize, mesh) for s in plan_reshard(source, target, shape, itemsize, mesh))


@tabulated(65536)
def ways(source: Sharding, target: Sharding, shape: tuple[int, ...], mesh: Mesh) -> tuple[tuple[Step, ...], ...]:
    """The sequences of steps from ``source`` to ``target`` that are cheapest for some prices of messages and copies."""
    if source == target:
        return ((),)
    before, after = dict(source.unreduced), dict(target.unreduced)
    made = {a: monoid for a, monoid in after.items() if before.get(a) != monoid}
    reduced = target.with_unreduced({a: m for a, m in after.items() if a not in made})
    last: list[Step] = []
    here = reduced
    for monoid in sorted(set(made.values())):
        atoms = tuple(a for a in mesh.atoms if made.get(a) == monoid)
        unreduced = here.with_unreduced({**dict(here.unreduced), **dict.fromkeys(atoms, monoid)})
        last.append(Step(TO_PARTIAL, atoms, here, unreduced, monoid=monoid))
        here = unreduced
    if source == reduced:
        return (tuple(last),)
    found: list[tuple[Step, ...]] = []
    prices = BYTES if mesh.times is None else TIMES
    for stays in (True, False):
        problem, place = _problem(source, reduced, shape, mesh, stays)
        found += [(*_outer_first(place.steps(path), mesh), *last) for path in shortest_paths(problem, prices)]
        # Atoms at their final place need not move, unless a part is too small, or uneven parts do not line up there, so
        # that atoms of the target are gathered and cut again.
        gathered = {a for way in found for step in way if step.kind == ALL_GATHER for a in step.atoms}
        if found and (all(dim.even for dim in problem.dims) or gathered.isdisjoint(reduced.atoms)):
            break
    if found:
        return tuple(found)
    raise AssertionError(f"no steps lead from {source} to {target}")


class _Place(NamedTuple):
    """Where a problem is in a reshard: translates its steps.

    Attributes:
        atoms_of: the atoms of each block.
        monoids: the monoid of each block over which the array is unreduced before.
        dims: the dimension of the array for each dimension of the problem, and the atoms that stay there.
        outside: the sharding of the array without the blocks of the problem.
        mesh: the mesh.
    """

    atoms_of: dict[str, Atoms]
    monoids: dict[str, str]
    dims: tuple[tuple[int, Atoms], ...]
    outside: Sharding
    mesh: Mesh

    def steps(self, path: Sequence[Step]) -> list[Step]:
        """The steps of a path of the problem as steps of the array."""
        found: list[Step] = []
        for step in path:
            dim, to = (self.dims[d][0] if d >= 0 else -1 for d in (step.dim, step.to))
            atoms = self.mesh.atoms if step.kind == PERMUTE else self._atoms(step.atoms)
            if step.kind == ALL_REDUCE:
                atoms = tuple(a for a in self.mesh.atoms if a in atoms)
            before = found[-1].after if found else self._sharding(step.before)
            monoid = self.monoids.get(step.atoms[0], step.monoid)
            found.append(Step(step.kind, atoms, before, self._sharding(step.after), dim, to, monoid))
        return found

    def _atoms(self, blocks: Atoms) -> Atoms:
        return tuple([a for block in blocks for a in self.atoms_of[block]])

    def _sharding(self, sharding: Sharding) -> Sharding:
        dims = list(self.outside.dims)
        for (d, staying), blocks in zip(self.dims, sharding.dims, strict=True):
            dims[d] = (*staying, *self._atoms(blocks))
        unreduced = {a: self.monoids[block] for block, _ in sharding.unreduced for a in self.atoms_of[block]}
        return Sharding(tuple(dims)).with_unreduced({**dict(self.outside.unreduced), **unreduced})


class _Changed(NamedTuple):
    """A dimension of a reshard: as ``Dim``, but with blocks of atoms, its index and the atoms that stay."""

    before: tuple[Atoms, ...]
    after: tuple[Atoms, ...]
    size: int
    even: bool
    dim: int
    staying: Atoms


def _problem(
    source: Sharding, target: Sharding, shape: tuple[int, ...], mesh: Mesh, stays: bool
) -> tuple[Problem, _Place]:
    """The problem of a reshard, and its place. Reshards that differ in names and orders only have one problem.

    Args:
        source, target: the shardings. The target is unreduced only over atoms over which the source is.
        shape: the global shape.
        mesh: the mesh.
        stays: whether atoms at their final place stay there.
    """
    count = mesh.count
    moving = _moving(source, target, mesh, stays)
    parts = math.prod(map(count, moving))
    both = [*enumerate(zip(shape, source.dims, target.dims, strict=True))]
    changing = [(d, pair) for d, pair in both if pair[1] != pair[2] or not stays]
    spare = next((
        d for d, (n, have, wanted) in both
        if stays and have == wanted and n and n % count(have) == 0 == n // count(have) % mesh.size
    ), None)  # fmt: skip
    block_of = {block[0]: block for block in moving}

    def blocks(atoms: Atoms) -> tuple[Atoms, ...]:
        found, i = list[Atoms](), 0
        while i < len(atoms):
            found.append(block_of.get(atoms[i], atoms[i : i + 1]))
            i += len(found[-1])
        return tuple(found)

    rows = []
    for d, (n, have, wanted) in changing:
        even = n > 0 and (n % count(have) == 0 == n % count(wanted) if stays else n % parts == 0)
        staying = common_prefix(have, wanted) if even and stays else ()
        have, wanted = have[len(staying) :], wanted[len(staying) :]
        if even:
            # If another dimension has room for blocks in between, this one has only room for its own.
            room = math.gcd(n // count(staying), parts)
            n = room if spare is None else math.lcm(count(have), count(wanted))
        rows.append(_Changed(blocks(have), blocks(wanted), n, even, d, staying))
    partial = {a: monoid for a, monoid in source.unreduced if (a, monoid) not in target.unreduced}
    places: dict[Atoms, list[Any]] = {block: [count(block), partial.get(block[0], "")] for block in moving}
    for row in rows:
        looks = [*map(count, row.before)], [*map(count, row.after)], row.size, row.even
        for side in (row.before, row.after):
            for i, block in enumerate(side):
                places.setdefault(block, [count(block), ""]).append((*looks, side is row.after, i))
    names = {block: chr(ord("a") + i) for i, block in enumerate(sorted(places, key=places.__getitem__))}
    named = [
        (Dim(tuple([names[b] for b in row.before]), tuple([names[b] for b in row.after]), row.size, row.even), row)
        for row in rows
    ]
    named.sort(key=lambda pair: pair[0])
    dims = [(row.dim, row.staying) for _, row in named]
    inside = {d for d, _ in dims}
    problem_dims = [dim for dim, _ in named]
    if spare is not None:
        problem_dims.append(Dim((), (), parts, True))
        dims.append((spare, source.dims[spare]))
    outside = tuple([() if d in inside else have for d, have in enumerate(source.dims)])
    unreduced = {names[block]: partial[block[0]] for block in moving if block[0] in partial}
    monoids = {*unreduced.values()}
    # Sums of floats and of bits take the same steps.
    alike = {monoid: "add" if monoids == {"pick"} else monoid for monoid in monoids}
    problem = Problem(
        tuple((name, count(block)) for block, name in names.items()),
        tuple(sorted(names[block] for block in moving)),
        tuple(problem_dims),
        tuple(sorted((name, alike[monoid]) for name, monoid in unreduced.items())),
        spare is not None,
    )
    atoms_of = {name: block for block, name in names.items()}
    return problem, _Place(atoms_of, unreduced, tuple(dims), Sharding(outside, target.unreduced), mesh)


def _outer_first(steps: Sequence[Step], mesh: Mesh) -> list[Step]:
    """The steps with gathers in a row over the outer axes first, and reduce-scatters over these last.

    Devices are farther apart along the outer axes of a mesh, and so less is sent there. The bytes are the same in all.
    """
    found: list[Step] = []
    for kind, run in itertools.groupby(steps, key=lambda step: step.kind):
        in_a_row = list(run)
        if kind in (ALL_GATHER, REDUCE_SCATTER) and len({step.dim for step in in_a_row}) == len(in_a_row) > 1:
            here = in_a_row[0].before
            in_a_row.sort(key=lambda step: min(map(mesh.atoms.index, step.atoms)), reverse=kind != ALL_GATHER)
            for step in in_a_row:
                dims = (*here.dims[: step.dim], step.after.dims[step.dim], *here.dims[step.dim + 1 :])
                gone = step.atoms if kind == REDUCE_SCATTER else ()
                after = Sharding(dims).with_unreduced({a: m for a, m in here.unreduced if a not in gone})
                found.append(dataclasses.replace(step, before=here, after=after))
                here = after
        else:
            found += in_a_row
    return found


@tabulated(4096)
def _moving(source: Sharding, target: Sharding, mesh: Mesh, stays: bool) -> tuple[Atoms, ...]:
    """The atoms that may move, in blocks: adjacent both in the source and in the target, or equally absent.

    Args:
        source, target: the shardings.
        mesh: the mesh.
        stays: whether atoms at their final place stay there.
    """
    placed = {a for a, _ in target.unreduced}
    if stays:
        placed |= {
            a for have, wanted in zip(source.dims, target.dims, strict=True) for a in common_prefix(have, wanted)
        }
    # Atoms in neither sharding may help to reduce parts: each copy can reduce a part of the array. For other purposes
    # they are useless, because the array would have to be gathered again.
    named = {*source.atoms, *target.atoms}
    every = source.unreduced != target.unreduced
    atoms = tuple(a for a in mesh.atoms if a not in placed and (every or a in named))
    # For each sharding, what an atom follows: the atom before it in its dimension; or else the monoid.
    before: list[dict[str, tuple[str, str]]] = []
    for sharding in (source, target):
        monoids = dict(sharding.unreduced)
        follows = {a: ("", monoids.get(a, "")) for a in atoms}
        for dim in sharding.dims:
            follows |= {a: ("atom", last) for last, a in zip(("", *dim), dim, strict=False)}
        before.append(follows)

    def is_next(a: str, last: str) -> bool:
        return all(
            own[a] == ("atom", last) or (own[a][0] == "" == own[last][0] and own[a] == own[last]) for own in before
        )

    blocks: list[Atoms] = []
    known: set[str] = set()
    for dim in (*source.dims, *target.dims, atoms):
        for a in dim:
            if a in known or a not in before[0] or a in placed:
                continue
            known.add(a)
            if blocks and is_next(a, blocks[-1][-1]):
                blocks[-1] += (a,)
            else:
                blocks.append((a,))
    # Where a block replaces another, divide the larger one: a part of the size of the smaller one can change places.
    for have, wanted in zip(source.dims, target.dims, strict=True):
        leaving, entering = ([b for b in blocks if b[0] in dim] for dim in (have, wanted))
        for one, other in itertools.product(leaving, entering):
            small, large = sorted((one, other), key=mesh.count)
            cuts = [
                k for k in range(1, len(large)) if mesh.count(small) in (mesh.count(large[:k]), mesh.count(large[k:]))
            ]
            if cuts and large in blocks and len(blocks) < FEW:
                i, k = blocks.index(large), cuts[0]
                blocks[i : i + 1] = [large[:k], large[k:]]
    return tuple(blocks)
