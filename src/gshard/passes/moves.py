"""Moves: what it costs to bring an array from any sharding to any other, where whole axes move.

From one sharding a few steps of ``comm.steps`` lead to others, and so to all (Dijkstra). The axes are those of the
mesh, or parts of one where a mark names a part. What a step costs an objective says: bytes, or seconds on a machine.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gshard.comm.exchange import can_change
from gshard.comm.reshard import plan_reshard, single_steps
from gshard.comm.steps import PERMUTE, TO_PARTIAL, Step
from gshard.core.mesh import Atoms, Mesh
from gshard.core.sharding import Sharding
from gshard.solver.problem import Floats, Ints

Monoids = tuple[str, ...]

# Axes of one dimension that are put in every order; more of them stay in the mesh's.
_FEW = 3
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
        self._shardings: list[Sharding] = []
        self._numbers: dict[Sharding, int] = {}  # of shardings over the axes as wholes
        self._known: dict[Sharding, int] = {}  # the same for shardings over atoms; -1 if they take parts of an axis
        self._lists: dict[int, tuple[Sequence[Sharding], Ints]] = {}
        self._steps: dict[tuple[Sharding, Monoids, tuple[int, ...], int], list[tuple[Sharding, float]]] = {}
        self._rows: dict[tuple[int, Monoids, tuple[int, ...], int], Floats] = {}
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
        here, there = self._numbered(sources), self._numbered(targets)
        monoids = tuple(sorted({monoid for s in targets for _, monoid in s.unreduced}))
        found = np.full((len(sources), len(targets)), np.inf)
        for i, number in enumerate(here.tolist()):
            if number >= 0:
                row = self._row(number, monoids, shape, itemsize)
                known = (there >= 0) & (there < row.size)
                found[i, known] = row[there[known]]
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

    def _row(self, source: int, monoids: Monoids, shape: tuple[int, ...], itemsize: int) -> Floats:
        """float64 [numbers]: from one sharding to all others; ``inf`` where moves of whole axes do not lead."""
        key = source, monoids, shape, itemsize
        if key not in self._rows:
            reached = self._reached(self._shardings[source], monoids, shape, itemsize)
            row = np.full(len(self._numbers), np.inf)
            for sharding, cost in reached.items():
                row[self._numbers[sharding]] = cost
            self._rows[key] = row
        return self._rows[key]

    def _reached(
        self, source: Sharding, monoids: Monoids, shape: tuple[int, ...], itemsize: int
    ) -> dict[Sharding, float]:
        reached: dict[Sharding, float] = {}
        order = itertools.count()
        queue: list[tuple[float, int, Sharding]] = [(0.0, next(order), source)]
        while queue:
            spent, _, here = heapq.heappop(queue)
            if here in reached:
                continue
            reached[here] = spent
            self._number(here)
            for after, more in self._steps_from(here, monoids, shape, itemsize):
                if after not in reached:
                    heapq.heappush(queue, (spent + more, next(order), after))
        return reached

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

    def _steps_from(
        self, here: Sharding, monoids: Monoids, shape: tuple[int, ...], itemsize: int
    ) -> list[tuple[Sharding, float]]:
        key = here, monoids, shape, itemsize
        if key not in self._steps:
            mesh, names = self._coarse, self._coarse.atoms
            # Axes that move in one message: a sum over two of them is cut over both at once.
            blocks = tuple(b for k in range(1, len(names) + 1) for b in itertools.combinations(names, k))
            steps = [step for step, _ in single_steps(here, frozenset(), blocks, shape, itemsize, mesh)]
            for name, monoid in itertools.product((name for name in names if name not in here.atoms), monoids):
                after = here.with_unreduced({**dict(here.unreduced), name: monoid})
                steps.append(Step(TO_PARTIAL, (name,), here, after, monoid=monoid))
            for swapped in self._swapped(here, shape):
                steps.append(Step(PERMUTE, names, here, swapped))
            self._steps[key] = [(step.after, self.step(step, shape, itemsize, mesh)) for step in steps]
        return self._steps[key]

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
            partial = self._names(tuple(a for a in self.mesh.atoms if a in monoids))
            unreduced = {name: monoids[self.atoms_of[name][0]] for name in partial or ()}
            missing = any(own is None for own in (*dims, partial))
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
