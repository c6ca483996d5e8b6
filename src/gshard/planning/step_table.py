"""Tabulates the steps between all shardings of one rank, and prices them for arrays of any shape.

The possible steps depend on the shape only through divisibility. So gshard finds them once for each rank, for a shape
that every split divides. For each shape, numpy then removes the steps whose cuts do not line up. The cost of a step
depends on few numbers: its class (``Moves.price_class``), the sizes of the parts before and after, and whether their
layout changes. gshard prices one step of each kind.
"""

from __future__ import annotations

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
_KINDS = {ALL_SLICE: _CUT, ALL_GATHER: _GATHERED, REDUCE_SCATTER: _SCATTERED, ALL_TO_ALL: _TURNED}


class Priced(NamedTuple):
    """A step, and the numbers that decide if it is possible and what it costs: kind, dimensions, devices, class."""

    step: Step
    numbers: tuple[int, int, int, int, int]


def priced(step: Step, mesh: Mesh, price_class: int) -> Priced:
    """A step over the axes of a mesh, with the number of its price class (``Moves.price_class``)."""
    kind = _EXCHANGED if is_exchange(step, mesh) else _KINDS.get(step.kind, _OTHER)
    return Priced(step, (kind, max(step.dim, 0), max(step.to, 0), mesh.count(step.atoms), price_class))


class Steps(NamedTuple):
    """Steps that an array can take, in layers: each place is the end of at most one step of a layer.

    Attributes:
        begins: int64 [steps], the place where each step begins.
        ends: int64 [steps], the place where it ends.
        costs: float64 [steps].
        layer: int64 [steps], increasing.
    """

    begins: Ints
    ends: Ints
    costs: Floats
    layer: Ints


class StepTable:
    """The steps between the shardings of arrays of one rank.

    Args:
        mesh: the mesh of the shardings' axes.
        steps_from: finds the steps from a sharding, for a shape that every split divides.
    """

    def __init__(self, mesh: Mesh, steps_from: Callable[[Sharding], Iterable[Priced]]):
        self.mesh, self._steps_from = mesh, steps_from
        self._places: dict[Sharding, int] = {}
        self._steps: list[Step] = []
        self._rows: list[tuple[int, ...]] = []  # for each step: begin, end, and its numbers
        self._parts: list[list[int]] = []
        self._made: tuple[Ints, Ints] | None = None
        self._known: dict[int, tuple[Sequence[Sharding | None], Ints]] = {}
        self._possible: dict[tuple[int, ...], tuple[Steps, list[int], Ints]] = {}  # by the shape of an array

    def __len__(self) -> int:
        return len(self._places)

    def add(self, shardings: Iterable[Sharding]) -> None:
        """Adds shardings and all shardings that steps reach from them."""
        queue = [s for s in dict.fromkeys(shardings) if s not in self._places]
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

    def _arrays(self) -> tuple[Ints, Ints]:
        """int64 [7, steps]: the rows; int64 [shardings, dimensions]: the number of parts of each dimension."""
        if self._made is None:
            rows = np.array(self._rows, dtype=np.int64).reshape(-1, 7).T.copy()
            self._made = rows, np.array(self._parts, dtype=np.int64).reshape(len(self._parts), -1)
        return self._made

    def costs(
        self, shape: tuple[int, ...], itemsize: int, price: Callable[[Step, tuple[int, ...], int, Mesh], float]
    ) -> Steps:
        """The steps that an array of this global shape can take, with their costs.

        Args:
            shape: the global shape of the array.
            itemsize: the bytes of one element.
            price: computes the cost of one step.
        """
        if shape not in self._possible:
            self._possible[shape] = self._found(shape)
        steps, first, which = self._possible[shape]
        priced = np.array([price(self._steps[k], shape, itemsize, self.mesh) for k in first])
        return steps._replace(costs=priced[which]) if first else steps

    def _found(self, shape: tuple[int, ...]) -> tuple[Steps, list[int], Ints]:
        """The steps that an array of this shape can take, one step of each kind of cost, and the kind of each step.

        The result does not depend on prices, so all objectives with this table share it.
        """
        (begins, ends, kind, dim, to, devices, classes), parts = self._arrays()
        if not begins.size:
            return Steps(begins, ends, np.zeros(0), begins), [], begins
        n = np.array(shape, dtype=np.int64)
        local = -(-n // parts)
        possible, uneven = _fitting(n, parts[begins], parts[ends], kind, dim, to, devices)
        # A device copies parts into place if more than one element lies before the dimension, or between the two.
        several = np.minimum(local[begins], local[ends]) > 1
        before = np.concatenate([np.zeros((begins.size, 1), np.int64), several.cumsum(1)], 1)
        at = np.arange(begins.size)
        gathers = (kind == _GATHERED) | (kind == _SCATTERED)
        changed = np.where(kind == _TURNED, before[at, np.maximum(dim, to)] - before[at, np.minimum(dim, to)], 0)
        changed = np.where(gathers, before[at, dim], changed) > 0
        sizes, size = np.unique(local.prod(1), return_inverse=True)
        key = ((classes * sizes.size + size[begins]) * sizes.size + size[ends]) * (int(uneven.max()) + 1) + uneven
        chosen = np.flatnonzero(possible)
        _, first, which = np.unique((2 * key + changed)[chosen], return_index=True, return_inverse=True)
        order, layer = _in_layers(ends[chosen])
        found = Steps(begins[chosen][order], ends[chosen][order], np.zeros(order.size), layer)
        return found, chosen[first].tolist(), which[order]


def _in_layers(ends: Ints) -> tuple[Ints, Ints]:
    """The order of the steps by layer, and the layer of each in that order. A layer ends at each place at most once."""
    order = np.argsort(ends, kind="stable")
    _, first, count = np.unique(ends[order], return_index=True, return_counts=True)
    layer = np.arange(ends.size) - np.repeat(first, count)
    by_layer = np.argsort(layer, kind="stable")
    return order[by_layer], layer[by_layer]


def _fitting(
    n: Ints, before: Ints, after: Ints, kind: Ints, dim: Ints, to: Ints, devices: Ints
) -> tuple[NDArray[np.bool_], Ints]:
    """Which steps the sizes of the parts allow, and a number for each combination of sizes that do not divide evenly.

    Args:
        n: int64 [dimensions], the global shape.
        before: int64 [steps, dimensions], the number of parts of each dimension before the step.
        after: int64 [steps, dimensions], the same after the step.
        kind: int64 [steps], the kinds of the steps.
        dim: int64 [steps], the dimensions that they change.
        to: int64 [steps], the other dimensions of all-to-alls.
        devices: int64 [steps], the sizes of the groups of devices.
    """
    possible, odd = np.ones(kind.size, bool), np.full(kind.size, -1)
    if not n.size:
        return possible, np.zeros(kind.size, np.int64)
    at = np.arange(kind.size)
    size, have, left = n[dim], before[at, dim], after[at, dim]
    turned, cut = kind == _TURNED, (kind == _CUT) | (kind == _SCATTERED)
    possible[cut] = _aligned(size, have, devices)[cut]
    other, there = n[to], before[at, to]
    possible[turned] = (_aligned(size, left, devices) & _aligned(other, there, devices))[turned]
    exchanged = kind == _EXCHANGED
    possible[exchanged] = (n % np.lcm(before[exchanged], after[exchanged]) == 0).all(1)
    odd = np.where((kind == _GATHERED) & ~_aligned(size, left, devices), size * (before.max() + 1) + have, odd)
    odd = np.where((kind == _SCATTERED) & (size % (have * devices) > 0), size * (before.max() + 1) + have, odd)
    odd = np.where(turned & (other % (there * devices) > 0), other * (before.max() + 1) + there, odd)
    return possible, np.unique(odd, return_inverse=True)[1].reshape(-1)


def _aligned(n: Ints, parts: Ints, more: Ints) -> NDArray[np.bool_]:
    """As ``comm.steps.aligned``."""
    return (parts == 1) | (-(-n // parts) == more * -(-n // (parts * more)))


def shortest(steps: Steps, places: int, sources: Ints) -> Floats:
    """float64 [sources, places]: the lengths of the shortest paths; ``inf`` if there is none.

    This is the Bellman-Ford algorithm, for all sources at once: each layer is one numpy operation.

    Args:
        steps: the steps.
        places: the number of places.
        sources: int64 [sources], the places where paths begin.
    """
    if sources.size > (most := max(_FEWEST, _CACHED // max(places, 1))):
        parts = np.split(sources, range(most, sources.size, most))
        return np.vstack([shortest(steps, places, part) for part in parts])
    begins, ends, costs, layer = steps
    costs = costs[:, None]
    lengths = np.full((places, sources.size), np.inf)
    lengths[sources, np.arange(sources.size)] = 0.0
    changed = np.isfinite(lengths).any(1)
    while True:
        active = np.flatnonzero(changed[begins])
        if not active.size:
            return lengths.T.copy()
        before = lengths.copy()
        for layer_steps in np.split(active, np.flatnonzero(np.diff(layer[active])) + 1):
            into = ends[layer_steps]
            lengths[into] = np.minimum(lengths[into], lengths[begins[layer_steps]] + costs[layer_steps])
        changed = (lengths != before).any(1)
