"""Finds the cheapest steps from one sharding of an array to another, and their cost.

The planner, which prices reshards, and the partitioner, which emits them, read the same graph: its places are
shardings, its edges are ``comm.steps``, and a reshard is a shortest path. The length of an edge is its seconds
(``Mesh.times``), or else the bytes that it sends, with messages counted as bytes (``step_cost``).

Steps move whole axes, or the parts of an axis that some sharding uses (``axes_of``). They depend on the shape of an
array through divisibility only: gshard finds them once for each rank, and numpy leaves out those whose parts do not
line up. Steps with equal numbers are priced once.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gshard.comm.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_SLICE,
    ALL_TO_ALL,
    LOCAL,
    PERMUTE,
    REDUCE_SCATTER,
    TO_PARTIAL,
    Step,
    bytes_sent,
    is_of_tiles,
    laid_out,
    moved,
)
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding, common_prefix
from gshard.core.time_budget import check_deadline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Prices one step.

# The cost of a message in bytes, in addition to its content; also used by ``planning.objective``. During the latency of
# a hop a TPU sends 1e5 bytes and a GPU 1e6. But a plan without a machine should equal the plan of the same program at
# full size, where the latency of messages is a thousandth of the time. With 1 KiB, 8 of the 235 programs of
# ``benchmarks/against_xla_programs.py`` send more, and 4 take longer on ``h100:1x8``; with 4 KiB a pipeline holds 12 %
# more. The plans at full size are equal for all these values.
MESSAGE = 256
# A step that sends nothing, in bytes. It breaks ties in favour of fewer steps; so do the seconds added to each step.
_SILENT, _TIE = 1e-2, 1e-12
# Of paths that send equally many bytes and messages, the one that sends fewer over the outer axes of the mesh is
# cheaper. Along these, devices are farther apart (nodes, slices). It gathers along them first, while parts are small.
_OUTER = 1e-8
# A byte that a device copies to join or cut shards that are not one run of bytes. It weighs less than the order of
# axes, so that the gathers of several arrays have one order, in which they are combined.
_COPIED = 1e-9


def step_cost(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh, whole: Mesh, atoms: Atoms) -> float:
    """The cost of a step over axes ``mesh``, whose atoms are ``atoms`` of the mesh ``whole``."""
    if whole.times is not None:
        return float(whole.times.seconds(step, shape, itemsize, mesh, among=(whole, atoms))) + _TIE
    if step.kind in LOCAL:
        return _SILENT
    outermost = 1 - min(map(whole.atoms.index, atoms), default=0) / len(whole.atoms)
    sent = bytes_sent(step, shape, itemsize, mesh) * (1 + _OUTER * outermost)
    copied = sum(laid_out(step, shape, mesh)) * itemsize
    return sent + MESSAGE + _COPIED * copied


# Determines the axes that move as wholes.

# Up to so many axes, everything is compared: all orders of the axes, and any of them in any dimension.
FEW = 3


def parts_of(mesh: Mesh, axes: Sequence[Atoms]) -> list[tuple[Atoms, ...]]:
    """For each axis of the mesh that has several devices, the axes that are parts of it."""
    axis_of = {a: axis for axis, atoms in mesh.atoms_of.items() for a in atoms}
    return [tuple(parts) for _, parts in itertools.groupby(axes, lambda part: axis_of[part[0]])]


def has_many(mesh: Mesh, axes: Sequence[Atoms]) -> bool:
    """Whether there are too many axes to compare all choices."""
    return len(parts_of(mesh, axes)) > FEW


def axes_of(mesh: Mesh, shardings: Iterable[Sharding] = ()) -> tuple[Atoms, ...]:
    """The axes that move as wholes: those of the mesh, divided where one of these shardings uses a part of an axis.

    Axes stand in the mesh's order, or in the order in which most shardings split a dimension over them.

    >>> mesh = Mesh.abstract(data=8, model=3)
    >>> axes_of(mesh)
    (('data.0', 'data.1', 'data.2'), ('model',))
    >>> axes_of(mesh, [Sharding((("data.0", "data.1"),))])
    (('data.0', 'data.1'), ('data.2',), ('model',))
    >>> axes_of(mesh, [Sharding((("model", "data.0", "data.1", "data.2"),))])
    (('model',), ('data.0', 'data.1', 'data.2'))
    """
    cuts: set[tuple[str, ...]] = set()
    counts = collections.Counter(shardings)
    for sharding in counts:
        partial = tuple(a for a in mesh.atoms if a in dict(sharding.unreduced))
        cuts.update(atoms for atoms in (*sharding.dims, partial) if atoms)
    parts: list[Atoms] = []
    for axis_atoms in _ordered(mesh, counts):
        ends = {len(axis_atoms)}
        for atoms in cuts:
            at = [atoms.index(a) if a in atoms else None for a in axis_atoms]
            ends.update(
                i for i in range(1, len(at)) if at[i] != (None if (before := at[i - 1]) is None else before + 1)
            )
        starts = [0, *sorted(ends)]
        parts += [axis_atoms[a:b] for a, b in itertools.pairwise(starts) if b > a]
    return tuple(parts)


def _ordered(mesh: Mesh, counts: collections.Counter[Sharding]) -> list[Atoms]:
    """The atoms of each axis. The dimensions that most shardings have determine the order of axes."""
    axes = [atoms for atoms in mesh.atoms_of.values() if atoms]
    axis_of = {a: atoms for atoms in axes for a in atoms}
    rows: collections.Counter[tuple[Atoms, ...]] = collections.Counter()
    for sharding, count in counts.items():
        for atoms in sharding.dims:
            rows[tuple(dict.fromkeys(axis_of[a] for a in atoms))] += count
    kept: list[tuple[Atoms, ...]] = []
    for row, _ in rows.most_common():
        row_axes = iter(row)
        tried = [next(row_axes) if axis in row else axis for axis in axes]
        if all(sorted(other, key=tried.index) == [*other] for other in kept):
            axes, kept = tried, [*kept, row]
    return axes


def joined(mesh: Mesh, axes: tuple[Atoms, ...], shardings: Sequence[Sharding]) -> tuple[Atoms, ...]:
    """If there are many axes, joins those that no sharding uses, and those that all shardings use in a row.

    >>> mesh = Mesh.abstract(data=4, model=2, pods=2, hosts=2)
    >>> joined(mesh, axes_of(mesh), [Sharding((("data.0", "data.1"), ("model",)))])
    (('data.0', 'data.1'), ('model',), ('pods', 'hosts'))
    >>> joined(mesh, axes_of(mesh), [Sharding((("data.0", "data.1", "model"), ()))])
    (('data.0', 'data.1', 'model'), ('pods', 'hosts'))
    """
    if not has_many(mesh, axes):
        return axes
    atoms_in_order = tuple(itertools.chain(*axes))
    runs = {atoms for s in shardings for atoms in s.dims}
    runs |= {
        tuple(a for a in atoms_in_order if (a, monoid) in s.unreduced) for s in shardings for _, monoid in s.unreduced
    }
    used = {a for atoms in runs for a in atoms}
    found: list[Atoms] = []
    others: Atoms = ()
    for axis in axes:
        if not used.intersection(axis):
            others += axis
        elif found and all(_are_in_a_row(found[-1], axis, atoms) for atoms in runs):
            found[-1] += axis
        else:
            found.append(axis)
    return (*found, others) if others else tuple(found)


def _are_in_a_row(a: Atoms, b: Atoms, atoms: Atoms) -> bool:
    """Whether these atoms contain the two axes one after the other, or neither."""
    ends = [i + 1 for i, atom in enumerate(atoms) if atom == a[-1]]
    starts = [i for i, atom in enumerate(atoms) if atom == b[0]]
    return ends == starts


# Lists the steps from a sharding.

_WITH_REDUCE_SCATTER = frozenset({"add", "pick"})


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    """The dimensions of shardings between two: each axis is where one of the two has it, or splits nothing."""

    source: Sharding
    target: Sharding

    def __contains__(self, here: Sharding) -> bool:
        ends = [*zip(self.source.dims, self.target.dims, strict=True)]
        return all(a in have or a in wanted for own, (have, wanted) in zip(here.dims, ends, strict=True) for a in own)


@dataclasses.dataclass(frozen=True, slots=True)
class Divided:
    """Shardings over two axes. One axis is divided into parts: these stay together, or do so after a swap."""

    parts: Atoms  # the parts of the divided axis
    other: str  # the other axis
    alike: Atoms  # the parts that have its size

    def __contains__(self, here: Sharding) -> bool:
        swaps = ({a: self.other, self.other: a} for a in self.alike)
        return self.is_whole(here) or any(self.is_whole(_renamed(here, swap)) for swap in swaps)

    def is_whole(self, here: Sharding) -> bool:
        """Whether the divided axis is whole."""
        unreduced = tuple(a for a, _ in here.unreduced if a in self.parts)
        held = [atoms for atoms in (*here.dims, unreduced) if not set(self.parts).isdisjoint(atoms)]
        return not held or (
            len(held) == 1 and any(held[0][i:][: len(self.parts)] == self.parts for i in range(len(held[0])))
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """Shardings with these dimensions, reduced or not."""

    dims: frozenset[tuple[Atoms, ...]]

    def __contains__(self, here: Sharding) -> bool:
        return here.dims in self.dims


Through = Between | Divided | Listed


def _renamed(sharding: Sharding, names: dict[str, str]) -> Sharding:
    """The sharding with other axes in the places of some."""
    dims = tuple(tuple(names.get(a, a) for a in atoms) for atoms in sharding.dims)
    return Sharding(dims).with_unreduced({names.get(a, a): m for a, m in sharding.unreduced})


def _divided(mesh: Mesh, axes: tuple[Atoms, ...]) -> tuple[tuple[Atoms, ...], Divided | None]:
    """The axes. One of two is divided if a part of it has the size of the other: these two can be exchanged.

    >>> mesh = Mesh.abstract(data=4, model=2)
    >>> axes, divided = _divided(mesh, axes_of(mesh))
    >>> axes, divided.parts, divided.other
    ((('data.0',), ('data.1',), ('model',)), ('data.0', 'data.1'), 'model')
    """
    for i, axis in enumerate(axes if len(axes) == 2 else ()):
        other = axes[1 - i]
        for k in range(1, len(axis)):
            names = {mesh.format_atoms(part): mesh.count(part) for part in (axis[:k], axis[k:])}
            if alike := tuple(name for name, size in names.items() if size == mesh.count(other)):
                parts = (*axes[:i], axis[:k], axis[k:], *axes[i + 1 :])
                return parts, Divided(tuple(names), mesh.format_atoms(other), alike)
    return axes, None


class AxisSteps:
    """The steps between shardings over whole axes, of arrays whose size every split divides. Each is found once."""

    def __init__(self, mesh: Mesh, axes: tuple[Atoms, ...], through: Through | None = None):
        # for each axis of ``coarse``, its atoms in the mesh
        self.atoms_of = {mesh.format_atoms(axis): axis for axis in axes}
        # a mesh of the axes themselves, without atoms: few steps lead from one sharding to others
        self.coarse = Mesh(tuple((name, mesh.count(axis)) for name, axis in self.atoms_of.items()), factored=False)
        self._through = through  # the dimensions of shardings that reshards pass through; None: all
        # Axes that move in one message, in each order: a dimension that is split over two axes at once may have parts
        # that do not line up if it is split over one after the other.
        names = self.coarse.atoms
        orders = itertools.permutations if len(names) <= FEW else itertools.combinations
        blocks = [block for k in range(len(names)) for block in orders(names, k + 1)]
        if isinstance(through, Between):
            blocks += [
                dim[a:b] for dim in through.target.dims for a, b in itertools.combinations(range(len(dim) + 1), 2)
            ]
        self._blocks = tuple(dict.fromkeys(blocks))
        self._steps: dict[Sharding, list[Step]] = {}
        self._passes: dict[Sharding, bool] = {}
        self._placements: dict[int, _Placements] = {}
        self._tables: dict[tuple[int, tuple[str, ...]], Table] = {}
        self.groups: dict[Hashable, int] = {}  # a number for each group of steps (``group``)

    def over_atoms(self, axes: Atoms) -> Atoms:
        """The atoms of axes of ``coarse``."""
        return tuple(a for name in axes for a in self.atoms_of[name])

    def table(self, rank: int, monoids: tuple[str, ...]) -> Table:
        """The steps between shardings of arrays of this rank, which may be unreduced with ``monoids``."""
        if (rank, monoids) not in self._tables:
            self._tables[rank, monoids] = Table(self, monoids)
        return self._tables[rank, monoids]

    def of(self, here: Sharding, monoids: Sequence[str]) -> list[Step]:
        """The steps from a sharding to those that reshards pass through."""
        if here not in self._steps:
            kinds = self._cut, self._joined, self._reduced, self._permuted
            steps = itertools.chain(*(kind(here) for kind in kinds))
            self._steps[here] = [s for s in steps if self._is_passed(s.after)]
        unused = [name for name in self.coarse.atoms if name not in here.atoms]
        partial = [
            Step(
                TO_PARTIAL,
                some,
                here,
                here.with_unreduced({**dict(here.unreduced), **dict.fromkeys(some, m)}),
                monoid=m,
            )
            for m in monoids
            for k in range(len(unused))
            for some in itertools.combinations(unused, k + 1)
        ]
        return self._steps[here] + partial

    def _is_passed(self, here: Sharding) -> bool:
        if self._through is None:
            return True
        if here not in self._passes:
            self._passes[here] = here in self._through
        return self._passes[here]

    def _cut(self, here: Sharding) -> Iterator[Step]:
        """Splits of a dimension over more axes: a slice over free ones, a reduce-scatter over unreduced ones."""
        partial = dict(here.unreduced)
        for block in self._blocks:
            monoids = {partial.get(a) for a in block}
            is_free = monoids == {None} and not any(a in dim for dim in here.dims for a in block)
            if not is_free and not (len(monoids) == 1 and monoids <= _WITH_REDUCE_SCATTER):
                continue
            for d, have in enumerate(here.dims):
                after = _with(here, {d: (*have, *block)})
                if is_free:
                    yield Step(ALL_SLICE, block, here, after, d)
                else:
                    yield Step(REDUCE_SCATTER, block, here, _without(after, block), d, monoid=partial[block[0]])

    def _joined(self, here: Sharding) -> Iterator[Step]:
        """The innermost axes leave a dimension: they move to another one, or the dimension is gathered."""
        for d, have in enumerate(here.dims):
            for k in range(len(have)):
                rest, axes = have[:k], have[k:]
                yield Step(ALL_GATHER, axes, here, _with(here, {d: rest}), d)
                for e, other in enumerate(here.dims):
                    if e != d:
                        yield Step(ALL_TO_ALL, axes, here, _with(here, {d: rest, e: (*other, *axes)}), d, e)

    def _reduced(self, here: Sharding) -> Iterator[Step]:
        """All-reduces over some of the axes with one monoid."""
        by_monoid: dict[str, list[str]] = {}
        for name, monoid in here.unreduced:
            by_monoid.setdefault(monoid, []).append(name)
        for monoid, names in by_monoid.items():
            for k in range(len(names)):
                for axes in itertools.combinations([a for a in self.coarse.atoms if a in names], k + 1):
                    yield Step(ALL_REDUCE, axes, here, _without(here, axes), monoid=monoid)

    def _permuted(self, here: Sharding) -> Iterator[Step]:
        """Permutes, after which other axes split the dimensions into as many parts."""
        mesh, rank = self.coarse, len(here.dims)
        if len(mesh.atoms) > FEW and self._through is None:
            swaps = ({a: b, b: a} for a, b in itertools.combinations(mesh.atoms, 2))
            found = _Placements([*dict.fromkeys(_renamed(here, swap).dims for swap in swaps)], mesh)
        else:
            if rank not in self._placements:
                self._placements[rank] = _Placements(self._all_placements(rank), mesh)
            found = self._placements[rank]
        for dims in found.of_parts_like(here):
            yield Step(PERMUTE, mesh.atoms, here, Sharding(dims, here.unreduced))

    def _all_placements(self, rank: int) -> list[tuple[Atoms, ...]]:
        """All dimensions of shardings of a rank to which permutes lead."""
        if isinstance(self._through, Between):
            return [self._through.target.dims]
        if isinstance(self._through, Listed):
            return [dims for dims in self._through.dims if len(dims) == rank]
        names = self.coarse.atoms
        rows: list[list[tuple[Atoms, ...]]] = [[((),) * rank]]
        for _ in names:
            unused = ((dims, a) for dims in rows[-1] for a in names if not any(a in dim for dim in dims))
            rows.append([(*dims[:d], (*dims[d], a), *dims[d + 1 :]) for dims, a in unused for d in range(rank)])
        return [*dict.fromkeys(itertools.chain(*rows))]

    def group(self, step: Step) -> Hashable:
        """A key: steps with equal keys cost the same if their parts have the same sizes."""
        if step.kind in LOCAL:
            return ()
        if step.kind != PERMUTE:
            return step.kind, frozenset(step.atoms), step.monoid
        changed = (dims for dims in zip(step.before.dims, step.after.dims, strict=True) if dims[0] != dims[1])
        return step.kind, frozenset(changed), frozenset(step.before.atoms)


class _Placements:
    """Dimensions of shardings, to which permutes lead."""

    def __init__(self, dims: Sequence[tuple[Atoms, ...]], mesh: Mesh):
        self._dims, self._mesh, self._bits = dims, mesh, {name: 1 << i for i, name in enumerate(mesh.atoms)}
        self._parts = np.array([[*map(mesh.count, each)] for each in dims], dtype=np.int64)
        self._used = np.array([self._bits_of(itertools.chain(*each)) for each in dims], dtype=np.int64)

    def _bits_of(self, names: Iterable[str]) -> int:
        return sum(map(self._bits.__getitem__, names))

    def of_parts_like(self, here: Sharding) -> Iterator[tuple[Atoms, ...]]:
        """Those of the same numbers of parts, over other axes or in another order."""
        own = np.array([*map(self._mesh.count, here.dims)], dtype=np.int64)
        unreduced = self._bits_of(a for a, _ in here.unreduced)
        for k in np.flatnonzero((self._parts == own).all(1) & (self._used & unreduced == 0)).tolist():
            if self._dims[k] != here.dims:
                yield self._dims[k]


def _with(sharding: Sharding, changes: dict[int, Atoms]) -> Sharding:
    return Sharding(tuple([changes.get(i, dim) for i, dim in enumerate(sharding.dims)]), sharding.unreduced)


def _without(sharding: Sharding, atoms: Atoms) -> Sharding:
    return sharding.with_unreduced({a: m for a, m in sharding.unreduced if a not in atoms})


@tabulated(64)
def _axis_steps(mesh: Mesh, axes: tuple[Atoms, ...], through: Through | None) -> AxisSteps:
    """The steps over the axes of a mesh without times. Plans that are made together share them."""
    return AxisSteps(mesh, axes, through)


# Tabulates the steps between all shardings of one rank, and prices them for arrays of any shape.

_OTHER, _SLICED, _SCATTERED, _GATHERED, _TURNED = range(5)
_KINDS = {ALL_SLICE: _SLICED, REDUCE_SCATTER: _SCATTERED, ALL_GATHER: _GATHERED, ALL_TO_ALL: _TURNED}
_HASH = np.random.default_rng(0).integers(1 << 62, size=10)  # factors that give rows of numbers different sums
_SOURCES = 64  # the most sources of paths at a time, which bounds the memory


# Prices steps. Each row of int64 [steps, numbers] describes a step, and begins with the group of the step. Steps with
# equal rows cost the same for any shape. The function returns a step of a row.
Price = Callable[[Ints, Callable[[int], Step]], Floats]


class Table:
    """The steps between the shardings of arrays of one rank.

    Steps of one *class* have one price for any shape: they have one group, and divide each dimension into the same
    numbers of parts.
    """

    def __init__(self, steps: AxisSteps, monoids: tuple[str, ...]):
        self._axis_steps, self._monoids = steps, monoids
        self.places: dict[Sharding, int] = {}
        self._shardings: list[Sharding] = []  # of each place
        self._parts_of: list[tuple[int, ...]] = []  # of each place: the parts of its dimensions
        self._codes: tuple[Ints, Ints, Ints, Bools, Ints] | None = None
        self._steps: list[Step] = []
        self._rows: list[tuple[int, int, int]] = []  # for each step: begin, end, class
        self._classes: dict[tuple[object, ...], int] = {}
        self._ones: list[Step] = []  # a step of each class
        self._numbers: list[tuple[int, ...]] = []  # of each class: group, kind, two dimensions, devices
        self._parts: list[tuple[tuple[int, ...], ...]] = []  # of each class: the parts of dimensions before and after
        self._made: tuple[Ints, Ints, Ints, list[Step]] | None = None
        self._arrays: tuple[Ints, Ints] | None = None  # ``_numbers`` and ``_parts``
        self._tiles: dict[int, tuple[Ints, Ints]] = {}

    def add(self, shardings: Iterable[Sharding]) -> None:
        """Adds shardings and all shardings that steps reach from them."""
        queue = [s for s in dict.fromkeys(shardings) if s not in self.places]
        for s in queue:
            self._place(s)
        for here in queue:  # the queue grows
            begin = self.places[here]
            for step in self._axis_steps.of(here, self._monoids):
                if (end := self.places.get(step.after)) is None:
                    end = self._place(step.after)
                    queue.append(step.after)
                self._rows.append((begin, end, self._class_of(step, self._parts_of[begin], self._parts_of[end])))
                self._steps.append(step)
        if queue:
            self._made = self._codes = self._arrays = None
            self._tiles.clear()

    def _place(self, sharding: Sharding) -> int:
        self.places[sharding] = place = len(self.places)
        self._shardings.append(sharding)
        self._parts_of.append(tuple(map(self._axis_steps.coarse.count, sharding.dims or ((),))))
        return place

    def _class_of(self, step: Step, *parts: tuple[int, ...]) -> int:
        mesh, groups = self._axis_steps.coarse, self._axis_steps.groups
        kind = _KINDS.get(step.kind, _OTHER)
        group = groups.setdefault(self._axis_steps.group(step), len(groups))
        numbers = group, kind, max(step.dim, 0), max(step.to, 0), mesh.count(step.atoms)
        if (key := (numbers, parts)) not in self._classes:
            self._classes[key] = len(self._ones)
            self._ones.append(step)
            self._numbers.append(numbers)
            self._parts.append(parts)
        return self._classes[key]

    def edges(self) -> tuple[Ints, Ints, Ints, list[Step]]:
        """int64 [steps]: where the steps begin and end, and their classes, in the order of the ends; the steps."""
        if self._made is None:
            rows = np.array(self._rows, dtype=np.int64).reshape(-1, 3)
            order = np.argsort(rows[:, 1], kind="stable")
            self._made = (*rows[order].T.copy(), [self._steps[k] for k in order.tolist()])
        return self._made

    def costs(self, shape: tuple[int, ...], price: Price) -> Floats:
        """float64 [classes]: the costs of steps of an array of this global shape; ``inf`` if parts do not line up.

        The numbers of a step are its group, the elements of a part before and after, whether the layout changes, and
        the sizes and numbers of parts of the two dimensions if these do not divide evenly.
        """
        n = np.array(shape or (1,), dtype=np.int64)
        if self._arrays is None:
            self._arrays = np.array(self._numbers, dtype=np.int64), np.array(self._parts, dtype=np.int64)
        group, kind, dim, to, devices = self._arrays[0].reshape(-1, 5).T
        parts = self._arrays[1].reshape(-1, 2, n.size)
        before, after = parts[:, 0], parts[:, 1]
        every = np.arange(len(parts))
        of_dim, of_to = (np.stack([n[d], before[every, d], after[every, d]], 1) for d in (dim, to))
        turned, scattered = kind == _TURNED, kind == _SCATTERED
        left = np.where(turned, of_dim[:, 2], of_dim[:, 1])
        fits = ~(turned | scattered | (kind == _SLICED)) | _aligned(of_dim[:, 0], left, devices)
        fits &= ~turned | _aligned(of_to[:, 0], of_to[:, 1], devices)
        local = -(-n // parts)
        # A device copies parts into place if more than one element lies before the dimension, or between the two.
        several, at = local.min(1) > 1, np.arange(n.size)
        low, high = np.where(turned, np.minimum(dim, to), 0), np.where(turned, np.maximum(dim, to), dim)
        copies = (several & (at >= low[:, None]) & (at < high[:, None])).any(1)
        sends_parts = turned | scattered | (kind == _GATHERED)
        is_uneven: Bools = np.logical_or.reduce(n % parts != 0, axis=1)  # [classes, dimensions]
        uneven = sends_parts & (is_uneven[every, dim] | (turned & is_uneven[every, to]))
        numbers = np.column_stack(
            [group, local.prod(2), copies & sends_parts, of_dim * uneven[:, None], of_to * (uneven & turned)[:, None]]
        )
        costs, chosen = np.full(len(parts), np.inf), np.flatnonzero(fits)
        costs[chosen] = price(numbers[chosen], lambda k: self._ones[chosen[k]])
        return costs

    def in_tiles(self, sources: Ints, shape: tuple[int, ...], price: Price) -> Floats:
        """float64 [sources, places]: the costs of one all-to-all of tiles (``comm.steps``); ``inf`` if there is none.

        There are many, and only the first step of a reshard is one. So they are no edges of the graph.
        """
        n, every = np.array(shape or (1,), dtype=np.int64), [self._tiles_from(p) for p in sources.tolist()]
        begin = np.repeat(np.arange(sources.size), [ends.size for ends, _ in every])
        end, moving = (np.concatenate(found) for found in zip(*every))
        parts = self._coded()[0]
        even = (n % parts == 0).all(1)
        possible = even[sources][begin] & even[end]
        begin, end, moving = begin[possible], end[possible], moving[possible]
        costs = np.full((sources.size, len(parts)), np.inf)
        numbers = np.stack([-1 - moving, (-(-n // parts)).prod(1)[end]], 1)  # negative: no group
        costs[begin, end] = price(numbers, lambda k: self.step_in_tiles(int(sources[begin[k]]), int(end[k])))
        return costs

    def _tiles_from(self, source: int) -> tuple[Ints, Ints]:
        """The places after all-to-alls of tiles from a place, for even parts, and the axes that move, as bits."""
        if source not in self._tiles:
            _, codes, sums, allowed, lost = self._coded()
            used = np.bitwise_or.reduce(lost[codes, 0], 1)  # code 0 is a whole dimension
            pairs = codes[source], codes
            moving = np.bitwise_or.reduce(lost[pairs], 1)
            ok = (sums[source] == sums) & (used & sums == 0) & allowed[pairs].all(1)
            ends = np.flatnonzero(ok & (moving > 0) & (moving & used == moving))
            self._tiles[source] = ends, moving[ends]
        return self._tiles[source]

    def step_in_tiles(self, begin: int, end: int) -> Step:
        """The all-to-all of tiles between two places."""
        before, after = self._shardings[begin], self._shardings[end]
        return Step(ALL_TO_ALL, moved(before.dims, after.dims), before, after)

    def _coded(self) -> tuple[Ints, Ints, Ints, Bools, Ints]:
        """The parts of the dimensions of places, the dimensions as numbers, and the unreduced axes as bits; for two
        dimensions, whether tiles can move between them, and the axes that leave as bits."""
        if self._codes is None:
            bits = {name: 1 << i for i, name in enumerate(self._axis_steps.coarse.atoms)}
            numbers: dict[Atoms, int] = {(): 0}
            codes = [[numbers.setdefault(dim, len(numbers)) for dim in s.dims or ((),)] for s in self._shardings]
            sums = [sum(bits[name] for name, _ in s.unreduced) for s in self._shardings]
            kept = [[len(common_prefix(have, wanted)) for wanted in numbers] for have in numbers]
            allowed = [[k in (len(a), len(b)) for b, k in zip(numbers, row)] for a, row in zip(numbers, kept)]
            lost = [[sum(bits[name] for name in have[k:]) for k in row] for have, row in zip(numbers, kept)]
            parts = np.array(self._parts_of, dtype=np.int64)
            self._codes = parts, np.array(codes), np.array(sums), np.array(allowed), np.array(lost)
        return self._codes


def _distinct(numbers: Ints) -> tuple[Ints, Ints]:
    """The first of equal rows, and for each row the index of its first one."""
    _, first, which = np.unique(numbers @ _HASH[: numbers.shape[1]], return_index=True, return_inverse=True)
    assert np.array_equal(numbers[first[which]], numbers), "different numbers have different hashes"
    return first, which


def _aligned(n: Ints, parts: Ints, more: Ints) -> Bools:
    """As ``comm.steps.aligned``."""
    return (parts == 1) | (-(-n // parts) == more * -(-n // (parts * more)))


def shortest(begins: Ints, ends: Ints, costs: Floats, lengths: Floats) -> Floats:
    """float64 [places, sources]: the lengths of the shortest paths, which are at most ``lengths``.

    This is the Bellman-Ford algorithm, for all sources at once. ``ends`` increases.
    """
    changed: Bools = np.logical_or.reduce(np.isfinite(lengths), axis=1)
    while (some := np.flatnonzero(changed[begins])).size:
        first = np.flatnonzero(np.diff(ends[some], prepend=-1))
        reached = ends[some[first]]
        through = np.minimum.reduceat(lengths[begins[some]] + costs[some, None], first)
        before = lengths[reached]
        changed = np.zeros(len(lengths), dtype=np.bool_)
        changed[reached] = (through < before).any(1)
        lengths[reached] = np.minimum(before, through)
    return lengths


class _Graph:
    """The shardings of one array that reshards pass through, and the shortest paths from some of them."""

    def __init__(self, table: Table, shape: tuple[int, ...], price: Price):
        self.table, self._shape, self._price = table, shape, price
        self._lengths = dict[int, Floats]()  # of the paths from a place to all
        self._known = 0  # the number of places for which these are
        # where the edges begin and end, their costs, and their numbers in the table; those that are possible
        self._edges: tuple[Ints, Ints, Floats, Ints]
        self._scatters: Ints  # the edges among them that are reduce-scatters

    def lengths(self, sources: Sequence[Sharding]) -> list[Floats]:
        """For each source, float64 [places]: the lengths of the shortest paths from it."""
        table = self.table
        table.add(sources)
        if new := len(table.places) - self._known:
            self._known += new
            begins, ends, classes, steps = table.edges()
            costs = table.costs(self._shape, self._price)[classes]
            possible = np.flatnonzero(np.isfinite(costs))
            self._edges = begins[possible], ends[possible], costs[possible], possible
            kinds = [steps[k].kind for k in possible.tolist()]
            self._scatters = np.array([k for k, kind in enumerate(kinds) if kind == REDUCE_SCATTER], dtype=np.int64)
            self._lengths = {p: np.pad(old, (0, new), constant_values=np.inf) for p, old in self._lengths.items()}
        places = [table.places[s] for s in sources]
        missing = np.array([*dict.fromkeys(p for p in places if p not in self._lengths)], dtype=np.int64)
        for some in np.split(missing, range(_SOURCES, missing.size, _SOURCES)) if missing.size else ():
            lengths = np.full((self._known, some.size), np.inf)
            _, column, in_tiles = self._in_tiles(some)
            np.minimum.at(lengths.T, column, in_tiles)
            lengths[some, np.arange(some.size)] = 0.0
            self._lengths.update(zip(some.tolist(), shortest(*self._edges[:3], lengths).T, strict=True))
        return [self._lengths[p] for p in places]

    def _in_tiles(self, sources: Ints) -> tuple[Ints, Ints, Floats]:
        """Paths that end with an all-to-all of tiles, which is the first step or comes after a reduce-scatter.

        These are the places before that step, the index of the source of each, and float64 [these, places]: lengths.
        """
        begins, ends, costs, _ = self._edges
        index_of = np.full(self._known, -1)
        index_of[sources] = np.arange(sources.size)
        scatters = self._scatters[index_of[begins[self._scatters]] >= 0]
        before = np.concatenate([sources, ends[scatters]])
        first = np.concatenate([np.zeros(sources.size), costs[scatters]])
        in_tiles = self.table.in_tiles(before, self._shape, self._price)
        return before, np.concatenate([index_of[sources], index_of[begins[scatters]]]), first[:, None] + in_tiles

    def path(self, source: Sharding, target: Sharding) -> list[Step]:
        """The steps of a shortest path."""
        (lengths,) = self.lengths([source])
        begin, end = self.table.places[source], self.table.places[target]
        before, _, in_tiles = self._in_tiles(np.array([begin]))
        begins, ends, costs, numbers = self._edges
        steps: list[Step] = []
        while end != begin:
            first, last = np.searchsorted(ends, [end, end + 1]).tolist()
            through = lengths[begins[first:last]] + costs[first:last]
            if in_tiles[:, end].min() < through.min(initial=np.inf):
                place = int(before[in_tiles[:, end].argmin()])
                steps.append(self.table.step_in_tiles(place, end))
                end = place
                continue
            k = first + int(through.argmin())
            steps.append(self.table.edges()[3][int(numbers[k])])
            end = int(begins[k])
        return steps[::-1]


class _Prices:
    """The prices of steps in one objective, and the graphs of arrays."""

    def __init__(self, mesh: Mesh, steps: AxisSteps):
        self._mesh, self._steps = mesh, steps
        self._classes: dict[int, int] = {}  # of groups: steps of one class cost the same in this objective
        self._class_numbers: dict[Hashable, int] = {}
        self._prices: dict[tuple[int, ...], float] = {}  # of a step, by everything that it depends on
        self._graphs: dict[tuple[tuple[str, ...], tuple[int, ...], int], _Graph] = {}

    def graph(self, targets: Sequence[Sharding], shape: tuple[int, ...], itemsize: int) -> _Graph:
        """The graph of an array that is resharded to some targets."""
        monoids = tuple(sorted({monoid for s in targets for _, monoid in s.unreduced}))
        key = monoids, shape, itemsize
        if key not in self._graphs:
            price = functools.partial(self._price, shape, itemsize)
            self._graphs[key] = _Graph(self._steps.table(len(shape), monoids), shape, price)
        return self._graphs[key]

    def _price(self, shape: tuple[int, ...], itemsize: int, numbers: Ints, step_of: Callable[[int], Step]) -> Floats:
        groups, first, which = np.unique(numbers[:, 0], return_index=True, return_inverse=True)
        classes = [self._class_of(group, step_of, k) for group, k in zip(groups.tolist(), first.tolist())]
        numbers = np.column_stack([np.array(classes, dtype=np.int64)[which], numbers[:, 1:]])
        first, which = _distinct(numbers)
        prices = []
        for k, row in zip(first.tolist(), numbers[first].tolist()):
            if (known := self._prices.get(key := (itemsize, *row))) is None:
                step, mesh = step_of(k), self._steps.coarse
                atoms = self._steps.over_atoms(step.atoms)
                known = self._prices[key] = step_cost(step, shape, itemsize, mesh, self._mesh, atoms)
            prices.append(known)
        return np.array(prices)[which]

    def _class_of(self, group: int, step_of: Callable[[int], Step], k: int) -> int:
        if group not in self._classes:
            step, mesh = step_of(k), self._mesh
            atoms = self._steps.over_atoms(step.atoms)
            if mesh.times is None:
                outermost = min(map(mesh.atoms.index, atoms), default=0)
                alike: Hashable = step.kind, mesh.count(atoms), outermost, step.monoid, is_of_tiles(step)
            else:
                alike = mesh.times.price_class(step, self._steps.coarse, mesh, atoms)
            self._classes[group] = self._class_numbers.setdefault(alike, len(self._class_numbers))
        return self._classes[group]


@tabulated(64)
def _prices_of(mesh: Mesh, steps: AxisSteps) -> _Prices:
    """The prices of steps. Plans that are made together, and what is emitted, share them."""
    return _Prices(mesh, steps)


# The number of lists of shardings that are kept.
_MANY = 20_000


class Reshards:
    """The reshards over the axes of a mesh, and their costs. Results are kept, so that equal ones are computed once."""

    def __init__(self, mesh: Mesh, axes: tuple[Atoms, ...], through: Through | None = None):
        self.mesh, self.axes = mesh, axes
        moving, divided = _divided(mesh, axes)
        if len(axes) <= FEW:  # steps over few axes do not depend on their order
            moving = tuple(sorted(moving, key=lambda axis: mesh.atoms.index(axis[0])))
        self._divided = divided
        self._steps = _axis_steps(dataclasses.replace(mesh, times=None), moving, divided or through)
        self._names_of = {axis: name for name, axis in self._steps.atoms_of.items()}
        self._prices = _prices_of(mesh, self._steps)
        self._known: dict[Sharding, Sharding | None] = {}  # over whole axes; None if a sharding uses a part of one
        self._lists: dict[int, tuple[Sequence[Sharding], list[Sharding | None]]] = {}

    def through(self, shardings: Iterable[Sharding]) -> Self:
        """The same costs, for reshards that pass only through these shardings, reduced or not.

        Large programs and many axes have too many shardings to pass through any (``planning.strategies``).
        """
        dims = frozenset(tuple(self._names(atoms) or () for atoms in s.dims) for s in {*shardings})
        found = copy.copy(self)
        found._steps = _axis_steps(dataclasses.replace(self.mesh, times=None), (*self._names_of,), Listed(dims))
        found._prices = _prices_of(self.mesh, found._steps)
        return found

    def move(self, source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
        """The cost to reshard an array of this global shape."""
        return float(self.table((source,), (target,), shape, itemsize)[0, 0])

    def table(
        self, sources: Sequence[Sharding], targets: Sequence[Sharding], shape: tuple[int, ...], itemsize: int
    ) -> Floats:
        """float64 [sources, targets]: the costs to reshard an array of this global shape from each to each."""
        check_deadline()
        begins, ends = self._all_in_axes(sources), self._all_in_axes(targets)
        graph = self._prices.graph(targets, shape, itemsize)
        lengths = iter(graph.lengths([s for s in begins if s is not None]))
        places = np.array([-1 if s is None else graph.table.places.get(s, -1) for s in ends])
        costs = np.array([np.full(len(ends), np.inf) if s is None else next(lengths)[places] for s in begins])
        costs[:, places < 0] = np.inf
        for i, j in zip(*np.nonzero(np.isinf(costs)), strict=True):
            steps = plan_reshard(sources[i], targets[j], shape, itemsize, self.mesh)
            costs[i, j] = sum(step_cost(s, shape, itemsize, self.mesh, self.mesh, s.atoms) for s in steps)
        return costs

    def steps(self, source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> tuple[Step, ...]:
        """The cheapest steps from a sharding over these axes to another one."""
        begin, end = self.in_axes(source), self.in_axes(target)
        assert begin is not None
        assert end is not None
        return tuple(map(self._over_atoms, self._prices.graph((target,), shape, itemsize).path(begin, end)))

    def _over_atoms(self, step: Step) -> Step:
        """A step over the atoms of the mesh instead of axes."""
        atoms_of, over_atoms = self._steps.atoms_of, self._steps.over_atoms
        before, after = (
            Sharding(tuple(map(over_atoms, s.dims))).with_unreduced(
                {a: monoid for name, monoid in s.unreduced for a in atoms_of[name]}
            )
            for s in (step.before, step.after)
        )
        atoms = self.mesh.atoms if step.kind == PERMUTE else over_atoms(step.atoms)
        return dataclasses.replace(step, atoms=atoms, before=before, after=after)

    def _all_in_axes(self, some: Sequence[Sharding]) -> list[Sharding | None]:
        """The shardings in terms of whole axes, as ``in_axes``. The result for the same tuple is kept."""
        if isinstance(some, tuple) and (known := self._lists.get(id(some))) is not None and known[0] is some:
            return known[1]
        found = [self.in_axes(s) for s in some]
        if isinstance(some, tuple) and len(some) > 1:
            if len(self._lists) > _MANY:
                self._lists.clear()
            self._lists[id(some)] = some, found
        return found

    def in_axes(self, sharding: Sharding) -> Sharding | None:
        """A sharding in terms of whole axes; None if it uses a part of one."""
        if sharding not in self._known:
            monoids = dict(sharding.unreduced)
            dims = tuple(self._names(atoms) for atoms in sharding.dims)
            atoms_of = self._steps.atoms_of
            unreduced = {name: monoids[atoms[0]] for name, atoms in atoms_of.items() if atoms[0] in monoids}
            whole = {a: unreduced[name] for name in unreduced for a in atoms_of[name]}
            found = Sharding(tuple(atoms or () for atoms in dims)).with_unreduced(unreduced)
            is_whole = whole == monoids and None not in dims and (not self._divided or self._divided.is_whole(found))
            self._known[sharding] = found if is_whole else None
        return self._known[sharding]

    def _names(self, atoms: Atoms) -> Atoms | None:
        names, i = [], 0
        while i < len(atoms):
            axis = next((axis for axis in self._names_of if atoms[i : i + len(axis)] == axis), None)
            if axis is None:
                return None
            names.append(self._names_of[axis])
            i += len(axis)
        return tuple(names)


@tabulated(64)
def reshards_of(mesh: Mesh, axes: tuple[Atoms, ...], through: Through | None = None) -> Reshards:
    """The reshards over the axes of a mesh. Plans that are made together share them."""
    return Reshards(mesh, axes, through)


@tabulated(65536)
def plan_reshard(
    source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh
) -> tuple[Step, ...]:
    """The cheapest steps from ``source`` to ``target``. Over many axes, these go directly from one to the other."""
    if source == target:
        return ()
    axes = axes_of(mesh, (source, target))
    if len(axes) <= FEW:
        return reshards_of(mesh, axes).steps(source, target, shape, itemsize)
    axes = joined(mesh, axes, (source, target))
    found = Reshards(mesh, axes)
    begin, end = found.in_axes(source), found.in_axes(target)
    assert begin is not None
    assert end is not None
    return reshards_of(mesh, axes, Between(begin, end)).steps(source, target, shape, itemsize)


def reshard_bytes(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that each device sends in the reshard from ``source`` to ``target``."""
    return sum(bytes_sent(s, shape, itemsize, mesh) for s in plan_reshard(source, target, shape, itemsize, mesh))
