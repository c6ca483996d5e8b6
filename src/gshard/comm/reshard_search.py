"""Finds the shortest paths of small reshards, whose edges are the steps of ``comm.steps``, by A*.

``comm.reshard`` makes a ``Problem`` of each reshard. The length of a path is the bytes that each device sends and the
price of its messages and copies (``Prices``).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from gshard.comm.exchange import can_change
from gshard.comm.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_SLICE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    Step,
    aligned,
    bytes_sent,
    is_exchange,
    is_of_tiles,
    rounds,
)
from gshard.comm.tiles import can_be_exchanged, moved
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding, common_prefix


class Prices(NamedTuple):
    """What a step costs besides the bytes sent, as shares of the bytes of the array.

    Attributes:
        message: of a message.
        kernel: of a kernel that cuts, copies or turns parts.
        copied: of a byte that such a kernel writes.
    """

    message: float
    kernel: float
    copied: float


_LITTLE = 1e-7
# For few bytes, and for few messages.
BYTES = Prices(_LITTLE, 0.0, 0.0), Prices(16.0, 0.0, 0.0)
# For little time on a machine, also of small arrays, for which all messages and kernels take about the same time.
TIMES = *BYTES, Prices(16.0, 16.0, 0.25)
# Of the array, added to each step, to prefer short chains among chains of equal cost.
_TIE = 1e-12
# Bytes of an element for which bytes of steps are whole numbers.
_FINE = 1 << 20
# Up to three blocks of atoms may move anywhere. More blocks move only directly towards the target.
FEW = 3
_WITH_REDUCE_SCATTER = frozenset({"add", "pick"})


class Dim(NamedTuple):
    """A dimension of a problem: the blocks that split it before and after, and its size.

    Of a dimension that is split evenly, atoms that stay are left out, and the size is as small as divides alike. It is
    split only into equal parts.
    """

    before: Atoms
    after: Atoms
    size: int
    even: bool


class Problem(NamedTuple):
    """What matters of a reshard.

    Attributes:
        blocks: the names of atoms that move together and their numbers of devices.
        movable: the names of those that may move.
        dims: the dimensions that change; then one that does not, if there is one.
        unreduced: the blocks over which the array is unreduced before, and their monoids.
        has_spare: whether the last dimension does not change, so that blocks may move there in between.
    """

    blocks: tuple[tuple[str, int], ...]
    movable: Atoms
    dims: tuple[Dim, ...]
    unreduced: tuple[tuple[str, str], ...]
    has_spare: bool


@tabulated(65536)
def shortest_paths(problem: Problem, every: tuple[Prices, ...]) -> tuple[tuple[Step, ...], ...]:
    """The shortest path of a problem with each of some prices, without duplicates; () if there is no path."""
    search = _Search(problem)
    found: dict[tuple[Step, ...], None] = {}
    for prices in every:
        path = search.path(prices)
        if path is None:
            return ()
        found[path] = None
    return tuple(found)


class _Counts(dict[Atoms, int]):
    """The devices of some blocks, which are looked up very often."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def __missing__(self, blocks: Atoms) -> int:
        self[blocks] = devices = self._mesh.count(blocks)
        return devices


class _Edge(NamedTuple):
    """A step of a search.

    Attributes:
        after: the sharding after it.
        sent: bytes that a device sends, as a share of the array.
        messages: the number of messages.
        kernels: the number of kernels that cut, copy or turn parts.
        copied: the bytes that they write, as a share of the array.
        step: the other fields of the ``Step``: kind and blocks; dimensions and monoid.
    """

    after: Sharding
    sent: float
    messages: int
    kernels: int
    copied: float
    step: tuple[str, Atoms, dict[str, Any]]


class _Search:
    """The shortest paths of a problem, by A*. Steps from a sharding are found once for all prices."""

    def __init__(self, problem: Problem):
        self.mesh = Mesh(problem.blocks, factored=False)
        self.blocks = problem.movable
        self.shape = tuple(dim.size for dim in problem.dims)
        self.even = tuple(dim.even for dim in problem.dims)
        self.source = Sharding(tuple(dim.before for dim in problem.dims)).with_unreduced(dict(problem.unreduced))
        self.target = Sharding(tuple(dim.after for dim in problem.dims))
        self._size = max(1, math.prod(self.shape))
        self._count = _Counts(self.mesh)
        self._share = 1 / math.prod([self._count[blocks] for blocks in self.target.dims])
        self._spare = len(problem.dims) - 1 if problem.has_spare else -1
        self._known: dict[tuple[Sharding, bool], list[_Edge]] = {}
        self._missing: dict[Sharding, float] = {}

    def path(self, prices: Prices) -> tuple[Step, ...] | None:
        """The shortest path; None if no steps lead to the target.

        Blocks move anywhere only if a path whose steps lead directly to the target sends more than the least.
        """
        direct, cost = self._path(prices, anywhere=False)
        if len(self.blocks) > FEW:
            return direct
        least = self._least(self.source)
        if direct is not None and (prices.message > 1 or cost <= (least + prices.message) * (1 + _LITTLE)):
            return direct
        return self._path(prices, anywhere=True)[0]

    def _path(self, prices: Prices, *, anywhere: bool) -> tuple[tuple[Step, ...] | None, float]:
        """The shortest path and its length."""
        source, target = self.source, self.target
        queue: list[tuple[float, int, float, Sharding]] = [(0.0, 0, 0.0, source)]
        best, last, order = {source: 0.0}, dict[Sharding, tuple[Sharding, _Edge]](), itertools.count(1)
        limit, (message, kernel, copied) = math.inf, prices
        while queue:
            _, _, cost, here = heapq.heappop(queue)
            if here == target:
                break
            if cost > best[here]:
                continue
            for edge in self._edges(here, anywhere):
                after, total = edge.after, cost + edge.sent + message * edge.messages + _TIE
                if edge.kernels:
                    total += kernel * edge.kernels + copied * edge.copied
                if total >= limit or total >= best.get(after, math.inf):
                    continue
                least = self._least(after)
                bound = total + least + (message if least else 0.0)
                if bound >= limit:
                    continue
                best[after], last[after] = total, (here, edge)
                if after == target:
                    limit = total
                heapq.heappush(queue, (bound, next(order), total, after))
        if target not in best:
            return None, math.inf
        steps, length = list[Step](), best[target]
        while target != source:
            before, edge = last[target]
            kind, atoms, others = edge.step
            steps.append(Step(kind, atoms, before, target, **others))
            target = before
        return tuple(reversed(steps)), length

    def _least(self, here: Sharding) -> float:
        """A lower bound of the bytes that a device still sends, as a share of the array.

        It receives what it holds in the end and not here. If the array is unreduced, it receives at least one addend of
        each element.
        """
        if (known := self._missing.get(here)) is not None:
            return known
        held, parts, share, count = 1, 1, self._share, self._count
        for have, wanted in zip(here.dims, self.target.dims, strict=True):
            if have != wanted:
                held *= count[have[len(common_prefix(have, wanted)) :]]
            parts *= count[have]
        missing = share - share / held
        if here.unreduced:
            # Each element has one sum for all devices with equal parts, with one message fewer than it has addends.
            addends = count[tuple([a for a, _ in here.unreduced])]
            missing = max(share, (1 - 1 / addends) * addends / self.mesh.size)
        self._missing[here] = missing
        return missing

    def _edges(self, here: Sharding, anywhere: bool) -> list[_Edge]:
        """The steps from a sharding that may lead to the target."""
        if (here, anywhere) not in self._known:
            single = self._single(here, anywhere)
            self._known[here, anywhere] = [*single, *map(self._priced, self._several(here))]
        return self._known[here, anywhere]

    def _priced(self, step: Step) -> _Edge:
        sent = bytes_sent(step, self.shape, _FINE, self.mesh) / (self._size * _FINE)
        others = {"dim": step.dim, "to": step.to, "monoid": step.monoid}
        messages, kernels = rounds(step, self.mesh), 0
        if is_exchange(step, self.mesh):
            kernels = 2 * messages  # each tile is cut out, and copied into place
        elif is_of_tiles(step):
            kernels = 2
        elif step.kind == ALL_GATHER or step.monoid in ("max", "min"):  # unequal parts; floats as integers
            kernels = 1
        part = math.prod(step.after.local_shape(self.mesh, self.shape)) / self._size
        copied = part if step.kind == PERMUTE else kernels * part
        return _Edge(step.after, sent, messages, kernels, copied if kernels else 0.0, (step.kind, step.atoms, others))

    def _several(self, here: Sharding) -> Iterator[Step]:
        """The steps that move several blocks."""
        for d, (have, wanted) in enumerate(zip(here.dims, self.target.dims, strict=True)):
            # Several blocks at once may be aligned where single ones are not.
            for k in range(len(have) + 2, len(wanted) + 1) if wanted[: len(have)] == have else ():
                if (edge := self._cut_further(here, d, wanted[len(have) : k], 0.0)) is not None:
                    kind, atoms, others = edge.step
                    yield Step(kind, atoms, here, edge.after, **others)
        arranged = self._arranged(here)
        if arranged is not None and arranged != here:
            yield Step(PERMUTE, self.mesh.atoms, here, arranged)
        yield from self._exchanges(here)

    def _single(self, here: Sharding, anywhere: bool) -> Iterator[_Edge]:
        """The steps that move whole blocks, except permutes: all, or those that lead directly to the target."""
        count, blocks, dims, wanted_dims = self._count, self.blocks, here.dims, self.target.dims
        anywhere_to = anywhere and self._spare < 0
        part = 1.0  # the largest part of a device, of the array
        for n, have in zip(self.shape, dims, strict=True):
            part *= -(-n // count[have]) / n if n else 1.0
        for d, have in enumerate(dims):
            for block in blocks:
                if anywhere or (*have, block) == wanted_dims[d][: len(have) + 1]:
                    if (edge := self._cut_further(here, d, (block,), part)) is not None:
                        yield edge
            # Innermost atoms leave this dimension: they move to another dimension, or the dimension is gathered.
            for k in [k for k, a in enumerate(have) if a in blocks]:
                rest, atoms = have[:k], have[k:]
                devices, fits, after = count[atoms], self._fits(d, rest, atoms), _with(here, d, rest)
                if fits:
                    yield _Edge(after, part * (devices - 1), 1, 0, 0.0, (ALL_GATHER, atoms, {"dim": d}))
                else:
                    yield self._priced(Step(ALL_GATHER, atoms, here, after, d))
                    continue
                for e, other in enumerate(dims):
                    if e == d or not (e == self._spare or anywhere_to or any(a in wanted_dims[e] for a in atoms)):
                        continue
                    if self._fits(e, other, atoms):
                        sent = part * self._padding(e, other, devices) * (devices - 1) / devices
                        moved_there = _with(after, e, (*other, *atoms))
                        yield _Edge(moved_there, sent, 1, 1, part, (ALL_TO_ALL, atoms, {"dim": d, "to": e}))
        partial = dict(here.unreduced)
        for monoid in sorted(set(partial.values())):
            reducible = [a for a in blocks if partial.get(a) == monoid]
            for k in range(1, len(reducible) + 1) if len(blocks) <= FEW else {1, len(reducible)} - {0}:
                for atoms in itertools.combinations(reducible, k):
                    yield self._priced(Step(ALL_REDUCE, atoms, here, _without(here, atoms), monoid=monoid))

    def _fits(self, d: int, have: Atoms, more: Atoms) -> bool:
        """Whether parts of a dimension can be split over more blocks."""
        parts, group = self._count[have], self._count[more]
        return self.shape[d] % (parts * group) == 0 if self.even[d] else aligned(self.shape[d], parts, group)

    def _padding(self, d: int, have: Atoms, devices: int) -> float:
        """How many times as large parts are that are cut for so many devices, padding included."""
        n, parts = self.shape[d], self._count[have]
        return devices * -(-n // (parts * devices)) / -(-n // parts) if n else 1.0

    def _cut_further(self, here: Sharding, d: int, atoms: Atoms, part: float) -> _Edge | None:
        """Splits a dimension further: a slice over free blocks, a reduce-scatter over unreduced ones; or None."""
        have = here.dims[d]
        if any(a in dim for dim in here.dims for a in atoms) or not self._fits(d, have, atoms):
            return None
        cut = _with(here, d, (*have, *atoms))
        partial = dict(here.unreduced)
        monoids = {partial.get(a, "") for a in atoms}
        if monoids == {""}:
            return _Edge(cut, 0.0, 0, 1, part / self._count[atoms], (ALL_SLICE, atoms, {"dim": d}))
        if len(monoids) > 1 or not monoids <= _WITH_REDUCE_SCATTER:
            return None
        devices = self._count[atoms]
        sent = part * self._padding(d, have, devices) * (devices - 1) / devices
        others = {"dim": d, "monoid": partial[atoms[0]]}
        return _Edge(_without(cut, atoms), sent, 1, 0, 0.0, (REDUCE_SCATTER, atoms, others))

    def _exchanges(self, here: Sharding) -> Iterator[Step]:
        """All-to-alls of tiles and exchanges, to the target or to a sharding that a gather converts to the target."""
        more = tuple(a for dim in here.dims for a in dim if not any(a in wanted for wanted in self.target.dims))
        after = Sharding(self.target.dims, here.unreduced)
        for cut in (_with(after, d, (*dim, *more)) for d, dim in enumerate(after.dims)) if more else (after,):
            if can_be_exchanged(here, cut, self.shape, self.mesh):
                yield Step(ALL_TO_ALL, moved(here.dims, cut.dims), here, cut)
            elif can_change(here, cut, self.shape, self.mesh):
                yield Step(PERMUTE, self.mesh.atoms, here, cut)

    def _arranged(self, here: Sharding) -> Sharding | None:
        """The same numbers of parts over the blocks of the target where possible, else over others; or None."""
        count, partial = self._count, {a for a, _ in here.unreduced}
        atoms_of_both = dict.fromkeys((*here.atoms, *self.mesh.atoms))
        spare = [a for a in atoms_of_both if not any(a in dim for dim in self.target.dims)]
        dims = []
        for have, wanted in zip(here.dims, self.target.dims, strict=True):
            atoms: Atoms = ()
            for a in (*wanted, *spare) if have else ():
                if count[have] % count[(*atoms, a)] == 0:
                    atoms = (*atoms, a)
            if count[atoms] != count[have] or not partial.isdisjoint(atoms):
                return None
            spare = [a for a in spare if a not in atoms]
            dims.append(atoms)
        return Sharding(tuple(dims), here.unreduced)


def _with(sharding: Sharding, d: int, atoms: Atoms) -> Sharding:
    return Sharding((*sharding.dims[:d], atoms, *sharding.dims[d + 1 :]), sharding.unreduced)


def _without(sharding: Sharding, atoms: Atoms) -> Sharding:
    return sharding.with_unreduced({a: m for a, m in sharding.unreduced if a not in atoms})
