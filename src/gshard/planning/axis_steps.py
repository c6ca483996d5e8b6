"""Finds the steps between shardings over whole mesh axes, for the objectives that price them.

The steps depend on the mesh and its axes only, so all objectives of one plan share them: bytes, and seconds with
messages alone and joined. Steps of one group (``Numbered``) cost the same in every objective if their parts have the
same sizes, so an objective classifies one step of each group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence

from gshard.comm.exchange import can_change
from gshard.comm.reshard import steps_from
from gshard.comm.steps import LOCAL, PERMUTE, TO_PARTIAL, Step, is_exchange
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding
from gshard.planning.step_table import Numbered, StepTable, numbered

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
        # the index of each kind of steps so far (``step_table.Possible``)
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
