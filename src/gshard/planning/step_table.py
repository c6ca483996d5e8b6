"""Tabulates the steps between all shardings of one rank, and prices them for arrays of any shape.

The possible steps depend on the shape only through divisibility. So gshard finds them once for each rank, for a shape
that every split divides. For each shape, numpy then removes the steps whose cuts do not line up. The cost of a step
depends on few numbers: its group (``axis_steps``), the sizes of the parts before and after, and whether their layout
changes. Steps with equal numbers are of one kind, and gshard prices one of each kind.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gshard.comm.steps import ALL_GATHER, ALL_SLICE, ALL_TO_ALL, REDUCE_SCATTER, Step, is_exchange
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.solver.problem import Floats, Ints

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
