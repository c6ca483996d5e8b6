"""Look-ups by index and their transposes: gather and the scatter family.

What splits:

    batching dimensions             parallel, shared by operand, indices and result
    window dimensions taken whole   parallel, shared by operand and result (or updates)
    dimensions of the indices       parallel for a gather; for a scatter that accumulates, a reduce factor: every
                                    device scatters its own updates and the results are combined
    dimensions of the operand       where one element or a part is taken. Gather: a reduce factor, every device looks up
                                    what it holds and contributes zero bits for the rest; scatter: parallel, every
                                    device writes what falls into its part

Indices out of range keep JAX's meaning for the whole array (clip, drop or fill): that is decided before the part's
offset is subtracted. Where JAX was promised that there are none, as for indices that NumPy made, XLA decides: a gather
clips, a scatter drops, so the gradient of what was clipped is dropped. A window that reaches over an end of a part
finds, or writes to, some elements more there; a single element to be written elsewhere is out of the part's range and
dropped, since what it would be combined with is not to be touched (-0.0 + 0.0 is 0.0, and sums lose what is very
small).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards, along, identity
from gshard.core.rule import REDUCE, Rule, RuleMaker, moves
from gshard.core.xla_workarounds import opaque_for_one, taken, update_window
from gshard.language.registry import Call, rule

_FILL = lax.GatherScatterMode.FILL_OR_DROP


@dataclasses.dataclass(frozen=True, slots=True)
class _Partial:
    """A dimension of the operand; only a part (a window) is read or written.

    Attributes:
        dim: the dimension, of ``n`` elements.
        size: of the window.
        column: the component of the indices that says where a window begins; None if all begin at 0.
        axis: the window's dimension in the result or the updates; None where it is dropped, being of size 1.
    """

    dim: int
    n: int
    size: int
    column: int | None
    axis: int | None


@rule("gather")
def gather(call: Call) -> Rule:
    """
    >>> import jax
    >>> numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
    >>> params = {"dimension_numbers": numbers, "slice_sizes": (1, 6), "mode": None}
    >>> print(gather(Call("gather", params, ((10, 6), (4, 1)), ((4, 6),), ("f4", "i4"))))
    a b, c d -> c b; pick over a=10; replicate d
    """
    numbers, slice_sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    operand_shape, indices_shape = call.in_shapes
    make = RuleMaker()
    batch = make.parallel(indices_shape[:-1])
    # Result dimensions that are not offsets are the indices' dimensions, in order.
    result: list[tuple[int, ...]] = [() for _ in call.out_shapes[0]]
    outside = [d for d in range(len(result)) if d not in numbers.offset_dims]
    for d, dim in zip(outside, batch, strict=True):
        result[d] = dim
    shared = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    offsets = iter(numbers.offset_dims)
    operand: list[tuple[int, ...]] = []
    partial: list[_Partial] = []
    for d, n in enumerate(operand_shape):
        if d in shared:
            operand.append(batch[shared[d]])
            continue
        axis = None if d in numbers.collapsed_slice_dims else next(offsets)
        if axis is not None and slice_sizes[d] == n:
            operand.append(make.factor(n))
            result[axis] = operand[-1]
            continue
        column = numbers.start_index_map.index(d) if d in numbers.start_index_map else None
        if call.on_keys or not slice_sizes[d]:
            operand.append(make.replicate(n))
        else:
            operand.append(make.factor(n, REDUCE, "pick"))
            partial.append(_Partial(d, n, slice_sizes[d], column, axis))
        if axis is not None:
            result[axis] = make.replicate(slice_sizes[d])

    def local(shards: Shards, x: Any, indices: Any) -> list[Any]:
        sizes = tuple(x.shape[d] if size == n else size for d, (n, size) in enumerate(zip(operand_shape, slice_sizes)))
        split, ndim = [p for p in partial if shards.atoms(operand[p.dim][0])], len(call.out_shapes[0])
        fills, counted = call.params["mode"] == _FILL, shards.passing("add")
        if not split:
            (found,) = shards.bind(x, indices, slice_sizes=sizes)
            if fills and counted:  # of parts of a sum one is filled in; what is added to it changes nothing
                there = over_windows(_is_inside(signed(indices), partial), ndim, numbers.offset_dims)
                nothing = jnp.asarray(identity("add", found.dtype), found.dtype)
                found = jnp.where(there | shards.is_first(counted), found, nothing)
            return [found]
        indices = signed(indices)
        valid: Any = _is_inside(indices, partial if fills and counted else ())
        held: Any = jnp.ones((1,) * ndim, jnp.bool_)
        for p in split:
            at, length = -shards.offset(operand[p.dim]), x.shape[p.dim]
            if p.column is None:
                # Every window is the first elements: those that are here, and others that count for nothing.
                at = at + jnp.arange(p.size, dtype=jnp.int32)
                x = taken(x, at, p.dim)
                at = at if p.axis is None else along(at, p.axis, ndim)
            else:
                start = jnp.clip(indices[..., p.column], 0, p.n - p.size)
                if fills:
                    valid &= start == indices[..., p.column]
                at = start + at
                x = _extended(x, p.dim, p.size - 1, p.size - 1)
                indices = with_column(indices, p.column, jnp.clip(at + p.size - 1, 0, length + p.size - 2))
                at = over_windows(at, ndim, numbers.offset_dims)
                if p.axis is not None:
                    at = at + along(jnp.arange(p.size, dtype=jnp.int32), p.axis, ndim)
            held = held & (at >= 0) & (at < length)
        (found,) = shards.bind(x, indices, slice_sizes=sizes, indices_are_sorted=False)
        valid = over_windows(valid, ndim, numbers.offset_dims)
        found = jnp.where(held & valid, found, jnp.zeros((), found.dtype))
        if fills:
            first = shards.is_first(shards.reduced_atoms())
            fill = _fill_value(call.params["fill_value"], found.dtype)
            if counted:
                fill = jnp.where(shards.is_first(counted), fill, jnp.asarray(identity("add", found.dtype), fill.dtype))
            found = jnp.where(first & ~valid, fill, found)
        return [found]

    indices = [*batch, make.replicate(indices_shape[-1])]
    flops = math.prod(call.out_shapes[0])
    linear = [("add", (0,))] if call.params["mode"] == _FILL else moves(0)
    return make.rule([operand, indices], [result], local=local, flops=flops, masks_itself=True, linear=linear)


def _is_inside(indices: Any, partial: Sequence[_Partial]) -> Any:
    """For each index, whether its window is inside of the whole array."""
    columns = [(indices[..., p.column], p.n - p.size) for p in partial if p.column is not None]
    inside = [(at >= 0) & (at <= last) for at, last in columns]
    return functools.reduce(jnp.logical_and, inside, jnp.ones(indices.shape[:-1], jnp.bool_))


def signed(indices: Any) -> Any:
    """Indices that an offset can be subtracted from; unsigned ones beyond the array stay beyond it."""
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        return jnp.minimum(indices.astype(jnp.uint32), jnp.iinfo(jnp.int32).max).astype(jnp.int32)
    return indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)


def with_column(indices: Any, column: int, values: Any) -> Any:
    """Indices with another component."""
    return indices.at[..., column].set(values.astype(indices.dtype))


def _extended(x: Any, dim: int, low: int, high: int) -> Any:
    """An array with some elements more at the ends of a dimension."""
    if not low and not high:
        return x
    return jnp.pad(x, [(low, high) if d == dim else (0, 0) for d in range(x.ndim)])


def over_windows(flags: Any, ndim: int, window_dims: Sequence[int]) -> Any:
    """One flag for each index, spread over the dimensions of its window."""
    return jnp.expand_dims(flags, tuple(d for d in range(ndim) if d in window_dims))


def _fill_value(given: Any, dtype: Any) -> Any:
    """What a gather gives for an index out of range: as JAX chooses it if it is not said."""
    if given is not None:
        return jnp.asarray(given, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max, dtype)


_MONOIDS = {
    "scatter-add": "add",
    "scatter-sub": "add",  # all but the first subtract from zero
    "scatter-mul": "mul",
    "scatter-min": "min",
    "scatter-max": "max",
    "scatter": None,
}


_COMBINATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": lambda x, y: y,
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}


def combination(name: str, params: Mapping[str, Any]) -> Callable[[Any, Any], Any] | None:
    """What a scatter makes of an element and its update; None if the user's function does that."""
    return None if name == "scatter" and params.get("update_jaxpr") is not None else _COMBINATIONS.get(name)


def drops(params: Mapping[str, Any]) -> bool:
    """Whether a scatter leaves out windows that are not inside of the array, instead of moving them there."""
    return params["mode"] in (_FILL, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


@rule(*_MONOIDS)
def scatter(call: Call) -> Rule:
    """The transpose of ``gather``; updates that are split are scattered apart and combined.

    The operand itself must count once: all devices but the first along the split start from the monoid's identity.

    >>> import jax
    >>> numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    >>> params = {"dimension_numbers": numbers, "mode": None}
    >>> print(scatter(Call("scatter-add", params, ((10, 6), (4, 1), (4, 6)), ((10, 6),), ("f4", "i4", "f4"))))
    a b, c d, c b -> a b; add over c=4; replicate d
    """
    numbers, monoid = call.params["dimension_numbers"], _MONOIDS[call.name]
    operand_shape, indices_shape, updates_shape = call.in_shapes
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    is_complex = jax.dtypes.issubdtype(call.in_dtypes[0], jnp.complexfloating)
    accumulates = monoid == "add" or (monoid is not None and not is_complex)
    if monoid == "mul" and call.params.get("update_jaxpr") is None:
        accumulates = False
    make = RuleMaker()
    batch: list[tuple[int, ...]] = []
    for d, n in enumerate(indices_shape[:-1]):
        if d in batching.values():
            batch.append(make.factor(n))
        else:
            batch.append(make.factor(n, REDUCE, monoid) if accumulates else make.replicate(n))
    updates: list[tuple[int, ...]] = [() for _ in updates_shape]
    outside = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    for d, dim in zip(outside, batch, strict=True):
        updates[d] = dim
    windows = iter(numbers.update_window_dims)
    operand: list[tuple[int, ...]] = []
    partial: list[_Partial] = []
    for d, n in enumerate(operand_shape):
        if d in batching:
            operand.append(batch[batching[d]])
            continue
        axis = None if d in numbers.inserted_window_dims else next(windows)
        size = 1 if axis is None else updates_shape[axis]
        if axis is not None and size == n:
            operand.append(make.factor(n))
            updates[axis] = operand[-1]
            continue
        mapped = numbers.scatter_dims_to_operand_dims
        operand.append(make.replicate(n) if call.on_keys or not size else make.factor(n))
        partial.append(_Partial(d, n, size, mapped.index(d) if d in mapped else None, axis))
        if axis is not None:
            updates[axis] = make.replicate(size)

    def local(shards: Shards, x: Any, indices: Any, changes: Any) -> list[Any]:
        atoms = shards.reduced_atoms()
        if atoms:
            assert monoid is not None
            x = jnp.where(shards.is_first(atoms), x, jnp.asarray(identity(monoid, x.dtype), x.dtype))
        split = [p for p in partial if shards.atoms(operand[p.dim][0])]
        if not split:
            return shards.bind(x, indices, changes)
        indices, before = signed(indices), x
        # Single elements that are not ours are out of range, and dropped.
        single = all(p.size == 1 and p.column is not None for p in split)
        mine: Any = jnp.ones(indices.shape[:-1], jnp.bool_)
        places: dict[int, tuple[int, Any]] = {}  # for each column the elsewhere of its dimension, and where to write
        written: Any = jnp.ones((1,) * x.ndim, jnp.bool_)
        for p in split:
            offset, length = shards.offset(operand[p.dim]), x.shape[p.dim]
            if p.column is None:
                # Every window is the first elements: this part's share of it covers the part, and what is too much
                # is taken back afterwards.
                at = offset + jnp.arange(length, dtype=jnp.int32)
                if p.axis is not None:
                    changes = taken(changes, at, p.axis)
                    written &= along(at < p.size, p.dim, x.ndim)
                else:
                    written &= along(at == 0, p.dim, x.ndim)
                continue
            start = jnp.clip(indices[..., p.column], 0, p.n - p.size)
            if drops(call.params):
                mine &= start == indices[..., p.column]
            start = start - offset
            mine &= (start > -p.size) & (start < length)
            # Windows may begin up to ``size - 1`` elements before the part; those that do not touch it are behind it.
            x = x if single else _extended(x, p.dim, p.size - 1, p.size)
            places[p.column] = (length + p.size - 1, start + p.size - 1)
        for column, (elsewhere, start) in places.items():
            indices = with_column(indices, column, jnp.where(mine, start, elsewhere))
        changed: dict[str, Any] = {"indices_are_sorted": False, "unique_indices": False}
        if single and math.prod(indices.shape[:-1]) == 1:
            combine = combination(call.name, call.params)
            if combine is not None:
                ours = {p.column for p in split}
                return [_one_window(x, indices.reshape(-1), changes, mine.reshape(()), ours, combine)]
            x = opaque_for_one(x, 1)
        if single:
            if not drops(call.params):
                indices = _clipped(indices, x.shape, {p.column for p in split})
            return shards.bind(x, indices, changes, mode=_FILL, **changed)
        (result,) = shards.bind(x, indices, changes, **changed)
        for p in split:
            if p.column is not None:
                result = lax.slice_in_dim(result, p.size - 1, p.size - 1 + before.shape[p.dim], axis=p.dim)
        return [jnp.where(written, result, before) if any(p.column is None for p in split) else result]

    def _one_window(
        x: Any, index: Any, changes: Any, mine: Any, ours: Container[int | None], combine: Callable[..., Any]
    ) -> Any:
        """Writes one window, or what is there already."""
        windows = iter(numbers.update_window_dims)
        sizes, start = [], [jnp.zeros((), index.dtype)] * x.ndim
        for d, n in enumerate(x.shape):
            size = 1 if d in batching or d in numbers.inserted_window_dims else updates_shape[next(windows)]
            sizes.append(n if size == operand_shape[d] else size)
        for column, d in enumerate(numbers.scatter_dims_to_operand_dims):
            start[d] = jnp.clip(index[column], 0, x.shape[d] - sizes[d])
            if drops(call.params) and column not in ours:
                mine &= start[d] == index[column]
        new = jnp.asarray(changes, x.dtype).reshape(sizes)
        return update_window(x, start, sizes, lambda there: combine(there, new), mine)

    def _clipped(indices: Any, shape: Sequence[int], but: Container[int | None]) -> Any:
        """Indices along other dimensions than those of some columns, moved so that windows fit."""
        outer = {*numbers.inserted_window_dims, *batching}
        kept = (d for d in range(len(shape)) if d not in outer)
        windows = dict(zip(kept, numbers.update_window_dims, strict=True))
        for column, d in enumerate(numbers.scatter_dims_to_operand_dims):
            if column not in but:
                size = updates_shape[windows[d]] if d in windows else 1
                last = 0 if size == operand_shape[d] else operand_shape[d] - size
                indices = with_column(indices, column, jnp.clip(indices[..., column], 0, last))
        return indices

    indices = [*batch, make.replicate(indices_shape[-1])]
    flops = math.prod(updates_shape)
    return make.rule([operand, indices, updates], [operand], local=local, flops=flops)
