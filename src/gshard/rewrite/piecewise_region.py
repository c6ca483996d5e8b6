"""Piecewise regions: finds the equations to compute in pieces, until the dimension is reduced.

A region begins where arrays are joined, cut or padded along a dimension. It contains the equations that read them, and
the equations that make the other operands of these. It is closed if the dimension is reduced in the end, or if arrays
leave as they came. Then nothing of it has to be redistributed:

    y = concatenate(cls, x)           cls, x
    e = exp(y @ q)                    exp(cls @ q), exp(x @ q)
    e.sum(), e @ y                    two sums of two terms

What is computed in it of other arrays (positions, numbers, zeros that are written to) is computed in pieces, too; an
array from elsewhere is cut in pieces, if it is small beside those that stay where they are.
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
"""In how many parts a dimension of a value is split."""

_MOST = 512  # arrays in pieces


def may_begin(e: Equation) -> bool:
    """Whether a region may begin with an equation."""
    return index_of(e) is not None and e.mark is None and bool(e.outputs)


class _OpenError(Exception):
    """A region is not closed."""


class _AgainError(Exception):
    """An array has to be there as a whole, too: the region is to be found again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moves:
    """What becomes of arrays whose elements are moved along a dimension: for each result the sources of its pieces."""

    dim: int
    sources: tuple[tuple[Source, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A closed region.

    Attributes:
        dims, layouts: of the arrays in pieces, the dimension and how they are.
        equations: those that are computed in pieces, and how.
        brought: the arrays from elsewhere.
        kept: results that are made as before, too.
        joined: results that are put together of their pieces.
    """

    dims: dict[Array, int]
    layouts: dict[Array, Layout]
    equations: dict[Equation, Touch | Moves]
    brought: set[Array]
    kept: set[Array]
    joined: set[Array]


def closed_regions(block: Block, split: Split) -> list[Region]:
    """The closed regions of a block that begin where arrays would be redistributed."""
    found: list[Region] = []
    taken: set[Equation] = set()
    for e in block.equations:
        if not may_begin(e) or e in taken:
            continue
        for dim in range(len(e.outputs[0].shape)):
            if not _moving(e, dim, split):
                continue
            region = _region(block, e, dim, split)
            if region is not None and taken.isdisjoint(region.equations):
                found.append(region)
                taken.update(region.equations)
                break
    return found


def _bytes(x: Array) -> int:
    return x.bytes if isinstance(x, Value) else 0


def _moving(e: Equation, dim: int, split: Split) -> list[Value]:
    """The operands of an equation that are split along a dimension and would be redistributed."""
    if not may_begin(e) or dim >= len(e.outputs[0].shape) or 0 in e.outputs[0].shape:
        return []
    layouts = [whole(x.shape[dim]) if x.shape else None for x in e.inputs]
    found = []
    for spans, result in zip(spans_along(e, dim) or (), e.outputs, strict=False):
        sources = sources_of(spans, layouts) or ()
        for s, start in zip(sources, starts_of(tuple(s.piece for s in sources)), strict=True):
            x = e.inputs[s.operand]
            if s.part is None or s.cut is not None or not isinstance(x, Value) or (parts := split(x, dim)) == 1:
                continue
            if start != s.piece.start or -(-result.shape[dim] // parts) != -(-x.shape[dim] // parts):
                found.append(x)
    return found


def _is_worth_it(region: Region, dim: int, split: Split) -> bool:
    """Whether more stays where it is than is moved for it: what is brought or joined is cut and padded."""
    stay = sum(x.bytes for e in region.equations for x in _moving(e, dim, split) if x not in region.dims)
    return 2 * sum(_bytes(x) for x in region.brought | region.joined) < stay


def _region(block: Block, first: Equation, dim: int, split: Split) -> Region | None:
    """The region that begins with an equation; None if it is not closed."""
    choice = _Choice()
    while True:
        try:
            region = _Search(block, choice).run(first, dim)
            if _is_worth_it(region, dim, split):
                return region
            raise _OpenError
        except _AgainError:
            continue
        except _OpenError:
            # The last array whose readers were taken in may be the one that leads outside.
            if not choice.taken:
                return None
            choice.brought.add(choice.taken.pop())


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """What is done with arrays that something outside of a region reads.

    Attributes:
        taken: in order, those with all their readers in the region.
        brought: those that are made as before, and cut in pieces.
        kept: those that are made twice.
    """

    taken: list[Array] = dataclasses.field(default_factory=list)
    brought: set[Array] = dataclasses.field(default_factory=set)
    kept: set[Array] = dataclasses.field(default_factory=set)


class _Search:
    """What has to be in pieces if one array is."""

    def __init__(self, block: Block, choice: _Choice):
        self.block, self.choice, self.brought, self.kept = block, choice, choice.brought, choice.kept
        self.producers: dict[Any, Equation] = {v: e for e in block.equations for v in e.outputs}
        self.readers: dict[Any, list[Equation]] = {}
        for e in block.equations:
            for x in dict.fromkeys(e.inputs):
                self.readers.setdefault(x, []).append(e)
        self.dims: dict[Array, int] = {}
        self.layouts: dict[Array, Layout] = {}
        self.forced: set[Array] = set()  # all their readers are in the region
        self.equations: dict[Equation, Touch | Moves] = {}
        self.joined: set[Array] = set()
        self.waiting: list[Array] = []

    def run(self, first: Equation, dim: int) -> Region:
        self.move(first, dim, begins=True)
        while self.waiting:
            x = self.waiting.pop()
            if x in self.forced:
                if x in self.block.outputs:
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
        for e, found in self.equations.items():
            if isinstance(found, Moves) and found != self.moves(e, found.dim):
                raise _OpenError  # an operand was found to be in pieces later
        return Region(self.dims, self.layouts, self.equations, self.brought & self.dims.keys(), self.kept, self.joined)

    def is_read_elsewhere(self, x: Array) -> bool:
        return x in self.block.outputs or any(not self.reads_pieces(e, x) for e in self.readers.get(x, ()))

    def reads_pieces(self, e: Equation, x: Array) -> bool:
        found = self.equations.get(e)
        if isinstance(found, Touch):
            return all(d is not None for y, d in zip(e.inputs, found.operands, strict=True) if y is x)
        return found is not None

    def add(self, x: Array, dim: int, layout: Layout, *, forced: bool = False) -> None:
        """Says that an array is in pieces."""
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
        """Says that an array is made as before, and cut in pieces."""
        if x in self.forced:
            raise _OpenError
        self.brought.add(x)
        raise _AgainError

    def keep(self, x: Array) -> None:
        """Finds a way for an array that is read elsewhere, too."""
        e = self.producers[x]
        if len(e.outputs) == 1 and index_of(e) is None and not any(y in self.dims for y in e.inputs):
            self.kept.add(x)
        else:
            self.choice.taken.append(x)
        raise _AgainError

    def refuse(self, e: Equation) -> None:
        """An equation that cannot be computed in pieces reads and makes arrays as before."""
        if e in self.equations:
            raise _OpenError
        self.joined.update(x for x in e.inputs if x in self.forced)
        for x in e.outputs:
            if x in self.dims and x not in self.brought:
                self.bring(x)

    def meet(self, e: Equation) -> None:
        """What else has to be in pieces where an equation is computed so."""
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
        """Along which of its factors an equation is in pieces."""
        if e.rule is None:
            return None
        tensors = zip((*e.inputs, *e.outputs), (*e.rule.operands, *e.rule.results), strict=True)
        factors = {own[self.dims[x]] for x, own in tensors if x in known}
        if len(factors) != 1 or len(own := next(iter(factors))) != 1:
            return None
        return touched(e, own[0])

    def move(self, e: Equation, dim: int, *, begins: bool = False) -> None:
        """What becomes of pieces where elements are moved."""
        forced = begins or any(x in self.forced for x in e.inputs)
        found = self.moves(e, dim)
        layouts = [tuple(s.piece for s in sources) for sources in found.sources] if found else []
        made = list(zip(e.outputs, layouts, strict=False))
        if found is None or any(v in self.brought and not is_whole(layout) for v, layout in made):
            self.refuse(e)
            return
        for v, layout in made:
            if not forced and v in self.dims and (self.dims[v], self.layouts[v]) != (dim, layout):
                self.bring(v)
            if is_whole(layout):
                if v in self.dims and v not in self.brought:
                    self.bring(v)
            elif forced or v in self.dims:
                self.add(v, dim, layout, forced=forced)
        self.equations[e] = found

    def moves(self, e: Equation, dim: int) -> Moves | None:
        layouts = [self.layouts.get(x, whole(x.shape[dim])) if x.shape else None for x in e.inputs]
        found = [sources_of(own, layouts) for own in spans_along(e, dim) or ()]
        if not found or any(own is None for own in found):
            return None
        return Moves(dim, tuple(tuple(own or ()) for own in found))
