"""Moves: the costs of reshards between all shardings over whole mesh axes.

From one sharding a few steps of ``comm.steps`` lead to others, and so to all. The axes are those of the
mesh, or parts of one where a mark names a part. What a step costs an objective says: bytes, or seconds on a machine.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import numpy as np

from gshard.comm.exchange import can_change
from gshard.comm.reshard import plan_reshard, steps_from
from gshard.comm.steps import PERMUTE, TO_PARTIAL, Step
from gshard.core.deadline import check_deadline
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding
from gshard.planning.step_table import Priced, Steps, StepTable, priced, shortest
from gshard.solver.problem import Floats

Monoids = tuple[str, ...]

# Axes of one dimension that are put in every order.
FEW = 3
# Parts of one axis that may be anywhere.
FEW_PARTS = 2
# Lists of shardings whose numbers are kept.
_MANY = 20_000


def axes_of(mesh: Mesh, shardings: Iterable[Sharding] = ()) -> tuple[Atoms, ...]:
    """The axes that move as wholes: those of the mesh, parted where one of these shardings takes a part of one.

    >>> mesh = Mesh.abstract(data=8, model=3)
    >>> axes_of(mesh)
    (('data.0', 'data.1', 'data.2'), ('model',))
    >>> axes_of(mesh, [Sharding((("data.0", "data.1"),))])
    (('data.0', 'data.1'), ('data.2',), ('model',))
    """
    cuts: set[tuple[str, ...]] = set()
    for sharding in set(shardings):
        partial = tuple(a for a in mesh.atoms if a in dict(sharding.unreduced))
        cuts.update(atoms for atoms in (*sharding.dims, partial) if atoms)
    found: list[Atoms] = []
    for own in mesh.atoms_of.values():
        ends = {len(own)}
        for atoms in cuts:
            inside = [a in atoms for a in own]
            ends.update(i for i in range(1, len(own)) if inside[i] != inside[i - 1])
        starts = [0, *sorted(ends)]
        found += [own[a:b] for a, b in itertools.pairwise(starts) if b > a]
    return tuple(found)


def is_made_of(atoms: Atoms, axes: Sequence[Atoms]) -> bool:
    """Whether atoms are some axes, one after the other.

    >>> is_made_of(("a.0", "a.1", "b"), (("a.0", "a.1"), ("b",))), is_made_of(("a.1",), (("a.0", "a.1"),))
    (True, False)
    """
    while atoms:
        own = next((own for own in axes if atoms[: len(own)] == own), None)
        if own is None:
            return False
        atoms = atoms[len(own) :]
    return True


def parts_of(mesh: Mesh, axes: Sequence[Atoms]) -> list[tuple[Atoms, ...]]:
    """The axes that are parts of one axis of the mesh, axis by axis."""
    return [tuple(own for own in axes if own[0] in whole) for whole in mesh.atoms_of.values()]


def has_many(mesh: Mesh, axes: Sequence[Atoms]) -> bool:
    """Whether there are so many axes that not all they may do at once is considered."""
    return sum(map(bool, parts_of(mesh, axes))) > FEW


def joined(mesh: Mesh, axes: tuple[Atoms, ...], shardings: Iterable[Sharding]) -> tuple[Atoms, ...]:
    """Where there are many axes, those that none of these shardings has are one; so are those that all have in a row.

    >>> mesh = Mesh.abstract(data=4, model=2, pods=2, hosts=2)
    >>> joined(mesh, axes_of(mesh), [Sharding((("data.0", "data.1"), ("model",)))])
    (('data.0', 'data.1'), ('model',), ('pods', 'hosts'))
    >>> joined(mesh, axes_of(mesh), [Sharding((("data.0", "data.1", "model"), ()))])
    (('data.0', 'data.1', 'model'), ('pods', 'hosts'))
    """
    if not has_many(mesh, axes):
        return axes
    runs = {atoms for s in shardings for atoms in (*s.dims, tuple(a for a in mesh.atoms if a in dict(s.unreduced)))}
    named = {a for atoms in runs for a in atoms}
    found: list[Atoms] = []
    others: Atoms = ()
    for own in axes:
        if not named.intersection(own):
            others += own
        elif found and all(_are_in_a_row(found[-1], own, atoms) for atoms in runs):
            found[-1] += own
        else:
            found.append(own)
    return (*found, others) if others else tuple(found)


def _are_in_a_row(a: Atoms, b: Atoms, atoms: Atoms) -> bool:
    """Whether these atoms have the two axes one after the other, or neither."""
    ends = [i + 1 for i, atom in enumerate(atoms) if atom == a[-1]]
    starts = [i for i, atom in enumerate(atoms) if atom == b[0]]
    return ends == starts


def in_two(mesh: Mesh, axes: tuple[Atoms, ...], shardings: Iterable[Sharding]) -> list[tuple[Atoms, ...]]:
    """Where there are many axes, those that no sharding has are two, in each way to join neighbours, or one.

    >>> mesh = Mesh.abstract(a=2, b=2, c=2, d=2)
    >>> for some in in_two(mesh, axes_of(mesh), []):
    ...     print(some)
    (('a',), ('b', 'c', 'd'))
    (('a', 'b'), ('c', 'd'))
    (('a', 'b', 'c'), ('d',))
    """
    one = joined(mesh, axes, shardings)
    named = {a for sharding in shardings for a in sharding.atoms}
    if not has_many(mesh, axes) or len(one) >= FEW or not named.isdisjoint(one[-1]):
        return [one]
    ends = list(itertools.accumulate(len(own) for own in axes if own[0] in one[-1]))
    return [(*one[:-1], one[-1][:end], one[-1][end:]) for end in ends[:-1]]


def is_considered(places: Sequence[object]) -> bool:
    """Whether the parts of one axis may be in these places at once (None: in none).

    Two parts may be anywhere. Of more, the first ones or the last ones are in one place, and the others in another or
    in none: a mark on each gradient can part an axis of 2,048 devices in five, which may be in thousands of ways.

    >>> is_considered([0, 1]), is_considered([0, 0, 1, 1]), is_considered([None, None, None, 1])
    (True, True, True)
    >>> is_considered([0, None, 1]), is_considered([0, 1, 1, 0]), is_considered([0, 1, None, None])
    (False, False, False)
    """
    return len(places) <= FEW_PARTS or sum(a != b for a, b in itertools.pairwise(places)) <= 1


def are_together(places: Sequence[object], base: Sequence[object]) -> bool:
    """Whether those parts of one axis that are elsewhere than in other places are in one place. Two may be anywhere.

    >>> are_together([1, 1, None], [0, 0, 0]), are_together([1, 1, 2], [1, 1, None]), are_together([1, 2], [0, 0])
    (False, True, True)
    """
    return len(places) <= FEW_PARTS or len({a for a, b in zip(places, base, strict=True) if a != b}) <= 1


def _runs(names: Atoms) -> Iterator[Atoms]:
    """All that are next to each other."""
    return (names[a:b] for a, b in itertools.combinations(range(len(names) + 1), 2))


def _some(names: Atoms) -> Iterator[Atoms]:
    """Any of them."""
    return itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1))


class _Graph:
    """The shardings of one array that moves lead over, and the shortest ways from some of them.

    Args:
        table: the steps between shardings of arrays of its rank.
        costs: of the steps that it can take (``StepTable.costs``).
    """

    def __init__(self, table: StepTable, costs: Callable[[], Steps]):
        self._table, self._costs = table, costs
        self._found = np.zeros((0, 0))  # [sources, places]
        self._row = np.zeros(0, dtype=np.int64)  # of each place, -1 if it is no source
        self._priced: tuple[int, Steps] | None = None  # when the table had so many places

    def distances(self, sources: Sequence[Sharding | None], targets: Sequence[Sharding | None]) -> Floats:
        """float64 [sources, targets]: the shortest ways; ``inf`` where steps do not lead, or for None."""
        self._table.add(s for s in sources if s is not None)
        here, there = self._table.places(sources), self._table.places(targets)
        if more := len(self._table) - self._row.size:
            self._row = np.append(self._row, np.full(more, -1))
            self._found = np.pad(self._found, ((0, 0), (0, more)), constant_values=np.inf)
        asked = np.unique(here[here >= 0])
        missing = asked[self._row[asked] < 0]
        if missing.size:
            self._row[missing] = len(self._found) + np.arange(missing.size)
            self._found = np.vstack([self._found, shortest(self._steps(), self._row.size, missing)])
        found = np.full((here.size, there.size), np.inf)
        known, reached = np.flatnonzero(here >= 0), np.flatnonzero(there >= 0)
        found[np.ix_(known, reached)] = self._found[np.ix_(self._row[here[known]], there[reached])]
        return found

    def _steps(self) -> Steps:
        if self._priced is None or self._priced[0] != len(self._table):
            self._priced = len(self._table), self._costs()
        return self._priced[1]


class Moves:
    """What moves cost; what was asked before is known.

    Args:
        mesh: the devices.
        axes: the axes that move as wholes (``axes_of``).
    """

    def __init__(self, mesh: Mesh, axes: tuple[Atoms, ...]):
        self.mesh, self.axes = mesh, axes
        # They need not be factored: from one sharding there are a few steps to others.
        self.atoms_of = {mesh.format_atoms(own): own for own in axes}
        sizes = tuple((name, mesh.count(own)) for name, own in self.atoms_of.items())
        self._coarse = Mesh(sizes or mesh.axes, factored=False)
        self._names_of = {own: name for name, own in self.atoms_of.items()}
        # Parts of one axis: the axis, and the index of the part.
        self._parts = [tuple(map(self._names_of.__getitem__, own)) for own in parts_of(mesh, axes)]
        self._is_parted = any(len(own) > FEW_PARTS for own in self._parts)
        self._visited: set[tuple[Atoms, ...]] | None = set() if has_many(mesh, axes) else None
        # Axes that move in one message: a sum over two of them is cut over both at once.
        runs = [[(), *_runs(own)] if len(own) > FEW_PARTS else list(_some(own)) for own in self._parts]
        chosen = (tuple(itertools.chain(*some)) for some in itertools.product(*runs))
        self._blocks = tuple(sorted(filter(None, chosen), key=lambda b: (len(b), *map(self._coarse.atoms.index, b))))
        self._known: dict[Sharding, Sharding | None] = {}  # over the axes as wholes; None if they take parts of one
        self._lists: dict[int, tuple[Sequence[Sharding], list[Sharding | None]]] = {}
        self._steps: dict[Sharding, list[Priced]] = {}  # from where, over which moves lead
        self._classes: dict[Hashable, int] = {}
        self._tables: dict[tuple[int, Monoids], StepTable] = {}
        self._graphs: dict[tuple[Monoids, tuple[int, ...], int], _Graph] = {}
        self._others: dict[tuple[Sharding, Sharding, tuple[int, ...], int], float] = {}

    def step(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
        """What one step costs, for an array of this global shape; its atoms may be axes, which ``mesh`` tells."""
        raise NotImplementedError

    def share_steps(self, other: Moves) -> None:
        """Uses the steps that ``other`` finds: of the same mesh and axes, with the same classes of prices."""
        assert (self.mesh.axes, self.axes) == (other.mesh.axes, other.axes)
        assert self._visited is None, "of many axes, moves lead over the shardings of one plan only"
        self._steps, self._classes, self._tables = other._steps, other._classes, other._tables

    def price_class(self, step: Step) -> Hashable:
        """Steps of one class cost the same where their parts have the same sizes, before and after."""
        raise NotImplementedError

    def move(self, source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
        """What it costs to bring an array of this global shape from one sharding to another."""
        return float(self.table((source,), (target,), shape, itemsize)[0, 0])

    def table(
        self, sources: Sequence[Sharding], targets: Sequence[Sharding], shape: tuple[int, ...], itemsize: int
    ) -> Floats:
        """float64 [sources, targets]: the moves of an array from each to each."""
        check_deadline()
        here, there = self._all_in_axes(sources), self._all_in_axes(targets)
        monoids = tuple(sorted({monoid for s in targets for _, monoid in s.unreduced}))
        key = monoids, shape, itemsize
        if key not in self._graphs:
            table = self._table(len(shape), monoids)
            self._graphs[key] = _Graph(table, functools.partial(table.costs, shape, itemsize, self.step))
        found = self._graphs[key].distances(here, there)
        for i, j in zip(*np.nonzero(np.isinf(found)), strict=True):
            found[i, j] = self._by_steps(sources[i], targets[j], shape, itemsize)
        return found

    def _by_steps(self, source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
        """The cost of a move of parts of axes, or one that whole axes do not make."""
        key = source, target, shape, itemsize
        if key not in self._others:
            steps = plan_reshard(source, target, shape, itemsize, self.mesh)
            self._others[key] = sum(self.step(step, shape, itemsize, self.mesh) for step in steps)
        return self._others[key]

    def visit(self, shardings: Iterable[Sharding]) -> None:
        """Moves lead over these, whatever is not reduced yet; it matters where there are many axes (``has_many``)."""
        if self._visited is not None:
            for sharding in shardings:
                self._visited.add(tuple(self._names(atoms) or () for atoms in sharding.dims))

    def _is_passed(self, here: Sharding) -> bool:
        """Whether moves lead over it: over shardings that ``places_for`` considers, of dimensions and of a sum."""
        if self._visited is not None and here.dims not in self._visited:
            return False
        if not self._is_parted:
            return True
        place_of = {name: d for d, own in enumerate(here.dims) for name in own}
        place_of |= dict.fromkeys(dict(here.unreduced), -1)
        for names in self._parts:
            if not is_considered([place_of.get(name) for name in names]):
                return False
            for own in here.dims:
                turn = [names.index(name) for name in own if name in names]
                if sum(b - a != 1 for a, b in itertools.pairwise(turn)) > 1:
                    return False
        return True

    def _all_in_axes(self, some: Sequence[Sharding]) -> list[Sharding | None]:
        """Shardings over the axes as wholes; what was asked before with the very same tuple is known."""
        if isinstance(some, tuple) and (known := self._lists.get(id(some))) is not None and known[0] is some:
            return known[1]
        found = [self._in_axes(s) for s in some]
        if isinstance(some, tuple) and len(some) > 1:
            if len(self._lists) > _MANY:
                self._lists.clear()
            self._lists[id(some)] = some, found
        return found

    def _table(self, rank: int, monoids: Monoids) -> StepTable:
        """The steps between shardings of arrays of this rank; parts of a sum may have ``monoids``."""
        if (rank, monoids) not in self._tables:
            steps = functools.partial(self._steps_from, monoids=monoids)
            self._tables[rank, monoids] = StepTable(self._coarse, steps)
        return self._tables[rank, monoids]

    def _steps_from(self, here: Sharding, monoids: Monoids) -> Iterator[Priced]:
        """The steps from a sharding of an array that every cut divides."""
        mesh, names = self._coarse, self._coarse.atoms
        if here not in self._steps:
            steps = even_steps(here, self._blocks, mesh)
            self._steps[here] = [self._priced(step) for step in steps if self._is_passed(step.after)]
        yield from self._steps[here]
        for name, monoid in itertools.product((name for name in names if name not in here.atoms), monoids):
            after = here.with_unreduced({**dict(here.unreduced), name: monoid})
            if self._is_passed(after):
                yield self._priced(Step(TO_PARTIAL, (name,), here, after, monoid=monoid))

    def _priced(self, step: Step) -> Priced:
        return priced(step, self._coarse, self._classes.setdefault(self.price_class(step), len(self._classes)))

    def _in_axes(self, sharding: Sharding) -> Sharding | None:
        """A sharding over the axes as wholes; None if it takes a part of one."""
        if sharding not in self._known:
            monoids = dict(sharding.unreduced)
            dims = tuple(self._names(atoms) for atoms in sharding.dims)
            unreduced = {name: monoids[own[0]] for name, own in self.atoms_of.items() if own[0] in monoids}
            whole = {a: unreduced[name] for name in unreduced for a in self.atoms_of[name]}
            found = Sharding(tuple(own or () for own in dims)).with_unreduced(unreduced)
            self._known[sharding] = None if whole != monoids or any(own is None for own in dims) else found
        return self._known[sharding]

    def _names(self, atoms: Atoms) -> Atoms | None:
        names, i = [], 0
        while i < len(atoms):
            own = next((own for own in self.axes if atoms[i : i + len(own)] == own), None)
            if own is None:
                return None
            names.append(self._names_of[own])
            i += len(own)
        return tuple(names)


@tabulated(65536)
def even_steps(here: Sharding, blocks: tuple[Atoms, ...], mesh: Mesh) -> tuple[Step, ...]:
    """The steps from a sharding of an array that every cut divides; but for those to parts of a sum.

    Args:
        here: where from.
        blocks: axes that move in one message.
        mesh: of the axes.
    """
    shape = (mesh.size,) * len(here.dims)
    permuted = (Step(PERMUTE, mesh.atoms, here, after) for after in swapped(here, shape, mesh))
    return (*steps_from(here, frozenset(), blocks, shape, mesh), *permuted)


def swapped(here: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Sharding]:
    """Two axes in each other's places, and the axes of a dimension in another order."""
    sizes = mesh.atom_sizes
    for d, own in enumerate(here.dims):
        for turned in itertools.permutations(own) if 1 < len(own) <= FEW else ():
            if turned != own:
                yield Sharding((*here.dims[:d], turned, *here.dims[d + 1 :]), here.unreduced)
    for a, b in itertools.combinations(sizes, 2):
        if not {a, b} & {x for dim in here.dims for x in dim} or {a, b} & set(dict(here.unreduced)):
            continue
        other = {a: b, b: a}
        found = Sharding(tuple(tuple(other.get(x, x) for x in dim) for dim in here.dims), here.unreduced)
        if sizes[a] == sizes[b] or can_change(here, found, shape, mesh):
            yield found
