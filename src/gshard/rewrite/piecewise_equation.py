"""Computes an equation on arrays in pieces (``rewrite.piecewise_layout``).

If a dimension is parallel in the rule of the equation, each piece is computed separately. If the dimension is reduced,
each piece is reduced, and the monoid combines the results. Before a reduction, the frame outside of the window is
filled with the identity of the monoid, in every operand, because 0 * NaN is NaN.

    sum([a, b])                sum(a) + sum(b)
    sum(x in 0:1000)           sum(where(i < 1000, x, -0.0))
    [p, q] @ [a, b]            p @ a + q @ b

Positions of elements (look-ups, updates, positions of extremes) are converted to positions in frames. Positions out of
range stay out of range, with the same effect.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import identity
from gshard.core.jax_adapter import bind
from gshard.core.program import Equation
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE
from gshard.language.traits import traits_of
from gshard.rewrite.cse import is_pure
from gshard.rewrite.piecewise_layout import Layout, Piece, Source, starts_of
from gshard.rules.concatenate_slices import with_zero
from gshard.rules.indexing import drops, over_windows, signed, with_column
from gshard.rules.reductions import COMBINE

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
        assert self.equation.rule is not None
        return self.equation.rule.factors[self.factor].kind

    @property
    def monoid(self) -> str:
        assert self.equation.rule is not None
        return self.equation.rule.factors[self.factor].monoid or ""


def touched(e: Equation, factor: int) -> Touch | None:
    """The dimensions of a factor; None if the factor is a part of a dimension, or has two dimensions of one array."""
    assert e.rule is not None

    def dims_of(dims: Sequence[Sequence[int]]) -> list[int]:
        return [d for d, factors in enumerate(dims) if factor in factors]

    operands = [dims_of(dims) for dims in e.rule.operands]
    results = [dims_of(dims) for dims in e.rule.results]
    tensors = zip((*operands, *results), (*e.rule.operands, *e.rule.results), strict=True)
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
        if t.kind == REDUCE:
            return t.operands[0] is None and all(p.is_whole for p in layout)
        # If a part of each window is written, the updates have another factor.
        return t.kind == PARALLEL and t.operands[2] is not None
    if t.kind == COMMUNICATE:
        return e.name in _EXTREMES and e.inputs[0].dtype != jnp.bool_
    if t.kind == PARALLEL:
        named = traits.same_on_parts or traits.shape_in or e.name == "table"
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
    if e.name.startswith("scatter") and (_is_written_to(t) or t.kind == REDUCE):
        return functools.partial(_written if _is_written_to(t) else _in_turn, t, layout)
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
    elif source.cut is not None:
        result = lax.slice_in_dim(operands[source.operand][part], *source.cut, axis=dim)
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


def joined(parts: Sequence[Any], dim: int, layout: Layout) -> Any:
    """The ordinary array for an array in pieces."""
    windows = [lax.slice_in_dim(x, p.start, p.end, axis=dim) for x, p in zip(parts, layout, strict=True)]
    return lax.concatenate(windows, dim)


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
    if e.name == "table":
        at: list[Any] = [None] * len(e.outputs[0].shape)
        last = e.outputs[0].shape[t.results[0] or 0] - 1
        at[t.results[0] or 0] = jnp.clip(jnp.arange(piece.size, dtype=jnp.int32) + (start - piece.start), 0, last)
        return [e.params["table"].part(operands, tuple(at))]
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


def _in_turn(t: Touch, layout: Layout, operands: Sequence[Any]) -> list[Any]:
    """Computes a scatter whose updates are in pieces: applies the updates of one piece after the other."""
    x, indices, updates = operands
    for k in range(len(layout)):
        of_piece = [
            parts if d is None else parts[k] for d, parts in zip(t.operands[1:], (indices, updates), strict=True)
        ]
        (x,) = _bind(t.equation, x, *of_piece, indices_are_sorted=False, unique_indices=False)
    return [x]


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
