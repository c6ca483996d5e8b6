"""Computes the costs of reshards between all shardings over whole mesh axes.

The shardings are the nodes of a graph whose edges are the steps of ``comm.steps``; the cost of a reshard is the length
of the shortest path. The axes are those of the mesh, or parts of an axis if a mark names a part. An objective gives the
cost of a step: bytes, or seconds on a machine.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Self

import numpy as np

from gshard.comm.reshard import plan_reshard
from gshard.comm.steps import Step
from gshard.core.deadline import check_deadline
from gshard.core.mesh import Atoms, Mesh
from gshard.core.sharding import Sharding
from gshard.planning.axis_steps import FEW, FEW_PARTS, AxisSteps, Monoids, axis_steps, has_many
from gshard.planning.step_table import Steps, StepTable, shortest
from gshard.solver.problem import Floats

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

        Large programs and many axes have too many shardings to pass through any (``planning.nearby``).
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
