"""Finds piecewise regions: sets of equations to compute in pieces, up to the reduction of the dimension.

A region begins at an equation that joins, cuts or pads arrays along a dimension. It contains the equations that read
the result, and the equations that compute their other operands. It is closed if the dimension is finally reduced, or if
results are ordinary arrays again. Then no array must be redistributed:

    y = concatenate(cls, x)           cls, x
    e = exp(y @ q)                    exp(cls @ q), exp(x @ q)
    e.sum(), e @ y                    two sums of two terms

Other operands (positions, numbers, zeros to write to) are also computed in pieces. An array from outside of the region
is cut into pieces if it is small compared with the arrays that stay in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from gshard.core.program import Block, Equation, Value
from gshard.rewrite.equation_graph import Array
from gshard.rewrite.piecewise_equation import Touch, may_be_in_pieces, touched
from gshard.rewrite.piecewise_layout import Layout, Source, is_whole, sources_of, spans_along, starts_of, whole
from gshard.rules.movement import index_of

Split = Callable[[Value, int], int]
"""Returns the number of parts of a dimension of a value."""

_MOST = 512  # largest number of arrays in pieces


def may_begin(e: Equation) -> bool:
    """Whether a region may begin with an equation."""
    return index_of(e) is not None and e.mark is None and bool(e.outputs)


class _OpenError(Exception):
    """A region is not closed."""


class _AgainError(Exception):
    """A choice has changed, so the search for the region must start again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moves:
    """The treatment of an equation that moves elements: the dimension, and the sources of each result's pieces."""

    dim: int
    sources: tuple[tuple[Source, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A closed region."""

    dims: dict[Array, int]  # dims, layouts: the dimension and the layout of each array in pieces
    layouts: dict[Array, Layout]
    equations: dict[Equation, Touch | Moves]  # the equations to compute in pieces, each with its treatment
    brought: set[Array]  # the arrays from outside of the region that are cut into pieces
    kept: set[Array]  # results that are computed also as ordinary arrays
    joined: set[Array]  # results that are joined from their pieces


def closed_regions(block: Block, split: Split) -> list[Region]:
    """The closed regions of a block that begin at equations for which arrays would be redistributed."""
    regions: list[Region] = []
    taken: set[Equation] = set()
    graph = _Neighbours(block)
    for e in block.equations:
        if not may_begin(e) or e in taken:
            continue
        for dim in range(len(e.outputs[0].shape)):
            if not _moving(e, dim, split):
                continue
            region = _region(graph, e, dim, split)
            if region is not None and taken.isdisjoint(region.equations):
                regions.append(region)
                taken.update(region.equations)
                break
    return regions


def _bytes(x: Array) -> int:
    return x.bytes if isinstance(x, Value) else 0


def _moving(e: Equation, dim: int, split: Split) -> list[Value]:
    """The operands of an equation that are split along a dimension and would be redistributed."""
    if not may_begin(e) or dim >= len(e.outputs[0].shape) or 0 in e.outputs[0].shape:
        return []
    layouts = [whole(x.shape[dim]) if x.shape else None for x in e.inputs]
    moving = []
    for spans, result in zip(spans_along(e, dim) or (), e.outputs, strict=False):
        sources = sources_of(spans, layouts) or ()
        for s, start in zip(sources, starts_of(tuple(s.piece for s in sources)), strict=True):
            x = e.inputs[s.operand]
            if s.part is None or s.cut is not None or not isinstance(x, Value) or (parts := split(x, dim)) == 1:
                continue
            if start != s.piece.start or -(-result.shape[dim] // parts) != -(-x.shape[dim] // parts):
                moving.append(x)
    return moving


def _is_worth_it(region: Region, dim: int, split: Split) -> bool:
    """Whether a region saves more moved bytes than it moves: arrays that are cut into pieces or joined are moved."""
    saved = sum(x.bytes for e in region.equations for x in _moving(e, dim, split) if x not in region.dims)
    return 2 * sum(_bytes(x) for x in region.brought | region.joined) < saved


def _region(graph: _Neighbours, first: Equation, dim: int, split: Split) -> Region | None:
    """The region that begins at an equation; None if it is not closed or not useful."""
    choice = _Choice()
    while True:
        try:
            region = _Search(graph, choice).run(first, dim)
            if _is_worth_it(region, dim, split):
                return region
            raise _OpenError
        except _AgainError:
            continue
        except _OpenError:
            # The array whose readers were added last may be the one that leads outside.
            if not choice.taken:
                return None
            choice.brought.add(choice.taken.pop())


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """The treatment of arrays that equations outside of a region read."""

    # arrays whose readers are all added to the region, in order
    taken: list[Array] = dataclasses.field(default_factory=list)
    # arrays that are computed as before and cut into pieces
    brought: set[Array] = dataclasses.field(default_factory=set)
    kept: set[Array] = dataclasses.field(default_factory=set)  # arrays that are computed twice


class _Neighbours:
    """The results of a block, and the equations that compute and read each array."""

    def __init__(self, block: Block):
        self.outputs = frozenset(block.outputs)
        self.producers: dict[Any, Equation] = {v: e for e in block.equations for v in e.outputs}
        self.readers: dict[Any, list[Equation]] = {}
        for e in block.equations:
            for x in dict.fromkeys(e.inputs):
                self.readers.setdefault(x, []).append(e)


class _Search:
    """Finds all arrays and equations that must be in pieces if one array is."""

    def __init__(self, graph: _Neighbours, choice: _Choice):
        self.outputs, self.producers, self.readers = graph.outputs, graph.producers, graph.readers
        self.choice = choice
        self.brought = choice.brought
        self.kept = choice.kept
        self.dims: dict[Array, int] = {}
        self.layouts: dict[Array, Layout] = {}
        self.forced: set[Array] = set()  # arrays whose readers must all be in the region
        self.equations: dict[Equation, Touch | Moves] = {}
        self.joined: set[Array] = set()
        self.waiting: list[Array] = []

    def run(self, first: Equation, dim: int) -> Region:
        """The region that begins at an equation."""
        self.move(first, dim, begins=True)
        while self.waiting:
            x = self.waiting.pop()
            if x in self.forced:
                if x in self.outputs:
                    self.joined.add(x)
                for e in self.readers.get(x, ()):
                    self.meet(e)
            if x not in self.brought:
                if x in self.producers:
                    self.meet(self.producers[x])
                else:
                    self.bring(x)
        for x in self.dims:
            if x not in self.forced and x not in self.brought and x not in self.kept and self.is_read_elsewhere(x):
                self.keep(x)
        for e, treatment in self.equations.items():
            if isinstance(treatment, Moves) and treatment != self.moves(e, treatment.dim):
                raise _OpenError  # an operand became an array in pieces later
        return Region(self.dims, self.layouts, self.equations, self.brought & self.dims.keys(), self.kept, self.joined)

    def is_read_elsewhere(self, x: Array) -> bool:
        return x in self.outputs or any(not self.reads_pieces(e, x) for e in self.readers.get(x, ()))

    def reads_pieces(self, e: Equation, x: Array) -> bool:
        treatment = self.equations.get(e)
        if isinstance(treatment, Touch):
            return all(d is not None for y, d in zip(e.inputs, treatment.operands, strict=True) if y is x)
        return treatment is not None

    def add(self, x: Array, dim: int, layout: Layout, *, forced: bool = False) -> None:
        """Adds an array in pieces; ``forced`` if all its readers must be in the region."""
        forced = forced or x in self.choice.taken
        if x in self.dims:
            if (self.dims[x], self.layouts[x]) != (dim, layout):
                raise _OpenError
            if not forced or x in self.forced:
                return
        if forced and (x in self.brought or x in self.kept):
            raise _OpenError
        self.dims[x], self.layouts[x] = dim, layout
        if forced:
            self.forced.add(x)
        self.waiting.append(x)
        if len(self.dims) > _MOST:
            raise _OpenError

    def bring(self, x: Array) -> None:
        """Decides that an array is computed as before and cut into pieces."""
        if x in self.forced:
            raise _OpenError
        self.brought.add(x)
        raise _AgainError

    def keep(self, x: Array) -> None:
        """Decides on the treatment of an array in pieces that equations outside of the region read."""
        e = self.producers[x]
        if len(e.outputs) == 1 and index_of(e) is None and not any(y in self.dims for y in e.inputs):
            self.kept.add(x)
        else:
            self.choice.taken.append(x)
        raise _AgainError

    def refuse(self, e: Equation) -> None:
        """Excludes an equation that cannot be computed in pieces: it reads and computes ordinary arrays."""
        if e in self.equations:
            raise _OpenError
        self.joined.update(x for x in e.inputs if x in self.forced)
        for x in e.outputs:
            if x in self.dims and x not in self.brought:
                self.bring(x)

    def meet(self, e: Equation) -> None:
        """Adds an equation that reads or computes an array in pieces, and its other arrays."""
        known = [x for x in e.inputs if x in self.forced]
        known += [v for v in e.outputs if v in self.dims and v not in self.brought]
        dims, layouts = {self.dims[x] for x in known}, {self.layouts[x] for x in known}
        if len(dims) == 1 and spans_along(e, dim := next(iter(dims))) is not None:
            self.move(e, dim)
            return
        t = self.touch(e, known)
        if t is None or len(layouts) != 1 or not may_be_in_pieces(t, layout := next(iter(layouts))):
            self.refuse(e)
            return
        operands, results = zip(e.inputs, t.operands, strict=True), zip(e.outputs, t.results, strict=True)
        for x, d in operands:
            if d is not None:
                self.add(x, d, layout)
            elif x in self.forced:
                self.joined.add(x)
        for v, d in results:
            if v in self.brought:
                raise _OpenError
            if d is not None:
                self.add(v, d, layout, forced=any(x in self.forced for x in e.inputs))
        self.equations[e] = t

    def touch(self, e: Equation, known: Sequence[Array]) -> Touch | None:
        """The factor of an equation along which known arrays are in pieces; None if it is not a single factor."""
        if e.rule is None:
            return None
        tensors = zip((*e.inputs, *e.outputs), (*e.rule.operands, *e.rule.results), strict=True)
        factors_of_dims = {dims[self.dims[x]] for x, dims in tensors if x in known}
        if len(factors_of_dims) != 1:
            return None
        (factors,) = factors_of_dims
        return touched(e, factors[0]) if len(factors) == 1 else None

    def move(self, e: Equation, dim: int, *, begins: bool = False) -> None:
        """Adds an equation that moves elements along a dimension, and its results."""
        forced = begins or any(x in self.forced for x in e.inputs)
        moves = self.moves(e, dim)
        layouts = [tuple(s.piece for s in sources) for sources in moves.sources] if moves else []
        results = list(zip(e.outputs, layouts, strict=False))
        if moves is None or any(v in self.brought and not is_whole(layout) for v, layout in results):
            self.refuse(e)
            return
        for v, layout in results:
            if not forced and v in self.dims and (self.dims[v], self.layouts[v]) != (dim, layout):
                self.bring(v)
            if is_whole(layout):
                if v in self.dims and v not in self.brought:
                    self.bring(v)
            elif forced or v in self.dims:
                self.add(v, dim, layout, forced=forced)
        self.equations[e] = moves

    def moves(self, e: Equation, dim: int) -> Moves | None:
        """The sources of the pieces of all results of an equation that moves elements; None if there are none."""
        layouts = [self.layouts.get(x, whole(x.shape[dim])) if x.shape else None for x in e.inputs]
        sources_of_results = [sources_of(spans, layouts) for spans in spans_along(e, dim) or ()]
        if not sources_of_results or any(sources is None for sources in sources_of_results):
            return None
        return Moves(dim, tuple(tuple(sources or ()) for sources in sources_of_results))
