"""Moves: what it costs to bring an array from any sharding to any other, where whole axes move.

From one sharding a few steps of ``comm.steps`` lead to others, and so to all. The axes are those of the
mesh, or parts of one where a mark names a part. What a step costs an objective says: bytes, or seconds on a machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from gshard.comm.exchange import can_change
from gshard.comm.reshard import plan_reshard, single_steps
from gshard.comm.steps import PERMUTE, TO_PARTIAL, Step
from gshard.core.deadline import check_deadline
from gshard.core.mesh import Atoms, Mesh
from gshard.core.sharding import Sharding
from gshard.solver.problem import Floats, Ints

Monoids = tuple[str, ...]

# Axes of one dimension that are put in every order, and parts of one axis that may be anywhere.
_FEW = 3
# Lists of shardings whose numbers are kept.
_MANY = 20_000
# Numbers that are added at once where shortest ways are found.
_AT_ONCE = 1 << 20


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
    return sum(map(bool, parts_of(mesh, axes))) > _FEW


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
    if not has_many(mesh, axes) or len(one) >= _FEW or not named.isdisjoint(one[-1]):
        return [one]
    ends = list(itertools.accumulate(len(own) for own in axes if own[0] in one[-1]))
    return [(*one[:-1], one[-1][:end], one[-1][end:]) for end in ends[:-1]]


def is_considered(places: Sequence[object]) -> bool:
    """Whether the parts of one axis may be in these places at once (None: in none).

    Few parts may be anywhere. Of more, the first ones or the last ones are in one place, and the others in another or
    in none: a mark on each gradient can part an axis of 2,048 devices in five, which may be in thousands of ways.

    >>> is_considered([0, None, 1]), is_considered([0, 0, 1, 1]), is_considered([None, None, None, 1])
    (True, True, True)
    >>> is_considered([0, 1, 1, 0]), is_considered([0, 1, None, None])
    (False, False)
    """
    return len(places) <= _FEW or sum(a != b for a, b in itertools.pairwise(places)) <= 1


def _runs(names: Atoms) -> Iterator[Atoms]:
    """All that are next to each other."""
    return (names[a:b] for a, b in itertools.combinations(range(len(names) + 1), 2))


def _some(names: Atoms) -> Iterator[Atoms]:
    """Any of them."""
    return itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1))


class _Graph:
    """The shardings of one array that moves lead over, and the shortest ways from some of them."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # of shardings, by their numbers
        self._steps: list[dict[int, float]] = []
        self._rows: dict[int, Floats] = {}

    def reach(self, sources: Sequence[int], steps_from: Callable[[int], dict[int, float]]) -> None:
        """Finds the shortest ways from all of these, which are numbers of shardings."""
        missing = [number for number in dict.fromkeys(sources) if number not in self._rows]
        if not missing:
            return
        queue = [number for number in missing if number not in self._places]
        self._places |= {number: k for k, number in enumerate(queue, len(self._places))}
        for number in queue:  # which grows
            self._steps.append(found := steps_from(number))
            for after in found:
                if after not in self._places:
                    self._places[after] = len(self._places)
                    queue.append(after)
        rows = self._shortest([self._places[number] for number in missing])
        self._rows.update(zip(missing, rows, strict=True))

    def _shortest(self, sources: Sequence[int]) -> Floats:
        """float64 [sources, places]: of the shortest ways, by one step more in each round until no way is shorter."""
        begins = np.repeat(np.arange(len(self._steps)), [len(found) for found in self._steps])
        ends = np.array([self._places[after] for found in self._steps for after in found], dtype=np.int64)
        costs = np.array([cost for found in self._steps for cost in found.values()], dtype=np.float64)
        order = np.argsort(ends, kind="stable")
        begins, ends, costs = begins[order], ends[order], costs[order]
        reached, first = np.unique(ends, return_index=True)
        rows = np.full((len(sources), len(self._steps)), np.inf)
        rows[np.arange(len(sources)), sources] = 0
        for some in np.array_split(rows, -(-rows.shape[0] * ends.size // _AT_ONCE)) if ends.size else ():
            before = None
            while before is None or not np.array_equal(before, some):
                before = some.copy()
                by_step = np.minimum.reduceat(some[:, begins] + costs, first, axis=1)
                some[:, reached] = np.minimum(some[:, reached], by_step)
        return rows

    def distances(self, sources: Ints, targets: Ints) -> Floats:
        """float64 [sources, targets]: between numbers of shardings; ``inf`` where steps do not lead, or for -1."""
        found = np.full((sources.size, targets.size), np.inf)
        places = np.array([self._places.get(number, -1) for number in targets.tolist()], dtype=np.int64)
        for i, number in enumerate(sources.tolist()):
            if number >= 0:
                row = self._rows[number]
                known = (places >= 0) & (places < row.size)
                found[i, known] = row[places[known]]
        return found


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
        # Parts of one axis: which axis, and the how manyth of its parts.
        self._parts = [tuple(map(self._names_of.__getitem__, own)) for own in parts_of(mesh, axes)]
        self._is_parted = any(len(own) > _FEW for own in self._parts)
        self._visited: set[tuple[Atoms, ...]] | None = set() if has_many(mesh, axes) else None
        # Axes that move in one message: a sum over two of them is cut over both at once.
        runs = [[(), *_runs(own)] if len(own) > _FEW else list(_some(own)) for own in self._parts]
        chosen = (tuple(itertools.chain(*some)) for some in itertools.product(*runs))
        self._blocks = tuple(sorted(filter(None, chosen), key=lambda b: (len(b), *map(self._coarse.atoms.index, b))))
        self._shardings: list[Sharding] = []
        self._passed: dict[int, bool] = {}  # whether moves lead over them
        self._numbers: dict[Sharding, int] = {}  # of shardings over the axes as wholes
        self._known: dict[Sharding, int] = {}  # the same for shardings over atoms; -1 if they take parts of an axis
        self._lists: dict[int, tuple[Sequence[Sharding], Ints]] = {}
        self._graphs: dict[tuple[Monoids, tuple[int, ...], int], _Graph] = {}
        self._others: dict[tuple[Sharding, Sharding, tuple[int, ...], int], float] = {}

    def step(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
        """What one step costs, for an array of this global shape; its atoms may be axes, which ``mesh`` tells."""
        raise NotImplementedError

    def move(self, source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
        """What it costs to bring an array of this global shape from one sharding to another."""
        return float(self.table((source,), (target,), shape, itemsize)[0, 0])

    def table(
        self, sources: Sequence[Sharding], targets: Sequence[Sharding], shape: tuple[int, ...], itemsize: int
    ) -> Floats:
        """float64 [sources, targets]: the moves of an array from each to each."""
        check_deadline()
        here, there = self._numbered(sources), self._numbered(targets)
        monoids = tuple(sorted({monoid for s in targets for _, monoid in s.unreduced}))
        graph = self._graphs.setdefault((monoids, shape, itemsize), _Graph())
        graph.reach(here[here >= 0].tolist(), lambda number: self._steps_from(number, monoids, shape, itemsize))
        found = graph.distances(here, there)
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

    def _number(self, sharding: Sharding) -> int:
        if sharding not in self._numbers:
            self._numbers[sharding] = len(self._shardings)
            self._shardings.append(sharding)
        return self._numbers[sharding]

    def _numbered(self, some: Sequence[Sharding]) -> Ints:
        """The numbers of some shardings; what was asked before with the very same tuple is known."""
        if isinstance(some, tuple) and (known := self._lists.get(id(some))) is not None and known[0] is some:
            return known[1]
        found = np.array([self._in_axes(s) for s in some], dtype=np.int64)
        if isinstance(some, tuple) and len(some) > 1:
            if len(self._lists) > _MANY:
                self._lists.clear()
            self._lists[id(some)] = some, found
        return found

    def _steps_from(self, number: int, monoids: Monoids, shape: tuple[int, ...], itemsize: int) -> dict[int, float]:
        """Where one step leads from a sharding, by numbers, and what it costs."""
        here, mesh, names = self._shardings[number], self._coarse, self._coarse.atoms
        steps = [step for step, _ in single_steps(here, frozenset(), self._blocks, shape, itemsize, mesh)]
        for name, monoid in itertools.product((name for name in names if name not in here.atoms), monoids):
            after = here.with_unreduced({**dict(here.unreduced), name: monoid})
            steps.append(Step(TO_PARTIAL, (name,), here, after, monoid=monoid))
        for swapped in self._swapped(here, shape):
            steps.append(Step(PERMUTE, names, here, swapped))
        found: dict[int, float] = {}
        for step in steps:
            number = self._number(step.after)
            if number not in self._passed:
                self._passed[number] = self._is_passed(step.after)
            if self._passed[number]:
                cost = self.step(step, shape, itemsize, mesh)
                found[number] = min(cost, found.get(number, cost))
        return found

    def _swapped(self, here: Sharding, shape: tuple[int, ...]) -> Iterator[Sharding]:
        """Two axes in each other's places, and the axes of a dimension in another order."""
        sizes = self._coarse.atom_sizes
        for d, own in enumerate(here.dims):
            for turned in itertools.permutations(own) if 1 < len(own) <= _FEW else ():
                if turned != own:
                    yield Sharding((*here.dims[:d], turned, *here.dims[d + 1 :]), here.unreduced)
        for a, b in itertools.combinations(sizes, 2):
            if not {a, b} & {x for dim in here.dims for x in dim} or {a, b} & set(dict(here.unreduced)):
                continue
            other = {a: b, b: a}
            swapped = Sharding(tuple(tuple(other.get(x, x) for x in dim) for dim in here.dims), here.unreduced)
            if sizes[a] == sizes[b] or can_change(here, swapped, shape, self._coarse):
                yield swapped

    def _in_axes(self, sharding: Sharding) -> int:
        """The number of a sharding over the axes as wholes; -1 if it takes a part of one."""
        if sharding not in self._known:
            monoids = dict(sharding.unreduced)
            dims = tuple(self._names(atoms) for atoms in sharding.dims)
            unreduced = {name: monoids[own[0]] for name, own in self.atoms_of.items() if own[0] in monoids}
            whole = {a: unreduced[name] for name in unreduced for a in self.atoms_of[name]}
            missing = whole != monoids or any(own is None for own in dims)
            found = Sharding(tuple(own or () for own in dims)).with_unreduced(unreduced)
            self._known[sharding] = -1 if missing else self._number(found)
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
