"""Piecewise equations: computes an equation on arrays in pieces (``rewrite.piecewise_layout``).

Where its rule says that a dimension is parallel, it computes each piece by itself. Where it reduces the dimension, it
reduces each piece, and the parts are combined by the monoid; outside of its window a frame is filled first with what
the monoid does not notice, in every operand, since 0 * NaN is NaN.

    sum([a, b])                sum(a) + sum(b)
    sum(x in 0:1000)           sum(where(i < 1000, x, -0.0))
    [p, q] @ [a, b]            p @ a + q @ b

Places of elements (look-ups, updates, positions of extremes) are counted from where the window begins; what was out of
range is so, and means the same.
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
    """An equation and one of its factors, along which arrays are in pieces.

    Attributes:
        operands, results: for each of them the dimension that the factor is, or None.
    """

    equation: Equation
    factor: int
    operands: tuple[Dim, ...]
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
    """An equation and its factor; None where the factor is but a part of a dimension, or two of one array."""
    assert e.rule is not None

    def dim_of(dims: Sequence[Sequence[int]]) -> list[int]:
        return [d for d, own in enumerate(dims) if factor in own]

    operands, results = map(dim_of, e.rule.operands), map(dim_of, e.rule.results)
    found = [*operands], [*results]
    tensors = zip((*found[0], *found[1]), (*e.rule.operands, *e.rule.results), strict=True)
    if any(len(dims) > 1 or any(len(tensor[d]) > 1 for d in dims) for dims, tensor in tensors):
        return None
    one = [tuple(dims[0] if dims else None for dims in side) for side in found]
    return Touch(e, factor, *one)


def may_be_in_pieces(t: Touch, layout: Layout) -> bool:
    """Whether an equation can be computed of pieces."""
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
        # Where of windows a part is written, the updates have another factor.
        return t.kind == PARALLEL and t.operands[2] is not None
    if t.kind == COMMUNICATE:
        return e.name in _EXTREMES and e.inputs[0].dtype != jnp.bool_
    if t.kind == PARALLEL:
        named = traits.same_on_parts or traits.shape_in or e.name == "table"
        if e.name == "reshape" and e.params.get("dimensions") is not None:
            return False
        if e.name == "dynamic_update_slice" and t.operands[1] is None:
            return False  # of that dimension a part is written
        return not e.rule.passes and (bool(named) or e.rule.local is None)
    plain = e.rule.local is None or traits.same_on_parts
    return t.kind == REDUCE and t.monoid in COMBINE and plain and not e.rule.masks_itself


def in_pieces(t: Touch, layout: Layout) -> Callable[[Sequence[Any]], list[Any]]:
    """The result of an equation whose operands may be lists of pieces."""
    e = t.equation
    if e.name == "gather" and _is_looked_up(t):
        return functools.partial(_looked_up, t, layout)
    if e.name.startswith("scatter") and (_is_written_to(t) or t.kind == REDUCE):
        return functools.partial(_written if _is_written_to(t) else _in_turn, t, layout)
    if t.kind == COMMUNICATE:
        return functools.partial(_extreme, t, layout)
    return functools.partial(_each, t, layout)


def moved(e: Equation, dim: int, source: Source, operands: Sequence[Any]) -> Any:
    """A piece that is made where elements are moved along a dimension.

    Operands are lists of pieces, or numbers.
    """
    like = next(parts for parts in operands if isinstance(parts, list))[0]
    piece, part = source.piece, source.part
    if part is None:
        shape = [piece.length if d == dim else n for d, n in enumerate(like.shape)]
        made = lax.full(shape, operands[source.operand], like.dtype)
    elif source.cut is not None:
        made = lax.slice_in_dim(operands[source.operand][part], *source.cut, axis=dim)
    else:
        own = Piece(piece.size, piece.start + source.low, piece.end - source.high)
        own = own if source.low or source.high else Piece(piece.size, 0, piece.size)
        made = inside(operands[source.operand][part], dim, own, operands[source.number])
    return with_zero(made) if e.params.get("added") else made


def brought(x: Any, dim: int, layout: Layout) -> list[Any]:
    """The pieces of an array like any other."""
    found = []
    for piece, start in zip(layout, starts_of(layout), strict=True):
        own = lax.slice_in_dim(x, start, start + piece.length, axis=dim)
        if not piece.is_whole:
            ends = [(piece.start, piece.size - piece.end, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
            own = lax.pad(own, jnp.zeros((), x.dtype), ends)
        found.append(own)
    return found


def joined(parts: Sequence[Any], dim: int, layout: Layout) -> Any:
    """The array that is in pieces."""
    own = [lax.slice_in_dim(x, p.start, p.end, axis=dim) for x, p in zip(parts, layout, strict=True)]
    return lax.concatenate(own, dim)


def inside(x: Any, dim: int, piece: Piece, number: Any) -> Any:
    """A frame with a number outside of a window."""
    if piece.is_whole:
        return x
    at = lax.iota(jnp.int32, piece.size)
    there = [lax.ge(at, jnp.int32(piece.start))] if piece.start else []
    there += [lax.lt(at, jnp.int32(piece.end))] if piece.end < piece.size else []
    flags = lax.broadcast_in_dim(functools.reduce(lax.bitwise_and, there), x.shape, (dim,))
    return lax.select(flags, x, lax.full(x.shape, number, x.dtype))


# What is computed.


def _bind(e: Equation, *operands: Any, **changes: Any) -> list[Any]:
    return bind(e.primitive, {**e.params, **changes}, operands)


def _each(t: Touch, layout: Layout, operands: Sequence[Any]) -> list[Any]:
    found = []
    for k, (piece, start) in enumerate(zip(layout, starts_of(layout), strict=True)):
        own = [x if d is None else x[k] for d, x in zip(t.operands, operands, strict=True)]
        if t.kind == REDUCE:
            own = [
                x if d is None else inside(x, d, piece, identity(t.monoid, x.dtype))
                for d, x in zip(t.operands, own, strict=True)
            ]
        found.append(_one(t, piece, start, own))
    if t.kind == REDUCE:
        return [functools.reduce(COMBINE[t.monoid], parts) for parts in zip(*found, strict=True)]
    return [list(parts) for parts in zip(*found, strict=True)]


def _one(t: Touch, piece: Piece, start: int, operands: Sequence[Any]) -> list[Any]:
    """What an equation makes of one piece."""
    e = t.equation
    if e.name == "table":
        at: list[Any] = [None] * len(e.outputs[0].shape)
        last = e.outputs[0].shape[t.results[0] or 0] - 1
        at[t.results[0] or 0] = jnp.clip(jnp.arange(piece.size, dtype=jnp.int32) + (start - piece.start), 0, last)
        return [e.params["table"].part(operands, tuple(at))]
    changes: dict[str, Any] = {}
    if shape_in := traits_of(e.name).shape_in:
        changes[shape_in] = tuple(piece.size if d == t.results[0] else n for d, n in enumerate(e.params[shape_in]))
    if e.name == "gather" and (own := t.operands[0]) is not None:
        if own not in e.params["dimension_numbers"].operand_batching_dims:
            sizes = e.params["slice_sizes"]
            changes["slice_sizes"] = tuple(piece.size if d == own else n for d, n in enumerate(sizes))
    if e.name == "iota" and e.params["dimension"] == t.results[0]:
        made = lax.broadcasted_iota(jnp.int32, changes["shape"], e.params["dimension"])
        return [lax.convert_element_type(made + jnp.int32(start - piece.start), e.params["dtype"])]
    return _bind(e, *operands, **changes)


def _is_looked_up(t: Touch) -> bool:
    """Whether single elements along the dimension are looked up at places of the data."""
    params, dim = t.equation.params, t.operands[0]
    numbers = params["dimension_numbers"]
    return dim is not None and dim in numbers.start_index_map and t.kind == REDUCE and params["slice_sizes"][dim] == 1


def _is_written_to(t: Touch) -> bool:
    """Whether single elements along the dimension are written at places of the data."""
    numbers, dim = t.equation.params["dimension_numbers"], t.operands[0]
    return dim in numbers.scatter_dims_to_operand_dims and dim in numbers.inserted_window_dims


def _places(e: Equation, column: int, indices: Any, layout: Layout) -> list[tuple[Any, Any]]:
    """For each piece which of the places are there, and the indices of its frame: behind it if they are not."""
    at = signed(indices)[..., column]
    clips = e.params["mode"] != _FILL if e.name == "gather" else not drops(e.params)
    if clips:
        at = jnp.clip(at, 0, sum(p.length for p in layout) - 1)
    found = []
    for piece, start in zip(layout, starts_of(layout), strict=True):
        there = (at >= start) & (at < start + piece.length)
        own = at if piece.start == start else at + (piece.start - start)
        own = jnp.where(there, own, piece.size)
        moved = own[..., None] if indices.shape[-1] == 1 else with_column(signed(indices), column, own)
        found.append((there, moved))
    return found


def _looked_up(t: Touch, layout: Layout, operands: Sequence[Any]) -> list[Any]:
    e, (parts, indices) = t.equation, operands
    numbers, ndim = e.params["dimension_numbers"], len(e.outputs[0].shape)
    column = numbers.start_index_map.index(t.operands[0])
    found: Any = None
    for x, (there, at) in zip(parts, _places(e, column, indices, layout), strict=True):
        (own,) = _bind(e, x, at, indices_are_sorted=False)
        if found is None:
            found = own  # what is nowhere is what JAX fills in
        else:
            flags = over_windows(there, ndim, numbers.offset_dims)
            found = lax.select(jnp.broadcast_to(flags, own.shape), own, found)
    return [found]


def _written(t: Touch, layout: Layout, operands: Sequence[Any]) -> list[Any]:
    e, (parts, indices, updates) = t.equation, operands
    column = e.params["dimension_numbers"].scatter_dims_to_operand_dims.index(t.operands[0])
    changes = {"mode": _FILL, "indices_are_sorted": False, "unique_indices": False}
    places = _places(e, column, indices, layout)
    return [[_bind(e, x, at, updates, **changes)[0] for x, (_, at) in zip(parts, places, strict=True)]]


def _in_turn(t: Touch, layout: Layout, operands: Sequence[Any]) -> list[Any]:
    """The updates of one piece after those of another."""
    x, indices, updates = operands
    for k in range(len(layout)):
        own = [parts if d is None else parts[k] for d, parts in zip(t.operands[1:], (indices, updates), strict=True)]
        (x,) = _bind(t.equation, x, *own, indices_are_sorted=False, unique_indices=False)
    return [x]


def _extreme(t: Touch, layout: Layout, operands: Sequence[Any]) -> list[Any]:
    """Where the first of the largest or smallest elements is; one that is no number is beyond all."""
    e, dim, (parts,) = t.equation, t.operands[0], operands
    assert dim is not None
    monoid, beyond = _EXTREMES[e.name]
    best: Any = None
    for x, piece, start in zip(parts, layout, starts_of(layout), strict=True):
        own = inside(x, dim, piece, identity(monoid, x.dtype))
        (at,) = _bind(e, own)
        # All inside may be as small as what is outside.
        at = lax.clamp(at.dtype.type(piece.start), at, at.dtype.type(piece.end - 1)) + at.dtype.type(
            start - piece.start
        )
        value: Any = (lax.reduce_max if monoid == "max" else lax.reduce_min)(own, (dim,)) if len(layout) > 1 else None
        if best is None:
            best = at, value
            continue
        more = beyond(value, best[1]) | (lax.ne(value, value) & lax.eq(best[1], best[1]))
        best = lax.select(more, at, best[0]), lax.select(more, value, best[1])
    return [best[0]]
