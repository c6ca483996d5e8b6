"""Computes the costs of reshards between all shardings over whole mesh axes, as tables for the planner.

A reshard is a path of steps. The steps depend on the shape through divisibility only: gshard finds them once for
each rank, and numpy removes those whose cuts do not line up. Steps with equal numbers are priced once.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gshard.comm.reshard import plan_reshard, steps_from
from gshard.comm.steps import (
    ALL_GATHER,
    ALL_SLICE,
    ALL_TO_ALL,
    LOCAL,
    PERMUTE,
    REDUCE_SCATTER,
    TO_PARTIAL,
    Step,
    can_change,
    is_exchange,
)
from gshard.core.deadline import check_deadline
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding
from gshard.solver.problem import Floats, Ints

# Tabulates the steps between all shardings of one rank, and prices them for arrays of any shape.

_OTHER, _CUT, _GATHERED, _SCATTERED, _TURNED, _EXCHANGED = range(6)
_CACHED, _FEWEST = 150_000, 64  # path lengths that stay in the processor's cache; the fewest sources at a time
_TOGETHER = 16  # the most layers of one width that are one operation
_SPARSE = 16  # numbers for each key, above which the keys are sorted to find different ones
_KINDS = {ALL_SLICE: _CUT, ALL_GATHER: _GATHERED, REDUCE_SCATTER: _SCATTERED, ALL_TO_ALL: _TURNED}


class Numbered(NamedTuple):
    """A step, and the numbers that decide if it is possible and what it costs: kind, dimensions, devices, group."""

    step: Step
    numbers: tuple[int, int, int, int, int]


def numbered(step: Step, mesh: Mesh, group: int) -> Numbered:
    """A step over the axes of a mesh, with the number of its group."""
    kind = _EXCHANGED if is_exchange(step, mesh) else _KINDS.get(step.kind, _OTHER)
    return Numbered(step, (kind, max(step.dim, 0), max(step.to, 0), mesh.count(step.atoms), group))


class Steps(NamedTuple):
    """Steps that an array can take, in layers. Places have numbers here: those where most steps end come first.

    So the steps of a layer end at the first places, one step at each.
    """

    number: Ints  # int64 [places], the number of each place
    begins: Ints  # int64 [steps], the number of the place where each step begins, layer by layer
    costs: Floats  # float64 [steps]
    # for each run of layers of one width, their number and the index after their last step
    layers: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Possible:
    """The steps that an array of one shape can take, not priced yet."""

    steps: Steps  # the steps, without costs
    # one step of each kind, with its numbers: its group, the elements of a part before and after it, whether the layout
    # changes, and the sizes and numbers of parts of its two dimensions if they do not divide evenly. Steps with equal
    # numbers cost the same for any shape.
    kinds: tuple[tuple[Step, tuple[int, ...]], ...]
    indices: Ints  # int64 [kinds], an index for each kind; equal for equal numbers, in all tables
    kind_of: Ints  # int64 [steps], the kind of each step


class StepTable:
    """The steps between the shardings of arrays of one rank."""

    def __init__(
        self, mesh: Mesh, steps_from: Callable[[Sharding], Iterable[Numbered]], indices: dict[tuple[int, ...], int]
    ):
        self.mesh, self._steps_from, self._indices = mesh, steps_from, indices
        self._places: dict[Sharding, int] = {}
        self._steps: list[Step] = []
        self._rows: list[tuple[int, ...]] = []  # for each step: begin, end, and its numbers
        self._parts: list[list[int]] = []
        self._made: tuple[Ints, Ints, Ints] | None = None
        self._known: dict[int, tuple[Sequence[Sharding | None], Ints]] = {}
        self._possible: dict[tuple[int, ...], Possible] = {}  # by the shape of an array

    def __len__(self) -> int:
        return len(self._places)

    def add(self, shardings: Sequence[Sharding | None]) -> None:
        """Adds shardings and all shardings that steps reach from them."""
        known = self._known.get(id(shardings))
        if known is not None and known[0] is shardings and known[1].min() >= 0:
            return
        queue = [s for s in dict.fromkeys(shardings) if s is not None and s not in self._places]
        for s in queue:
            self._place(s)
        for here in queue:  # the queue grows
            begin = self._places[here]
            for step, numbers in self._steps_from(here):
                if (end := self._places.get(step.after)) is None:
                    end = self._place(step.after)
                    queue.append(step.after)
                self._rows.append((begin, end, *numbers))
                self._steps.append(step)
        if queue:
            self._made = None
            self._known.clear()
            self._possible.clear()

    def _place(self, sharding: Sharding) -> int:
        self._places[sharding] = place = len(self._places)
        self._parts.append([self.mesh.count(atoms) for atoms in sharding.dims])
        return place

    def places(self, shardings: Sequence[Sharding | None]) -> Ints:
        """int64 [shardings]: the places of shardings; -1 for None and for shardings that are not in the table."""
        known = self._known.get(id(shardings))
        if known is None or known[0] is not shardings:
            found = np.array([-1 if s is None else self._places.get(s, -1) for s in shardings], dtype=np.int64)
            known = shardings, found
            if len(shardings) > 1:
                self._known[id(shardings)] = known
        return known[1]

    def _arrays(self) -> tuple[Ints, Ints, Ints]:
        """The steps in the order of the places where they end, and the parts of places."""
        if self._made is None:
            rows = np.array(self._rows, dtype=np.int64).reshape(-1, 7)
            order = np.argsort(rows[:, 1], kind="stable")
            parts = np.array(self._parts, dtype=np.int64).reshape(len(self._parts), -1)
            self._made = order, rows[order].T.copy(), parts
        return self._made

    def possible(self, shape: tuple[int, ...]) -> Possible:
        """The steps that an array of this global shape can take. All objectives with this table share them."""
        if shape not in self._possible:
            self._possible[shape] = self._found(shape)
        return self._possible[shape]

    def _found(self, shape: tuple[int, ...]) -> Possible:
        index, rows, parts = self._arrays()
        if not index.size:
            return Possible(_in_layers(index, index, len(self))[1], (), index, index)
        n = np.array(shape, dtype=np.int64)
        chosen = _fitting(n, parts, rows)
        begins, ends, kind, dim, to, _, groups = rows[:, chosen]
        local = -(-n // parts)
        # A device copies parts into place if more than one element lies before the dimension, or between the two.
        several = np.concatenate([np.zeros((len(local), 1), np.int64), (local > 1).cumsum(1)], 1)
        gathers = (kind == _GATHERED) | (kind == _SCATTERED)
        changed = gathers & (several[begins, dim] > 0)
        if (turns := np.flatnonzero(kind == _TURNED)).size:
            outer, inner = np.minimum(dim, to)[turns], np.maximum(dim, to)[turns]
            here, there = begins[turns], ends[turns]
            between = several[here, inner] - several[here, outer + 1]
            changed[turns] = (between > 0) | (np.minimum(local[here, outer], local[there, outer]) > 1)
        sizes, size = np.unique(local.prod(1), return_inverse=True)
        uneven, uneven_kind = _uneven(n, parts, begins, ends, kind, dim, to)
        key = ((groups * sizes.size + size[begins]) * sizes.size + size[ends]) * len(uneven) + uneven_kind
        ones, kind_of = _first_of_each(2 * key + changed)
        numbers = np.stack([groups[ones], sizes[size[begins[ones]]], sizes[size[ends[ones]]], changed[ones]], 1)
        numbers_of_kinds = [*map(tuple, np.concatenate([numbers, uneven[uneven_kind[ones]]], 1).tolist())]
        known = self._indices
        indices = np.array([known.setdefault(some, len(known)) for some in numbers_of_kinds], dtype=np.int64)
        steps_of_kinds = [self._steps[k] for k in index[chosen[ones]].tolist()]
        order, steps = _in_layers(begins, ends, len(self))
        return Possible(steps, tuple(zip(steps_of_kinds, numbers_of_kinds, strict=True)), indices, kind_of[order])


def _first_of_each(keys: Ints) -> tuple[Ints, Ints]:
    """The index of the first of each of the different keys, and for each key the index of it in these.

    Keys are numbers from 0, and mostly not much larger than there are keys: then nothing is sorted.
    """
    count = int(keys.max(initial=-1)) + 1
    if count > _SPARSE * keys.size:
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        return first, which
    first_of = np.full(count, -1)
    first_of[keys[::-1]] = np.arange(keys.size - 1, -1, -1)
    known = first_of >= 0
    return first_of[known], (np.cumsum(known) - 1)[keys]


def _in_layers(begins: Ints, ends: Ints, places: int) -> tuple[Ints, Steps]:
    """The order of steps by layer, and the steps in that order, without costs.

    Args:
        begins: int64 [steps], the places where they begin.
        ends: int64 [steps], increasing, the places where they end.
        places: the number of places.
    """
    count = np.bincount(ends, minlength=places)
    by_count = np.argsort(-count, kind="stable")
    number = np.empty(places, np.int64)
    number[by_count] = np.arange(places)
    layer = np.arange(ends.size) - np.repeat(np.cumsum(count) - count, count)
    order = np.argsort(layer * places + number[ends], kind="stable")
    widths: list[int] = np.bincount(layer).tolist()
    layers, end = list[tuple[int, int]](), 0
    for width, same in itertools.groupby(widths):
        equal = len([*same])
        for some in (min(_TOGETHER, equal - k) for k in range(0, equal, _TOGETHER)):
            end += width * some
            layers.append((some, end))
    return order, Steps(number, number[begins[order]], np.zeros(order.size), tuple(layers))


def _fitting(n: Ints, parts: Ints, rows: Ints) -> Ints:
    """The indices of the steps that the sizes of the parts allow.

    Args:
        n: int64 [dimensions], the global shape.
        parts: int64 [places, dimensions], the number of parts of each dimension.
        rows: int64 [7, steps], where the steps begin and end, and their numbers (``Numbered``).
    """
    begins, ends, kind, dim, to, devices, _ = rows
    if not n.size:
        return np.arange(kind.size)
    size = n[dim]
    turned, cut = kind == _TURNED, (kind == _CUT) | (kind == _SCATTERED)
    possible = ~(cut | turned)
    possible[cut] = _aligned(size[cut], parts[begins[cut], dim[cut]], devices[cut])
    left, there = parts[ends[turned], dim[turned]], parts[begins[turned], to[turned]]
    possible[turned] = _aligned(size[turned], left, devices[turned])
    possible[turned] &= _aligned(n[to[turned]], there, devices[turned])
    exchanged = kind == _EXCHANGED
    possible[exchanged] = (n % np.lcm(parts[begins[exchanged]], parts[ends[exchanged]]) == 0).all(1)
    return np.flatnonzero(possible)


def _uneven(n: Ints, parts: Ints, begins: Ints, ends: Ints, kind: Ints, dim: Ints, to: Ints) -> tuple[Ints, Ints]:
    """The numbers of steps that send parts of unequal sizes.

    Args:
        n: int64 [dimensions], the global shape.
        parts: int64 [places, dimensions], the number of parts of each dimension.
        begins: int64 [steps], the places where the steps begin.
        ends: int64 [steps], the places where they end.
        kind: int64 [steps], the kinds of the steps.
        dim: int64 [steps], the dimensions that they change.
        to: int64 [steps], the other dimensions of all-to-alls.
    """
    row_of, zeros = np.zeros(kind.size, np.int64), np.zeros((1, 6), np.int64)
    if not n.size:
        return zeros, row_of
    is_unequal = n % parts > 0  # [places, dimensions], whether parts are unequal
    turned = kind == _TURNED
    unequal = (kind == _GATHERED) | (kind == _SCATTERED) | turned
    unequal &= (
        is_unequal[begins, dim] | is_unequal[ends, dim] | (turned & (is_unequal[begins, to] | is_unequal[ends, to]))
    )
    if not (at := np.flatnonzero(unequal)).size:
        return zeros, row_of
    here, there, d, e, both = begins[at], ends[at], dim[at], to[at], turned[at]
    rows = np.stack([n[d], parts[here, d], parts[there, d], n[e] * both, parts[here, e] * both, parts[there, e] * both])
    key = np.zeros(at.size, np.int64)
    for row in rows:
        values, which = np.unique(row, return_inverse=True)
        key = key * values.size + which.reshape(-1)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    row_of[at] = 1 + which.reshape(-1)
    return np.concatenate([zeros, rows[:, first].T]), row_of


def _aligned(n: Ints, parts: Ints, more: Ints) -> NDArray[np.bool_]:
    """As ``comm.steps.aligned``."""
    return (parts == 1) | (-(-n // parts) == more * -(-n // (parts * more)))


def shortest(steps: Steps, sources: Ints) -> Floats:
    """float64 [sources, places]: the lengths of the shortest paths; ``inf`` if there is none.

    This is the Bellman-Ford algorithm, for all sources at once: some layers of one width are four numpy operations.

    Args:
        steps: the steps.
        sources: int64 [sources], the places where paths begin.
    """
    number, begins, costs, runs = steps
    if sources.size > (most := max(_FEWEST, _CACHED // max(number.size, 1))):
        parts = np.split(sources, range(most, sources.size, most))
        return np.vstack([shortest(steps, part) for part in parts])
    lengths = np.full((number.size, sources.size), np.inf)
    lengths[number[sources], np.arange(sources.size)] = 0.0
    layers = []
    begin = 0
    for count, end in runs:
        there, through = lengths[: (end - begin) // count], np.empty((end - begin, sources.size))
        layers.append((there, begins[begin:end], costs[begin:end, None], through, (count, *there.shape)))
        begin = end
    reached = layers[0][0] if layers else lengths[:0]
    changes = bool(layers)
    while changes:
        before = reached.copy()
        for there, begin_places, cost, through, shape in layers:
            lengths.take(begin_places, axis=0, out=through, mode="clip")
            np.add(through, cost, out=through)
            least = through if shape[0] == 1 else through.reshape(shape).min(0)
            np.minimum(there, least, out=there)
        changes = not np.array_equal(before, reached)
    return lengths[number].T.copy()


# Finds the steps between shardings over whole mesh axes, for the objectives that price them.

Monoids = tuple[str, ...]

# Up to so many axes, reshards may change the order of the axes of a dimension, and all choices are compared.
FEW = 3
# Up to so many parts of one axis may be in any places.
FEW_PARTS = 2


def parts_of(mesh: Mesh, axes: Sequence[Atoms]) -> list[tuple[Atoms, ...]]:
    """For each axis of the mesh that has several devices, the axes that are parts of it."""
    axis_of = {a: axis for axis, atoms in mesh.atoms_of.items() for a in atoms}
    return [tuple(parts) for _, parts in itertools.groupby(axes, lambda part: axis_of[part[0]])]


def has_many(mesh: Mesh, axes: Sequence[Atoms]) -> bool:
    """Whether there are too many axes to compare all choices."""
    return len(parts_of(mesh, axes)) > FEW


def is_considered(places: Sequence[object]) -> bool:
    """Whether the planner considers these places for the parts of one axis (None: no place).

    Two parts may be anywhere. Of more parts, the first or the last ones have one place, and the others have another
    place or none. Without this rule, a mark on each gradient could divide an axis of 2,048 devices into five parts,
    with thousands of choices.

    >>> is_considered([0, 1]), is_considered([0, 0, 1, 1]), is_considered([None, None, None, 1])
    (True, True, True)
    >>> is_considered([0, None, 1]), is_considered([0, 1, 1, 0]), is_considered([0, 1, None, None])
    (False, False, False)
    """
    return len(places) <= FEW_PARTS or sum(a != b for a, b in itertools.pairwise(places)) <= 1


def _runs(names: Atoms) -> Iterator[Atoms]:
    """All sequences of neighbours."""
    return (names[a:b] for a, b in itertools.combinations(range(len(names) + 1), 2))


def _some(names: Atoms) -> Iterator[Atoms]:
    """All subsets, in order."""
    return itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1))


class AxisSteps:
    """The steps between shardings over whole axes. Each is found once."""

    def __init__(self, mesh: Mesh, axes: tuple[Atoms, ...], through: frozenset[tuple[Atoms, ...]] | None = None):
        # for each axis of ``coarse``, its atoms in the mesh
        self.atoms_of = {mesh.format_atoms(axis): axis for axis in axes}
        sizes = tuple((name, mesh.count(axis)) for name, axis in self.atoms_of.items())
        # a mesh of the axes themselves, without atoms: few steps lead from one sharding to others
        self.coarse = Mesh(sizes or mesh.axes, factored=False)
        names_of = {axis: name for name, axis in self.atoms_of.items()}
        # For each axis of the mesh, the names of its parts.
        self._parts = [tuple(map(names_of.__getitem__, axis)) for axis in parts_of(mesh, axes)]
        self._is_parted = any(len(axis) > FEW_PARTS for axis in self._parts)
        self._through = through
        runs = [[(), *_runs(axis)] if len(axis) > FEW_PARTS else list(_some(axis)) for axis in self._parts]
        chosen = (tuple(itertools.chain(*some)) for some in itertools.product(*runs))
        # axes that move in one message: a sum over two axes is scattered over both at once
        self.blocks = tuple(sorted(filter(None, chosen), key=lambda b: (len(b), *map(self.coarse.atoms.index, b))))
        self._steps: dict[Sharding, list[Numbered]] = {}
        self._passed: dict[Sharding, bool] = {}
        self._groups: dict[Hashable, int] = {}
        self._tables: dict[tuple[int, Monoids], StepTable] = {}
        # the index of each kind of steps so far (``Possible``)
        self.kind_indices: dict[tuple[int, ...], int] = {}

    def table(self, rank: int, monoids: Monoids) -> StepTable:
        """The steps between shardings of arrays of this rank, which may be unreduced with ``monoids``."""
        if (rank, monoids) not in self._tables:
            steps = functools.partial(self._steps_from, monoids=monoids)
            self._tables[rank, monoids] = StepTable(self.coarse, steps, self.kind_indices)
        return self._tables[rank, monoids]

    def _steps_from(self, here: Sharding, monoids: Monoids) -> Iterator[Numbered]:
        """The steps from a sharding of an array whose size every split divides."""
        if here not in self._steps:
            steps = even_steps(here, self.blocks, self.coarse)
            self._steps[here] = [self._numbered(step) for step in steps if self._is_passed(step.after)]
        yield from self._steps[here]
        unused = (name for name in self.coarse.atoms if name not in here.atoms)
        for name, monoid in itertools.product(unused, monoids):
            after = here.with_unreduced({**dict(here.unreduced), name: monoid})
            if self._is_passed(after):
                yield self._numbered(Step(TO_PARTIAL, (name,), here, after, monoid=monoid))

    def _numbered(self, step: Step) -> Numbered:
        return numbered(step, self.coarse, self._groups.setdefault(self.group(step), len(self._groups)))

    def group(self, step: Step) -> Hashable:
        """A key: steps with equal keys cost the same, in any objective, if their parts have the same sizes.

        A permutation depends on the axes that change their places and on those that no dimension has; an exchange on
        all.
        """
        if step.kind in LOCAL:
            return ()
        if step.kind != PERMUTE:
            return step.kind, step.atoms, step.monoid
        if is_exchange(step, self.coarse):
            return step.kind, step.before, step.after
        changed = tuple(dims for dims in zip(step.before.dims, step.after.dims, strict=True) if dims[0] != dims[1])
        return step.kind, changed, frozenset(step.before.atoms)

    def _is_passed(self, here: Sharding) -> bool:
        """Whether reshards pass through a sharding: one that ``places_for`` enumerates, of dimensions and a sum."""
        if self._through is None and not self._is_parted:
            return True
        if here not in self._passed:
            self._passed[here] = self._is_enumerated(here)
        return self._passed[here]

    def _is_enumerated(self, here: Sharding) -> bool:
        if self._through is not None and here.dims not in self._through:
            return False
        if not self._is_parted:
            return True
        place_of = {name: d for d, dim_names in enumerate(here.dims) for name in dim_names}
        place_of |= dict.fromkeys(dict(here.unreduced), -1)
        for names in self._parts:
            if not is_considered([place_of.get(name) for name in names]):
                return False
            for dim_names in here.dims:
                turn = [names.index(name) for name in dim_names if name in names]
                if sum(b - a != 1 for a, b in itertools.pairwise(turn)) > 1:
                    return False
        return True


def axis_steps(mesh: Mesh, axes: tuple[Atoms, ...], through: frozenset[tuple[Atoms, ...]] | None = None) -> AxisSteps:
    """The steps over the axes of a mesh. Plans that are made together share them; arguments as of ``AxisSteps``."""
    return _shared(dataclasses.replace(mesh, times=None), axes, through)


@tabulated(64)
def _shared(mesh: Mesh, axes: tuple[Atoms, ...], through: frozenset[tuple[Atoms, ...]] | None) -> AxisSteps:
    return AxisSteps(mesh, axes, through)


@tabulated(65536)
def even_steps(here: Sharding, blocks: tuple[Atoms, ...], mesh: Mesh) -> tuple[Step, ...]:
    """The steps from a sharding of an array whose size every split divides, except those that make it unreduced."""
    shape = (mesh.size,) * len(here.dims)
    permuted = (Step(PERMUTE, mesh.atoms, here, after) for after in swapped(here, shape, mesh))
    return (*steps_from(here, frozenset(), blocks, shape, mesh), *permuted)


def swapped(here: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Sharding]:
    """The shardings with two axes exchanged, and those with the axes of a dimension in another order."""
    sizes = mesh.atom_sizes
    for d, axes in enumerate(here.dims):
        for reordered in itertools.permutations(axes) if 1 < len(axes) <= FEW else ():
            if reordered != axes:
                yield Sharding((*here.dims[:d], reordered, *here.dims[d + 1 :]), here.unreduced)
    for a, b in itertools.combinations(sizes, 2):
        if not {a, b} & {x for dim in here.dims for x in dim} or {a, b} & set(dict(here.unreduced)):
            continue
        exchanged = {a: b, b: a}
        after = Sharding(tuple(tuple(exchanged.get(x, x) for x in dim) for dim in here.dims), here.unreduced)
        if sizes[a] == sizes[b] or can_change(here, after, shape, mesh):
            yield after


# The number of lists of shardings that are kept.
_MANY = 20_000


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
            inside = [a in atoms for a in axis_atoms]
            ends.update(i for i in range(1, len(axis_atoms)) if inside[i] != inside[i - 1])
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


def is_made_of(atoms: Atoms, axes: Sequence[Atoms]) -> bool:
    """Whether atoms are a sequence of whole axes.

    >>> is_made_of(("a.0", "a.1", "b"), (("a.0", "a.1"), ("b",))), is_made_of(("a.1",), (("a.0", "a.1"),))
    (True, False)
    """
    while atoms:
        axis = next((axis for axis in axes if atoms[: len(axis)] == axis), None)
        if axis is None:
            return False
        atoms = atoms[len(axis) :]
    return True


def joined(mesh: Mesh, axes: tuple[Atoms, ...], shardings: Iterable[Sharding]) -> tuple[Atoms, ...]:
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
    runs = {atoms for s in shardings for atoms in (*s.dims, tuple(a for a in atoms_in_order if a in dict(s.unreduced)))}
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


def in_two(mesh: Mesh, axes: tuple[Atoms, ...], shardings: Iterable[Sharding]) -> list[tuple[Atoms, ...]]:
    """As ``joined``, but the axes that no sharding uses become two, in each way to join neighbours, if there are few.

    >>> mesh = Mesh.abstract(a=2, b=2, c=2, d=2)
    >>> for some in in_two(mesh, axes_of(mesh), []):
    ...     print(some)
    (('a',), ('b', 'c', 'd'))
    (('a', 'b'), ('c', 'd'))
    (('a', 'b', 'c'), ('d',))
    """
    joined_axes = joined(mesh, axes, shardings)
    used = {a for sharding in shardings for a in sharding.atoms}
    if not has_many(mesh, axes) or len(joined_axes) >= FEW or not used.isdisjoint(joined_axes[-1]):
        return [joined_axes]
    ends = list(itertools.accumulate(len(axis) for axis in axes if axis[0] in joined_axes[-1]))
    return [(*joined_axes[:-1], joined_axes[-1][:end], joined_axes[-1][end:]) for end in ends[:-1]]


def are_together(places: Sequence[object], base: Sequence[object]) -> bool:
    """Whether the parts of one axis that differ from a base have one place. Two parts may be anywhere.

    >>> are_together([1, 1, None], [0, 0, 0]), are_together([1, 1, 2], [1, 1, None]), are_together([1, 2], [0, 0])
    (False, True, True)
    """
    return len(places) <= FEW_PARTS or len({a for a, b in zip(places, base, strict=True) if a != b}) <= 1


class _Graph:
    """The shardings of one array that reshards pass through, and the shortest paths from some of them."""

    def __init__(self, table: StepTable, costs: Callable[[], Steps]):
        self._table, self._costs = table, costs
        self._found = np.zeros((0, 0))  # [sources, places]
        self._row = np.zeros(0, dtype=np.int64)  # for each place, its row in _found; -1 if it is no source yet
        self._priced: tuple[int, Steps] | None = None  # the number of places at that time, and the steps

    def distances(self, sources: Sequence[Sharding | None], targets: Sequence[Sharding | None]) -> Floats:
        """float64 [sources, targets]: the shortest paths; ``inf`` if steps do not lead there, and for None."""
        self._table.add(sources)
        source_places, target_places = self._table.places(sources), self._table.places(targets)
        if new_places := len(self._table) - self._row.size:
            self._row = np.append(self._row, np.full(new_places, -1))
            self._found = np.pad(self._found, ((0, 0), (0, new_places)), constant_values=np.inf)
        known, reached = source_places >= 0, target_places >= 0
        if not known.any():
            return np.full((known.size, reached.size), np.inf)
        missing = np.unique(source_places[known & (self._row[source_places] < 0)])
        if missing.size:
            self._row[missing] = len(self._found) + np.arange(missing.size)
            self._found = np.vstack([self._found, shortest(self._steps(), missing)])
        distances = self._found[self._row[source_places][:, None], target_places]
        if not known.all():
            distances[~known] = np.inf
        if not reached.all():
            distances[:, ~reached] = np.inf
        return distances

    def _steps(self) -> Steps:
        if self._priced is None or self._priced[0] != len(self._table):
            self._priced = len(self._table), self._costs()
        return self._priced[1]


class Moves:
    """The costs of reshards. Results are kept, so that equal reshards are computed once."""

    def __init__(self, mesh: Mesh, axes: tuple[Atoms, ...]):
        self.mesh, self.axes = mesh, axes
        self._take(axis_steps(mesh, axes))
        self.atoms_of, self._coarse = self._steps.atoms_of, self._steps.coarse
        self._names_of = {axis: name for name, axis in self.atoms_of.items()}
        self._known: dict[Sharding, Sharding | None] = {}  # over whole axes; None if a sharding uses a part of one
        self._lists: dict[int, tuple[Sequence[Sharding], list[Sharding | None]]] = {}
        self._others: dict[tuple[Sharding, Sharding, tuple[int, ...], int], float] = {}

    def _take(self, steps: AxisSteps) -> None:
        """Uses these steps. Nothing is priced yet."""
        self._steps = steps
        self._classes: dict[int, int] = {}  # the price class of each group of steps
        self._class_numbers: dict[Hashable, int] = {}
        self._prices: dict[tuple[int, ...], float] = {}  # of a step, by everything that it depends on
        self._prices_of_kinds: dict[int, Floats] = {}  # the same by item size and index of a kind; NaN if not priced
        self._graphs: dict[tuple[Monoids, tuple[int, ...], int], _Graph] = {}

    def through(self, shardings: Iterable[Sharding]) -> Self:
        """The same objective, whose reshards pass only through these shardings, reduced or not.

        Large programs and many axes have too many shardings to pass through any (``planning.strategies``).
        """
        dims = frozenset(tuple(self._names(atoms) or () for atoms in s.dims) for s in {*shardings})
        found = copy.copy(self)
        found._take(axis_steps(self.mesh, self.axes, dims))
        return found

    def step(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
        """The cost of one step for an array of this global shape. Its atoms may be axes, which ``mesh`` defines."""
        raise NotImplementedError

    def price_class(self, step: Step) -> Hashable:
        """A key: steps with equal keys cost the same if their parts have the same sizes before and after.

        It is computed once for each group of steps (``AxisSteps.group``).
        """
        raise NotImplementedError

    def move(self, source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
        """The cost to reshard an array of this global shape."""
        return float(self.table((source,), (target,), shape, itemsize)[0, 0])

    def table(
        self, sources: Sequence[Sharding], targets: Sequence[Sharding], shape: tuple[int, ...], itemsize: int
    ) -> Floats:
        """float64 [sources, targets]: the costs to reshard an array of this global shape from each to each."""
        check_deadline()
        source_shardings, target_shardings = self._all_in_axes(sources), self._all_in_axes(targets)
        monoids = tuple(sorted({monoid for s in targets for _, monoid in s.unreduced}))
        key = monoids, shape, itemsize
        if key not in self._graphs:
            table = self._steps.table(len(shape), monoids)
            self._graphs[key] = _Graph(table, functools.partial(self._priced, table, shape, itemsize))
        costs = self._graphs[key].distances(source_shardings, target_shardings)
        for i, j in zip(*np.nonzero(np.isinf(costs)), strict=True):
            costs[i, j] = self._by_steps(sources[i], targets[j], shape, itemsize)
        return costs

    def _priced(self, table: StepTable, shape: tuple[int, ...], itemsize: int) -> Steps:
        """The steps that an array can take, with their costs. Steps of arrays of any shapes share prices."""
        possible, prices = table.possible(shape), self._prices
        known_prices = self._prices_of_kinds.get(itemsize, np.zeros(0))
        if (new := len(self._steps.kind_indices) - known_prices.size) > 0:
            known_prices = self._prices_of_kinds[itemsize] = np.append(known_prices, np.full(new, np.nan))
        costs = known_prices[possible.indices]
        for k in np.flatnonzero(np.isnan(costs)).tolist():
            step, (group, *sizes) = possible.kinds[k]
            if group not in self._classes:
                known = self._class_numbers
                self._classes[group] = known.setdefault(self.price_class(step), len(known))
            key = self._classes[group], itemsize, *sizes
            if (price := prices.get(key)) is None:
                price = prices[key] = self.step(step, shape, itemsize, self._coarse)
            costs[k] = price
        known_prices[possible.indices] = costs
        return possible.steps._replace(costs=costs[possible.kind_of]) if possible.kinds else possible.steps

    def _by_steps(self, source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
        """The cost of a reshard with parts of axes, or of one that steps over whole axes do not make."""
        key = source, target, shape, itemsize
        if key not in self._others:
            steps = plan_reshard(source, target, shape, itemsize, self.mesh)
            self._others[key] = sum(self.step(step, shape, itemsize, self.mesh) for step in steps)
        return self._others[key]

    def _all_in_axes(self, some: Sequence[Sharding]) -> list[Sharding | None]:
        """The shardings in terms of whole axes, as ``_in_axes``. The result for the same tuple is kept."""
        if isinstance(some, tuple) and (known := self._lists.get(id(some))) is not None and known[0] is some:
            return known[1]
        found = [self._in_axes(s) for s in some]
        if isinstance(some, tuple) and len(some) > 1:
            if len(self._lists) > _MANY:
                self._lists.clear()
            self._lists[id(some)] = some, found
        return found

    def _in_axes(self, sharding: Sharding) -> Sharding | None:
        """A sharding in terms of whole axes; None if it uses a part of one."""
        if sharding not in self._known:
            monoids = dict(sharding.unreduced)
            dims = tuple(self._names(atoms) for atoms in sharding.dims)
            unreduced = {name: monoids[atoms[0]] for name, atoms in self.atoms_of.items() if atoms[0] in monoids}
            whole = {a: unreduced[name] for name in unreduced for a in self.atoms_of[name]}
            found = Sharding(tuple(atoms or () for atoms in dims)).with_unreduced(unreduced)
            self._known[sharding] = None if whole != monoids or any(atoms is None for atoms in dims) else found
        return self._known[sharding]

    def _names(self, atoms: Atoms) -> Atoms | None:
        names, i = [], 0
        while i < len(atoms):
            axis = next((axis for axis in self.axes if atoms[i : i + len(axis)] == axis), None)
            if axis is None:
                return None
            names.append(self._names_of[axis])
            i += len(axis)
        return tuple(names)
