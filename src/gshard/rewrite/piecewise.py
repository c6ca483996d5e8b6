"""Computes arrays in pieces: operators on arrays that were joined or padded, up to the arrays that are needed whole.

A layout represents an array along one dimension by pieces side by side. A region is a closed set of equations that
can be computed so; gshard emits it if it moves less.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import identity
from gshard.core.jax_adapter import bind
from gshard.core.program import Block, Equation, Program, Value
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, Span
from gshard.language.traits import traits_of
from gshard.rewrite.driver import Split, where_split
from gshard.rewrite.equation_graph import Array, Neighbours, Others, Writer, is_pure, written
from gshard.rules.indexing import drops, over_windows, signed, with_column
from gshard.rules.reductions import COMBINE
from gshard.rules.shape import index_of
from gshard.rules.slicing import with_zero

# Represents an array along one dimension by pieces: arrays side by side, each a window of a frame.

_TIMES = 1.25  # largest ratio of the sizes of a frame and its window: elements outside are computed in vain
_MOST = 8  # largest number of pieces of an array


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The elements from ``start`` to ``end`` of a frame of ``size`` elements."""

    size: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        return self.length == self.size


Layout = tuple[Piece, ...]


def whole(n: int) -> Layout:
    """The layout of an ordinary array: one whole piece."""
    return (Piece(n, 0, n),)


def is_whole(layout: Layout) -> bool:
    """Whether a layout is the layout of an ordinary array."""
    return len(layout) == 1 and layout[0].is_whole


def starts_of(layout: Layout) -> list[int]:
    """The position in the array at which each piece begins."""
    return [sum(p.length for p in layout[:k]) for k in range(len(layout))]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The source of a piece."""

    piece: Piece  # the piece
    operand: int  # the number of the operand that contains its elements, or that is the number that fills it
    part: int | None  # the number of the piece of this operand; None if the operand is a number
    low: int = 0  # low, high: the numbers of elements at the ends of the window that are filled with a number
    high: int = 0
    number: int = 0  # the operand that is this number

    @property
    def is_as_it_was(self) -> bool:
        """Whether the piece is an unchanged piece of the operand."""
        return self.part is not None and not self.low and not self.high


def spans_along(e: Equation, dim: int) -> list[Sequence[Span]] | None:
    """The spans of each result of an equation that only moves elements along ``dim``; None for other equations."""
    spans_of_results = list[Sequence[Span]]()
    for index in index_of(e) or ():
        if [d for d, spans in enumerate(index) if spans] != [dim] or any(span.step != 1 for span in index[dim]):
            return None
        spans_of_results.append(index[dim])
    return spans_of_results or None


def sources_of(spans: Sequence[Span], layouts: Sequence[Layout | None]) -> list[Source] | None:
    """The sources of the pieces of a result."""
    sources: list[Source] = []
    for span in spans:
        layout = layouts[span.operand]
        start, end = span.start, span.start + span.count
        if layout is None:
            if span.count:
                sources.append(Source(Piece(span.count, 0, span.count), span.operand, None))
            continue
        for k, (piece, begin) in enumerate(zip(layout, starts_of(layout), strict=True)):
            low, high = max(start - begin, 0), min(end - begin, piece.length)
            if high > low:
                window = Piece(piece.size, piece.start + low, piece.start + high)
                sources.append(Source(window, span.operand, k))
    sources = _filled(sources)
    frames = [(s.operand, s.part) for s in sources if s.part is not None]
    is_too_large = any(s.piece.size > _TIMES * s.piece.length for s in sources)
    return sources if 0 < len(sources) <= _MOST and len(set(frames)) == len(frames) and not is_too_large else None


def _filled(sources: Sequence[Source]) -> list[Source]:
    """The sources, in which adjacent numbers are put into the frames of pieces if there is room."""
    filled: list[Source] = []
    for s in sources:
        last = filled[-1] if filled else None
        if s.part is None and last is not None and last.part is not None:
            p, n = last.piece, s.piece.length
            if p.end + n <= p.size and (not last.low or last.number == s.operand):
                grown = Piece(p.size, p.start, p.end + n)
                filled[-1] = dataclasses.replace(last, piece=grown, high=last.high + n, number=s.operand)
                continue
        if s.part is not None and last is not None and last.part is None and s.piece.start >= last.piece.length:
            p, n = s.piece, last.piece.length
            filled[-1] = dataclasses.replace(s, piece=Piece(p.size, p.start - n, p.end), low=n, number=last.operand)
            continue
        filled.append(s)
    return filled


# Computes an equation on arrays in pieces.

Dim = int | None
Parts = list[Any]

_EXTREMES = {"argmax": ("max", lax.gt), "argmin": ("min", lax.lt)}
_FILL = lax.GatherScatterMode.FILL_OR_DROP


@dataclasses.dataclass(frozen=True, slots=True)
class Touch:
    """An equation and one of its factors, along which arrays are in pieces."""

    equation: Equation  # the equation
    factor: int  # the number of the factor
    operands: tuple[Dim, ...]  # operands, results: for each operand and result the dimension of the factor, or None
    results: tuple[Dim, ...]

    @property
    def kind(self) -> str:
        return self.equation.operator_rule.factors[self.factor].kind

    @property
    def monoid(self) -> str:
        return self.equation.operator_rule.factors[self.factor].monoid or ""


def touched(e: Equation, factor: int) -> Touch | None:
    """The dimensions of a factor; None if the factor is a part of a dimension, or has two dimensions of one array."""

    def dims_of(dims: Sequence[Sequence[int]]) -> list[int]:
        return [d for d, factors in enumerate(dims) if factor in factors]

    operands = [dims_of(dims) for dims in e.operator_rule.operands]
    results = [dims_of(dims) for dims in e.operator_rule.results]
    tensors = zip((*operands, *results), (*e.operator_rule.operands, *e.operator_rule.results), strict=True)
    if any(len(dims) > 1 or any(len(tensor[d]) > 1 for d in dims) for dims, tensor in tensors):
        return None
    operand_dims = tuple(dims[0] if dims else None for dims in operands)
    result_dims = tuple(dims[0] if dims else None for dims in results)
    return Touch(e, factor, operand_dims, result_dims)


def may_be_in_pieces(t: Touch, layout: Layout) -> bool:
    """Whether an equation can be computed from pieces."""
    e, traits = t.equation, traits_of(t.equation.name)
    if e.rule is None or not e.rule.known or not e.rule.is_free or e.mark is not None or e.blocks:
        return False
    if not is_pure(e) or any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in (*e.inputs, *e.outputs)):
        return False
    if e.name == "gather":
        return _is_looked_up(t) or t.kind == PARALLEL
    if e.name.startswith("scatter"):
        if _is_written_to(t):
            return drops(e.params) or e.inputs[1].shape[-1] == 1
        # If a part of each window is written, the updates have another factor.
        return t.kind == PARALLEL and t.operands[2] is not None
    if t.kind == COMMUNICATE:
        return e.name in _EXTREMES and e.inputs[0].dtype != jnp.bool_
    if t.kind == PARALLEL:
        named = traits.same_on_parts or traits.shape_in
        if e.name == "reshape" and e.params.get("dimensions") is not None:
            return False
        if e.name == "dynamic_update_slice" and t.operands[1] is None:
            return False  # only a part of this dimension is written
        return not e.rule.passes and (bool(named) or e.rule.local is None)
    plain = e.rule.local is None or traits.same_on_parts
    return t.kind == REDUCE and t.monoid in COMBINE and plain and not e.rule.masks_itself


def in_pieces(t: Touch, layout: Layout) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that computes an equation from operands. An operand may be a list of pieces."""
    e = t.equation
    if e.name == "gather" and _is_looked_up(t):
        return functools.partial(_looked_up, t, layout)
    if e.name.startswith("scatter") and _is_written_to(t):
        return functools.partial(_written, t, layout)
    if t.kind == COMMUNICATE:
        return functools.partial(_extreme, t, layout)
    return functools.partial(_each, t, layout)


def moved(e: Equation, dim: int, source: Source, operands: Sequence[Any]) -> Any:
    """A new piece of the result of an equation that moves elements along a dimension."""
    like = next(parts for parts in operands if isinstance(parts, list))[0]
    piece, part = source.piece, source.part
    if part is None:
        shape = [piece.length if d == dim else n for d, n in enumerate(like.shape)]
        result = lax.full(shape, operands[source.operand], like.dtype)
    else:
        unfilled = Piece(piece.size, piece.start + source.low, piece.end - source.high)
        unfilled = unfilled if source.low or source.high else Piece(piece.size, 0, piece.size)
        result = inside(operands[source.operand][part], dim, unfilled, operands[source.number])
    return with_zero(result) if e.params.get("added") else result


def brought(x: Any, dim: int, layout: Layout) -> list[Any]:
    """The pieces of an ordinary array."""
    pieces = []
    for piece, start in zip(layout, starts_of(layout), strict=True):
        part = lax.slice_in_dim(x, start, start + piece.length, axis=dim)
        if not piece.is_whole:
            ends = [(piece.start, piece.size - piece.end, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
            part = lax.pad(part, jnp.zeros((), x.dtype), ends)
        pieces.append(part)
    return pieces


def inside(x: Any, dim: int, piece: Piece, number: Any) -> Any:
    """A frame filled with a number outside of its window."""
    if piece.is_whole:
        return x
    position = lax.iota(jnp.int32, piece.size)
    conditions = [lax.ge(position, jnp.int32(piece.start))] if piece.start else []
    conditions += [lax.lt(position, jnp.int32(piece.end))] if piece.end < piece.size else []
    flags = lax.broadcast_in_dim(functools.reduce(lax.bitwise_and, conditions), x.shape, (dim,))
    return lax.select(flags, x, lax.full(x.shape, number, x.dtype))


# Functions that compute equations in pieces.


def _bind(e: Equation, *operands: Any, **changes: Any) -> list[Any]:
    return bind(e.primitive, {**e.params, **changes}, operands)


def _each(t: Touch, layout: Layout, operands: Sequence[Any]) -> list[Any]:
    """Computes each piece separately, and combines the results of a reduction."""
    results = []
    for k, (piece, start) in enumerate(zip(layout, starts_of(layout), strict=True)):
        parts = [x if d is None else x[k] for d, x in zip(t.operands, operands, strict=True)]
        if t.kind == REDUCE:
            parts = [
                x if d is None else inside(x, d, piece, identity(t.monoid, x.dtype))
                for d, x in zip(t.operands, parts, strict=True)
            ]
        results.append(_one(t, piece, start, parts))
    if t.kind == REDUCE:
        return [functools.reduce(COMBINE[t.monoid], parts) for parts in zip(*results, strict=True)]
    return [list(parts) for parts in zip(*results, strict=True)]


def _one(t: Touch, piece: Piece, start: int, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation for one piece."""
    e = t.equation
    changes: dict[str, Any] = {}
    if shape_in := traits_of(e.name).shape_in:
        changes[shape_in] = tuple(piece.size if d == t.results[0] else n for d, n in enumerate(e.params[shape_in]))
    dim = t.operands[0] if e.name == "gather" else None
    if dim is not None and dim not in e.params["dimension_numbers"].operand_batching_dims:
        sizes = e.params["slice_sizes"]
        changes["slice_sizes"] = tuple(piece.size if d == dim else n for d, n in enumerate(sizes))
    if e.name == "iota" and e.params["dimension"] == t.results[0]:
        position = lax.broadcasted_iota(jnp.int32, changes["shape"], e.params["dimension"])
        return [lax.convert_element_type(position + jnp.int32(start - piece.start), e.params["dtype"])]
    return _bind(e, *operands, **changes)


def _is_looked_up(t: Touch) -> bool:
    """Whether single elements along the dimension are looked up at positions in the indices."""
    params, dim = t.equation.params, t.operands[0]
    numbers = params["dimension_numbers"]
    return dim is not None and dim in numbers.start_index_map and t.kind == REDUCE and params["slice_sizes"][dim] == 1


def _is_written_to(t: Touch) -> bool:
    """Whether single elements along the dimension are written at positions in the indices."""
    numbers, dim = t.equation.params["dimension_numbers"], t.operands[0]
    return dim in numbers.scatter_dims_to_operand_dims and dim in numbers.inserted_window_dims


def _places(e: Equation, column: int, indices: Any, layout: Layout) -> list[tuple[Any, Any]]:
    """For each piece whether the piece contains each position, and the indices in its frame (out of range if not)."""
    position = signed(indices)[..., column]
    clips = e.params["mode"] != _FILL if e.name == "gather" else not drops(e.params)
    if clips:
        position = jnp.clip(position, 0, sum(p.length for p in layout) - 1)
    places = []
    for piece, start in zip(layout, starts_of(layout), strict=True):
        is_in_piece = (position >= start) & (position < start + piece.length)
        in_frame = position if piece.start == start else position + (piece.start - start)
        in_frame = jnp.where(is_in_piece, in_frame, piece.size)
        if indices.shape[-1] == 1:
            frame_indices = in_frame[..., None]
        else:
            frame_indices = with_column(signed(indices), column, in_frame)
        places.append((is_in_piece, frame_indices))
    return places


def _looked_up(t: Touch, layout: Layout, operands: Sequence[Any]) -> list[Any]:
    """Computes a look-up of single elements along the dimension."""
    e = t.equation
    parts, indices = operands
    numbers, ndim = e.params["dimension_numbers"], len(e.outputs[0].shape)
    column = numbers.start_index_map.index(t.operands[0])
    result: Any = None
    for x, (is_in_piece, frame_indices) in zip(parts, _places(e, column, indices, layout), strict=True):
        (of_piece,) = _bind(e, x, frame_indices, indices_are_sorted=False)
        if result is None:
            result = of_piece  # JAX fills in elements that are in no piece
        else:
            flags = over_windows(is_in_piece, ndim, numbers.offset_dims)
            result = lax.select(jnp.broadcast_to(flags, of_piece.shape), of_piece, result)
    return [result]


def _written(t: Touch, layout: Layout, operands: Sequence[Any]) -> list[Any]:
    """Computes an update of single elements along the dimension."""
    e = t.equation
    parts, indices, updates = operands
    column = e.params["dimension_numbers"].scatter_dims_to_operand_dims.index(t.operands[0])
    changes = {"mode": _FILL, "indices_are_sorted": False, "unique_indices": False}
    places = _places(e, column, indices, layout)
    return [[_bind(e, x, at, updates, **changes)[0] for x, (_, at) in zip(parts, places, strict=True)]]


def _extreme(t: Touch, layout: Layout, operands: Sequence[Any]) -> list[Any]:
    """Computes the position of the first extreme element. NaN counts as the extreme, as in JAX."""
    e, dim = t.equation, t.operands[0]
    (parts,) = operands
    assert dim is not None
    monoid, is_beyond = _EXTREMES[e.name]
    reduce = lax.reduce_max if monoid == "max" else lax.reduce_min
    best: Any = None  # position and value
    for x, piece, start in zip(parts, layout, starts_of(layout), strict=True):
        filled = inside(x, dim, piece, identity(monoid, x.dtype))
        (position,) = _bind(e, filled)
        integer = position.dtype.type
        # If all elements of the window equal the identity, the position may be outside of the window.
        position = lax.clamp(integer(piece.start), position, integer(piece.end - 1)) + integer(start - piece.start)
        value: Any = reduce(filled, (dim,)) if len(layout) > 1 else None
        if best is None:
            best = position, value
            continue
        is_better = is_beyond(value, best[1]) | (lax.ne(value, value) & lax.eq(best[1], best[1]))
        best = lax.select(is_better, position, best[0]), lax.select(is_better, value, best[1])
    return [best[0]]


# Finds piecewise regions: sets of equations to compute in pieces, up to the reduction of the dimension.

PartsOf = Callable[[Value, int], int]
"""Returns the number of parts of a dimension of a value."""

_MOST_ARRAYS = 256  # largest number of arrays in pieces


def may_begin(e: Equation) -> bool:
    """Whether a region may begin with an equation."""
    return index_of(e) is not None and e.mark is None and bool(e.outputs)


class _OpenError(Exception):
    """A region is not closed."""


class _AgainError(Exception):
    """One more array is computed as before, so the search for the region must start again."""


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


def closed_regions(block: Block, split: PartsOf) -> list[Region]:
    """The closed regions of a block that begin at equations for which arrays would be redistributed."""
    regions: list[Region] = []
    taken: set[Equation] = set()
    graph = Neighbours(block.equations, block.outputs)
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


def _moving(e: Equation, dim: int, split: PartsOf) -> list[Value]:
    """The operands of an equation that are split along a dimension and would be redistributed."""
    if not may_begin(e) or dim >= len(e.outputs[0].shape) or 0 in e.outputs[0].shape:
        return []
    layouts = [whole(x.shape[dim]) if x.shape else None for x in e.inputs]
    moving = []
    for spans, result in zip(spans_along(e, dim) or (), e.outputs, strict=False):
        sources = sources_of(spans, layouts) or ()
        for s, start in zip(sources, starts_of(tuple(s.piece for s in sources)), strict=True):
            x = e.inputs[s.operand]
            if s.part is None or not isinstance(x, Value) or (parts := split(x, dim)) == 1:
                continue
            if start != s.piece.start or -(-result.shape[dim] // parts) != -(-x.shape[dim] // parts):
                moving.append(x)
    return moving


def _region(graph: Neighbours, first: Equation, dim: int, split: PartsOf) -> Region | None:
    """The region that begins at an equation; None if it is not closed or not useful."""
    brought: set[Array] = set()
    while True:
        try:
            region = _Search(graph, brought).run(first, dim)
        except _AgainError:
            continue
        except _OpenError:
            return None
        # Arrays that are cut into pieces are moved.
        saved = sum(x.bytes for e in region.equations for x in _moving(e, dim, split) if x not in region.dims)
        return region if 2 * sum(x.bytes for x in region.brought if isinstance(x, Value)) < saved else None


class _Search:
    """Finds all arrays and equations that must be in pieces if one array is."""

    def __init__(self, graph: Neighbours, brought: set[Array]):
        self.graph = graph
        self.brought = brought  # arrays that are computed as before and cut into pieces
        self.dims: dict[Array, int] = {}
        self.layouts: dict[Array, Layout] = {}
        self.forced: set[Array] = set()  # arrays whose readers must all be in the region
        self.equations: dict[Equation, Touch | Moves] = {}
        self.waiting: list[Array] = []

    def run(self, first: Equation, dim: int) -> Region:
        """The region that begins at an equation."""
        self.move(first, dim, begins=True)
        while self.waiting:
            x = self.waiting.pop()
            if x in self.forced:
                if x in self.graph.outputs:
                    raise _OpenError
                for e in self.graph.readers(x):
                    self.meet(e)
            if x not in self.brought:
                if (producer := self.graph.producer(x)) is not None:
                    self.meet(producer)
                else:
                    self.bring(x)
        for x in self.dims:
            if x not in self.forced and x not in self.brought:
                if x in self.graph.outputs or not all(self.reads_pieces(e, x) for e in self.graph.readers(x)):
                    self.bring(x)
        for e, treatment in self.equations.items():
            if isinstance(treatment, Moves) and treatment != self.moves(e, treatment.dim):
                raise _OpenError  # an operand became an array in pieces later
        return Region(self.dims, self.layouts, self.equations, self.brought & self.dims.keys())

    def reads_pieces(self, e: Equation, x: Array) -> bool:
        treatment = self.equations.get(e)
        if isinstance(treatment, Touch):
            return all(d is not None for y, d in zip(e.inputs, treatment.operands, strict=True) if y is x)
        return treatment is not None

    def add(self, x: Array, dim: int, layout: Layout, *, forced: bool = False) -> None:
        """Adds an array in pieces; ``forced`` if all its readers must be in the region."""
        if x in self.dims:
            if (self.dims[x], self.layouts[x]) != (dim, layout):
                raise _OpenError
            if not forced or x in self.forced:
                return
        if forced and x in self.brought:
            raise _OpenError
        self.dims[x], self.layouts[x] = dim, layout
        if forced:
            self.forced.add(x)
        self.waiting.append(x)
        if len(self.dims) > _MOST_ARRAYS:
            raise _OpenError

    def bring(self, x: Array) -> None:
        """Decides that an array is computed as before and cut into pieces."""
        if x in self.forced:
            raise _OpenError
        self.brought.add(x)
        raise _AgainError

    def refuse(self, e: Equation) -> None:
        """Excludes an equation that cannot be computed in pieces: it reads and computes ordinary arrays."""
        if e in self.equations or not self.forced.isdisjoint(e.inputs):
            raise _OpenError
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
                raise _OpenError
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


def _blocks(program: Program) -> list[Block]:
    return [block for block in program.block.blocks() if any(map(may_begin, block.equations))]


@where_split(_blocks)
def piecewise(block: Block, split: Split) -> Iterator[Others]:
    """Replaces equations on arrays that are joined or cut along a split dimension by equations on pieces."""
    for region in closed_regions(block, split.parts):
        emitter = _Emitter(region, split.writer)
        yield {e: emitter.instead_of(e) for e in block.equations if e in region.equations}


class _Emitter:
    """Creates the equations that compute a region in pieces."""

    def __init__(self, region: Region, writer: Writer):
        self.region, self.writer = region, writer
        self.pieces: dict[Array, list[Value]] = {}

    def instead_of(self, e: Equation) -> list[Equation]:
        """The equations that replace an equation of the region."""
        out: list[Equation] = []
        for x in dict.fromkeys(e.inputs):
            if x in self.region.brought and x not in self.pieces:
                self.pieces[x] = self.new(x)
                out += self.bring(x, e)
        treatment = self.region.equations[e]
        return out + (self.moved(e, treatment) if isinstance(treatment, Moves) else self.computed(e, treatment))

    def new(self, x: Array) -> list[Value]:
        """New values for the pieces of an array."""
        dim = self.region.dims[x]
        return [self.piece(x, dim, p.size) for p in self.region.layouts[x]]

    def piece(self, x: Array, dim: int, size: int) -> Value:
        """A new value for a piece of an array, with a frame of ``size`` elements."""
        weak = isinstance(x, Value) and x.weak
        return self.writer.fresh((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype, weak)

    def bring(self, x: Array, e: Equation) -> Sequence[Equation]:
        """The equations that cut an array from outside of the region into pieces."""
        dim, layout = self.region.dims[x], self.region.layouts[x]
        return written(self.writer, lambda array: brought(jnp.asarray(array), dim, layout), [x], self.pieces[x], e)

    def computed(self, e: Equation, t: Touch) -> list[Equation]:
        """The equations that compute an equation in pieces."""
        touched = zip((*e.inputs, *e.outputs), (*t.operands, *t.results), strict=True)
        layout = next(self.region.layouts[x] for x, d in touched if d is not None)
        results: list[Value] = []
        for v, d in zip(e.outputs, t.results, strict=True):
            if d is None:
                results.append(v)
                continue
            self.pieces[v] = self.new(v)
            results += self.pieces[v]
        return self.run(in_pieces(t, layout), e, [d is not None for d in t.operands], results)

    def moved(self, e: Equation, moves: Moves) -> list[Equation]:
        """The equations that compute new pieces of an equation that moves elements. Unchanged pieces are reused."""
        new_pieces: list[tuple[Value, Source]] = []
        for v, sources in zip(e.outputs, moves.sources, strict=True):
            if is_whole(tuple(s.piece for s in sources)):
                new_pieces.append((v, sources[0]))
                continue
            self.pieces[v] = []
            for s in sources:
                x = e.inputs[s.operand]
                if s.is_as_it_was and not e.params.get("added") and isinstance(x, Value):
                    self.pieces[v].append(self.pieces[x][s.part or 0] if x in self.pieces else x)
                    continue
                self.pieces[v].append(self.piece(v, moves.dim, s.piece.size))
                new_pieces.append((self.pieces[v][-1], s))
        if not new_pieces:
            return []

        def function(operands: Sequence[Any]) -> list[Any]:
            lists = [x if isinstance(x, list) or not jnp.ndim(x) else [x] for x in operands]
            return [moved(e, moves.dim, s, lists) for _, s in new_pieces]

        return self.run(function, e, [x in self.pieces for x in e.inputs], [v for v, _ in new_pieces])

    def run(
        self,
        function: Callable[[Sequence[Any]], list[Any]],
        e: Equation,
        are_in_pieces: Sequence[bool],
        results: Sequence[Value],
    ) -> list[Equation]:
        """The equations of a function of the operands of an equation."""
        pieces = [self.pieces[x] if is_in else None for x, is_in in zip(e.inputs, are_in_pieces, strict=True)]
        inputs = [y for x, own in zip(e.inputs, pieces, strict=True) for y in ([x] if own is None else own)]

        def flat(*arrays: Any) -> list[Any]:
            remaining = iter(arrays)
            operands = [next(remaining) if own is None else [next(remaining) for _ in own] for own in pieces]
            return [y for result in function(operands) for y in (result if isinstance(result, list) else [result])]

        return written(self.writer, flat, inputs, results, e)
