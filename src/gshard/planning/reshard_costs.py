"""Prices reshards between all shardings of a problem, and finds the axes that move as wholes.

The axes are those of the mesh, or parts of an axis if a mark names a part. ``comm.reshard`` plans each reshard, for the
planner as for the emitted program. An objective gives the cost of a step: bytes, or seconds on a machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from gshard.comm.reshard import ways
from gshard.comm.steps import ALL_GATHER, REDUCE_SCATTER, Step
from gshard.core.deadline import check_deadline
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding
from gshard.planning.axes import FEW, FEW_PARTS, has_many
from gshard.solver.problem import Floats, Ints


def axes_of(mesh: Mesh, shardings: Iterable[Sharding] = ()) -> tuple[Atoms, ...]:
    """The axes that move as wholes: those of the mesh, divided where one of these shardings uses a part of an axis.

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
    parts: list[Atoms] = []
    for axis_atoms in mesh.atoms_of.values():
        ends = {len(axis_atoms)}
        for atoms in cuts:
            inside = [a in atoms for a in axis_atoms]
            ends.update(i for i in range(1, len(axis_atoms)) if inside[i] != inside[i - 1])
        starts = [0, *sorted(ends)]
        parts += [axis_atoms[a:b] for a, b in itertools.pairwise(starts) if b > a]
    return tuple(parts)


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
    runs = {atoms for s in shardings for atoms in (*s.dims, tuple(a for a in mesh.atoms if a in dict(s.unreduced)))}
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


class Moves:
    """The costs of reshards, which ``comm.reshard`` plans.

    A table has many reshards, and few of them differ in what matters: the atoms that leave and enter dimensions, and
    how evenly sizes divide. Reshards that agree in this are of one class (``_Classes``). gshard plans one reshard of
    each class, and prices its steps for each number of elements of a part. Equal steps have equal prices.

    Args:
        mesh: the devices.
        axes: the axes that move as wholes (``axes_of``).

    Attributes:
        copies: whether a gather or a cut along an inner dimension costs more, since its parts are copied into place.
    """

    copies = False

    def __init__(self, mesh: Mesh, axes: tuple[Atoms, ...]):
        self.mesh, self.axes = mesh, axes
        self._classes = _classes(dataclasses.replace(mesh, times=None))
        self._costs: dict[int, dict[int, float]] = {}  # by the bytes of an element: of a class and a size
        self._kinds: dict[int, tuple[tuple[_Kind, ...], ...]] = {}  # the ways of each class
        self._laid_out: dict[int, list[list[tuple[Hashable, int, int, int]]]] = {}  # the same for each layout
        self._prices: dict[Hashable, float] = {}  # of a step, by everything that it depends on

    def step(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
        """The cost of one step for an array of this global shape."""
        raise NotImplementedError

    def price_class(self, step: Step) -> Hashable:
        """A key: steps with equal keys cost the same if their parts have the same sizes, and are laid out alike."""
        raise NotImplementedError

    def move(self, source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
        """The cost to reshard an array of this global shape."""
        return float(self.table((source,), (target,), shape, itemsize)[0, 0])

    def table(
        self, sources: Sequence[Sharding], targets: Sequence[Sharding], shape: tuple[int, ...], itemsize: int
    ) -> Floats:
        """float64 [sources, targets]: the costs to reshard an array of this global shape from each to each."""
        check_deadline()
        classes, layouts, parts = self._classes.of(sources, targets, shape, self.copies)
        known, size, columns = self._costs.setdefault(itemsize, {}), math.prod(shape), len(targets)
        elements = size // parts  # of a part before, for each source
        keys = _mixed(layouts, elements[:, None]).ravel().tolist()
        costs = list(map(known.get, keys))
        if None in costs:
            for k, (key, cost) in enumerate(zip(keys, costs, strict=True)):
                if cost is not None:
                    continue
                if (cost := known.get(key)) is None:
                    i, j = divmod(k, columns)
                    number, layout = int(classes[i, j]), int(layouts[i, j])
                    reshard = sources[i], targets[j], shape, itemsize
                    cost = known[key] = self._cost(number, layout, int(elements[i]), reshard)
                costs[k] = cost
        return np.array(costs, dtype=float).reshape(len(sources), columns)

    def _cost(
        self, number: int, layout: int, elements: int, reshard: tuple[Sharding, Sharding, tuple[int, ...], int]
    ) -> float:
        """The cost of a reshard: the least of its ways.

        Args:
            number: the number of its class.
            layout: the number of its class and of the dimensions that are inner ones.
            elements: of a part before.
            reshard: the source, the target, the shape and the bytes of an element.
        """
        source, target, shape, itemsize = reshard
        if number & 1:  # parts are unequal
            found = ways(source, target, shape, self.mesh)
            return min(sum(self.step(step, shape, itemsize, self.mesh) for step in way) for way in found)
        if number not in self._kinds:
            found = ways(source, target, shape, self.mesh)
            self._kinds[number] = tuple(tuple(self._kind(step, source, target) for step in way) for way in found)
        if layout not in self._laid_out:
            inner = self._inner(source, target, shape) if self.copies else {}
            self._laid_out[layout] = [
                [((kind, inner.get(dims, dims is None)), a, b, c) for kind, dims, a, b, c in way]
                for way in self._kinds[number]
            ]
        least = math.inf
        for w, way in enumerate(self._laid_out[layout]):
            total = 0.0
            for s, (kind, parts, before, after) in enumerate(way):
                key = kind, elements * parts // before, elements * parts // after, itemsize
                if (price := self._prices.get(key)) is None:
                    step = ways(source, target, shape, self.mesh)[w][s]
                    price = self._prices[key] = self.step(step, shape, itemsize, self.mesh)
                total += price
            least = min(least, total)
        return least

    def _kind(self, step: Step, source: Sharding, target: Sharding) -> _Kind:
        before, start, end = (math.prod(map(self.mesh.count, s.dims)) for s in (source, step.before, step.after))
        dims = (source.dims[step.dim], target.dims[step.dim]) if step.kind in (ALL_GATHER, REDUCE_SCATTER) else None
        return self.price_class(step), dims, before, start, end

    def _inner(self, source: Sharding, target: Sharding, shape: tuple[int, ...]) -> dict[object, bool]:
        """For the atoms of each dimension before and after, whether elements of a part lie before the dimension."""
        found, is_inner = dict[object, bool](), False
        for pair, n in zip(
            zip(source.dims, target.dims, strict=True), source.local_shape(self.mesh, shape), strict=True
        ):
            found[pair] = is_inner
            is_inner |= n > 1
        return found


# A step: a key of what its cost depends on besides sizes; of a gather or a cut, the atoms of the dimension before and
# after the reshard; and the numbers of parts of the source, before the step and after it.
_Kind = tuple[Hashable, tuple[Atoms, Atoms] | None, int, int, int]
_FACTOR, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


class _Classes:
    """Classes of reshards. Those of a class have the same steps and costs for parts of equal numbers of elements.

    Args:
        mesh: the devices.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._codes: dict[Hashable, int] = {}  # of the atoms of a dimension, of what is unreduced, and of sizes
        self._devices: list[int] = []  # for each code, the devices of its atoms
        self._coded: dict[int, tuple[Sequence[Sharding], Ints]] = {}
        self._found: dict[Hashable, tuple[object, tuple[Any, Any, Ints]]] = {}

    def of(
        self, sources: Sequence[Sharding], targets: Sequence[Sharding], shape: tuple[int, ...], copies: bool
    ) -> tuple[Any, Any, Ints]:
        """The classes of all reshards, uint64 [sources, targets].

        Returns:
            the classes; hashes of them and of the dimensions that are inner ones, if ``copies``; and int64 [sources],
            the numbers of parts.
        """
        size = self.mesh.size
        # With as many elements as devices or fewer, a part may have one element.
        sizes: tuple[Hashable, ...] = tuple(n if n <= size else -size - math.gcd(n, size) for n in shape)
        before, after = self._codes_of(sources), self._codes_of(targets)
        devices = np.array(self._devices, dtype=np.int64)
        every = np.concatenate([before, after])[:, :-1]
        uneven = (np.array(shape, dtype=np.int64) % devices[every]).any(0).tolist() if shape else []
        if any(uneven):  # then costs depend on the whole shape
            sizes = tuple((n, u) for n, u in zip(shape, uneven, strict=True))
        key = id(sources), id(targets), sizes, copies
        if key not in self._found:
            found = self._classified(before, after, devices, shape, sizes, copies)
            if not (isinstance(sources, tuple) and isinstance(targets, tuple)):
                return found
            self._found[key] = (sources, targets), found
        return self._found[key][1]

    def _codes_of(self, shardings: Sequence[Sharding]) -> Ints:
        """int64 [shardings, dimensions + 1]: codes of the atoms of each dimension, and of what is unreduced."""
        known = self._coded.get(id(shardings))
        if known is None or known[0] is not shardings:
            rows = [[*map(self._code, s.dims), self._code(s.unreduced)] for s in shardings]
            known = shardings, np.array(rows, dtype=np.int64)
            if isinstance(shardings, tuple):
                self._coded[id(shardings)] = known
        return known[1]

    def _code(self, of: Hashable) -> int:
        if of not in self._codes:
            self._codes[of] = len(self._codes)
            atoms = [a for a in of if isinstance(a, str)] if isinstance(of, tuple) else []
            self._devices.append(self.mesh.count(atoms))
        return self._codes[of]

    def _classified(
        self, before: Ints, after: Ints, devices: Ints, shape: tuple[int, ...], sizes: Sequence[Hashable], copies: bool
    ) -> tuple[Any, Any, Ints]:
        """The result of ``of``. A class is a sum of hashes, one for each dimension that changes."""
        pairs = len(before), len(after)
        hashes, sized, placed, layouts = (np.zeros(pairs, np.uint64) for _ in range(4))
        has_spare, unequal, nothing = np.zeros(pairs, bool), np.zeros(pairs, bool), np.uint64(0)
        parts, is_inner = np.ones(len(before), np.int64), np.zeros(len(before), bool)
        sums = before[:, -1, None], after[None, :, -1]
        combines = sums[0] != sums[1]
        for d, (n, size) in enumerate(zip(shape, sizes, strict=True)):
            have, wanted = before[:, d], after[:, d]
            local, uneven = -(-n // devices[have]), n % devices[have] > 0
            changes = (have[:, None] != wanted) | uneven[:, None]
            unequal |= uneven[:, None] | (n % devices[wanted] > 0)
            change = _mixed(_mixed(have, 0)[:, None], wanted)
            hashes += np.where(changes, change, nothing)
            sized += np.where(changes, _mixed(change, self._code(size)), nothing)
            has_spare |= ~changes & (local % self.mesh.size == 0)[:, None]
            if combines.any():
                placed += np.where(changes, nothing, _mixed(have, 0)[:, None])
            if copies:
                layouts += np.where(changes & is_inner[:, None], change, nothing)
                is_inner |= local > 1
            parts *= devices[have]
        hashes = np.where(has_spare & ~unequal, hashes, sized)
        # Atoms that split nothing may help to reduce.
        hashes = np.where(combines, hashes + _mixed(placed, 0), hashes)
        hashes = _mixed(hashes, 2 * ((sums[0] << 20) + sums[1]) + has_spare)
        hashes = hashes & ~np.uint64(1) | unequal
        return hashes, _mixed(hashes, layouts), parts


def _mixed(hashes: Any, more: Any) -> Any:
    """uint64: a hash of two arrays of numbers."""
    mixed = (np.asarray(hashes).astype(np.uint64) + np.asarray(more).astype(np.uint64) + np.uint64(1)) * _FACTOR
    return mixed ^ (mixed >> _HALF)


@tabulated(64)
def _classes(mesh: Mesh) -> _Classes:
    """The classes of reshards on a mesh. Plans that are made together share them."""
    return _Classes(mesh)
