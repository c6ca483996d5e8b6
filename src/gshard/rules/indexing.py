"""Look-ups by index and their transposes: gather and the scatter family, also in merged dimensions."""

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
from gshard.core.program import Equation
from gshard.core.rule import REDUCE, Rule, RuleMaker, moves
from gshard.core.xla_workarounds import opaque_for_one, taken, update_window
from gshard.language.registry import Call, rule
from gshard.language.traits import Fine, Groups, Maker, emit, set_traits

Dim = tuple[int, ...]
Combine = Callable[[Any, Any], Any]

_FILL = lax.GatherScatterMode.FILL_OR_DROP
_UNORDERED = {"indices_are_sorted": False, "unique_indices": False}


@dataclasses.dataclass(frozen=True, slots=True)
class _Partial:
    """A dimension of the operand along which a look-up reads or writes only a window."""

    dim: int  # the dimension of the operand
    n: int  # its size
    size: int  # the size of the window
    column: int | None  # the component of the indices at which windows begin; None if all begin at 0
    axis: int | None  # the dimension of the window in the result or the updates; None for a dropped dimension of size 1


@rule("gather")
def gather(call: Call) -> Rule:
    """Dimensions of the indices, batches and whole windows are parallel. Other dimensions of the operand are reduced.

    >>> import jax
    >>> numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
    >>> params = {"dimension_numbers": numbers, "slice_sizes": (1, 6), "mode": None}
    >>> print(gather(Call("gather", params, ((10, 6), (4, 1)), ((4, 6),), ("f4", "i4"))))
    a b, c d -> c b; pick over a=10; replicate d
    """
    numbers, indices_shape = call.params["dimension_numbers"], call.in_shapes[1]
    make = RuleMaker()
    batch = make.parallel(indices_shape[:-1])
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    operand, result, partial = _look_up_dims(
        call, make, call.out_shapes[0], {d: batch[index_dim] for d, index_dim in batching.items()}, batch,
        numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map,
        lambda n: make.factor(n, REDUCE, "pick"),
    )  # fmt: skip
    indices = [*batch, make.replicate(indices_shape[-1])]
    flops = math.prod(call.out_shapes[0])
    linear = [("add", (0,))] if call.params["mode"] == _FILL else moves(0)
    local = _Gather(call, operand, partial).local
    return make.rule([operand, indices], [result], local=local, flops=flops, masks_itself=True, linear=linear)


@dataclasses.dataclass(frozen=True, slots=True)
class _Gather:
    """A look-up on shards."""

    call: Call
    operand: Sequence[Dim]  # its dimensions
    partial: Sequence[_Partial]

    def local(self, shards: Shards, x: Any, indices: Any) -> list[Any]:
        """Runs the look-up on the parts of a device."""
        call, operand, partial = self.call, self.operand, self.partial
        slice_sizes, offset_dims = call.params["slice_sizes"], call.params["dimension_numbers"].offset_dims
        sizes = tuple(n if size == whole else size for n, size, whole in zip(x.shape, slice_sizes, call.in_shapes[0]))
        ndim = len(call.out_shapes[0])
        split = [p for p in partial if shards.atoms(operand[p.dim][0])]
        fills = call.params["mode"] == _FILL
        unreduced = shards.passing("add")
        if not split:
            (out,) = shards.bind(x, indices, slice_sizes=sizes)
            if fills and unreduced:
                # Only one part of the sum gets the fill value. The others get the identity of the sum.
                inside = over_windows(_is_inside(signed(indices), partial), ndim, offset_dims)
                zero = jnp.asarray(identity("add", out.dtype), out.dtype)
                out = jnp.where(inside | shards.is_first(unreduced), out, zero)
            return [out]
        indices = signed(indices)
        valid: Any = _is_inside(indices, partial if fills and unreduced else ())
        held: Any = jnp.ones((1,) * ndim, jnp.bool_)
        for p in split:
            length = x.shape[p.dim]
            offset = shards.offset(operand[p.dim])
            if p.column is None:
                # Every window consists of the first elements. The device looks up those that it holds.
                at = jnp.arange(p.size, dtype=jnp.int32) - offset
                x = taken(x, at, p.dim)
                at = at if p.axis is None else along(at, p.axis, ndim)
            else:
                start = jnp.clip(indices[..., p.column], 0, p.n - p.size)
                if fills:
                    valid &= start == indices[..., p.column]
                at = start - offset
                x = _extended(x, p.dim, p.size - 1, p.size - 1)
                indices = with_column(indices, p.column, jnp.clip(at + p.size - 1, 0, length + p.size - 2))
                at = over_windows(at, ndim, offset_dims)
                if p.axis is not None:
                    at = at + along(jnp.arange(p.size, dtype=jnp.int32), p.axis, ndim)
            held = held & (at >= 0) & (at < length)
        (out,) = shards.bind(x, indices, slice_sizes=sizes, indices_are_sorted=False)
        valid = over_windows(valid, ndim, offset_dims)
        out = jnp.where(held & valid, out, jnp.zeros((), out.dtype))
        if fills:
            fill = _fill_value(call.params["fill_value"], out.dtype)
            if unreduced:
                fill = jnp.where(shards.is_first(unreduced), fill, jnp.asarray(identity("add", out.dtype), fill.dtype))
            out = jnp.where(shards.is_first(shards.reduced_atoms()) & ~valid, fill, out)
        return [out]


def _look_up_dims(
    call: Call,
    make: RuleMaker,
    shape: Sequence[int],
    batching: Mapping[int, Dim],
    batch: Sequence[Dim],
    window_dims: Sequence[int],
    dropped: Container[int],
    columns: Sequence[int],
    create: Callable[[int], Dim],
) -> tuple[list[Dim], list[Dim], list[_Partial]]:
    """The dimensions of the operand and of the windows (the result of a gather, the updates of a scatter)."""
    indices, axes = iter(batch), iter(window_dims)
    windows = [() if d in window_dims else next(indices) for d in range(len(shape))]
    operand: list[Dim] = []
    partial: list[_Partial] = []
    for d, n in enumerate(call.in_shapes[0]):
        if d in batching:
            operand.append(batching[d])
            continue
        axis = None if d in dropped else next(axes)
        size = min(1, n) if axis is None else shape[axis]
        if axis is not None and size == n:
            windows[axis] = make.factor(n)
            operand.append(windows[axis])
            continue
        operand.append(make.replicate(n) if call.on_keys or not size else create(n))
        partial.append(_Partial(d, n, size, columns.index(d) if d in columns else None, axis))
        if axis is not None:
            windows[axis] = make.replicate(size)
    return operand, windows, partial


def _is_inside(indices: Any, partial: Sequence[_Partial]) -> Any:
    """For each index, whether its window is inside of the whole array."""
    starts = [(indices[..., p.column], p.n - p.size) for p in partial if p.column is not None]
    inside = [(start >= 0) & (start <= last) for start, last in starts]
    return functools.reduce(jnp.logical_and, inside, jnp.ones(indices.shape[:-1], jnp.bool_))


def signed(indices: Any) -> Any:
    """Indices with a signed dtype, for offsets to be subtracted. Indices beyond the array stay beyond it."""
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        return jnp.minimum(indices.astype(jnp.uint32), jnp.iinfo(jnp.int32).max).astype(jnp.int32)
    return indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)


def with_column(indices: Any, column: int, values: Any) -> Any:
    """The indices with one component replaced."""
    new = values[..., None].astype(indices.dtype)
    columns = [x for x in (indices[..., :column], new, indices[..., column + 1 :]) if x.shape[-1]]
    return lax.concatenate(columns, indices.ndim - 1) if len(columns) > 1 else new


def _extended(x: Any, dim: int, low: int, high: int) -> Any:
    """The array with additional elements at the ends of a dimension."""
    if not low and not high:
        return x
    return jnp.pad(x, [(low, high) if d == dim else (0, 0) for d in range(x.ndim)])


def over_windows(flags: Any, ndim: int, window_dims: Sequence[int]) -> Any:
    """Reshapes one flag for each index, so that it is broadcast over the dimensions of its window."""
    return jnp.expand_dims(flags, tuple(d for d in range(ndim) if d in window_dims))


def _fill_value(value: Any, dtype: Any) -> Any:
    """The result of a gather for an index out of range; JAX's default if the value is None."""
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max, dtype)


# For each scatter the monoid of its updates, and the function that combines an element and its update.
_SCATTERS: dict[str, tuple[str | None, Combine]] = {
    "scatter-add": ("add", lax.add),
    "scatter-sub": ("add", lax.sub),  # all but the first subtract from zero
    "scatter-mul": ("mul", lax.mul),
    "scatter-min": ("min", lax.min),
    "scatter-max": ("max", lax.max),
    "scatter": (None, lambda x, y: y),
}


def combination(name: str, params: Mapping[str, Any]) -> Combine | None:
    """The function with which a scatter combines an element and its update; None for a function of the user."""
    given = name == "scatter" and params.get("update_jaxpr") is not None
    return None if given or name not in _SCATTERS else _SCATTERS[name][1]


def drops(params: Mapping[str, Any]) -> bool:
    """Whether a scatter drops windows that are not inside of the array, instead of clipping their starts."""
    return params["mode"] in (_FILL, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


@rule(*_SCATTERS)
def scatter(call: Call) -> Rule:
    """The transpose of ``gather``. If updates are split, devices scatter their own updates, and gshard combines them.

    The operand must count once, so all devices except the first start from the identity of the monoid.

    >>> import jax
    >>> numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    >>> params = {"dimension_numbers": numbers, "mode": None}
    >>> print(scatter(Call("scatter-add", params, ((10, 6), (4, 1), (4, 6)), ((10, 6),), ("f4", "i4", "f4"))))
    a b, c d, c b -> a b; add over c=4; replicate d
    """
    numbers, monoid = call.params["dimension_numbers"], _SCATTERS[call.name][0]
    _, indices_shape, updates_shape = call.in_shapes
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
    operand, updates, partial = _look_up_dims(
        call, make, updates_shape, {d: batch[index_dim] for d, index_dim in batching.items()}, batch,
        numbers.update_window_dims, numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims, make.factor,
    )  # fmt: skip
    scattered = _Scatter(call, monoid, operand, partial)
    indices = [*batch, make.replicate(indices_shape[-1])]
    flops = math.prod(updates_shape)
    return make.rule([operand, indices, updates], [operand], local=scattered.local, flops=flops)


@dataclasses.dataclass(frozen=True, slots=True)
class _Scatter:
    """A scatter on shards."""

    call: Call
    monoid: str | None
    operand: Sequence[Dim]  # its dimensions
    partial: Sequence[_Partial]

    @property
    def numbers(self) -> Any:
        """The dimension numbers."""
        return self.call.params["dimension_numbers"]

    def local(self, shards: Shards, x: Any, indices: Any, changes: Any) -> list[Any]:
        """Runs the scatter on the parts of a device."""
        atoms = shards.reduced_atoms()
        if atoms:
            assert self.monoid is not None
            x = jnp.where(shards.is_first(atoms), x, jnp.asarray(identity(self.monoid, x.dtype), x.dtype))
        split = [p for p in self.partial if shards.atoms(self.operand[p.dim][0])]
        if not split:
            return shards.bind(x, indices, changes)
        indices, old = signed(indices), x
        split_columns = {p.column for p in split}
        # Updates of single elements in other parts get an index out of range, and XLA drops them.
        single = all(p.size == 1 and p.column is not None for p in split)
        overlaps: Any = jnp.ones(indices.shape[:-1], jnp.bool_)  # whether the window of an index overlaps the part
        starts: dict[int, tuple[int, Any]] = {}  # for each column a start out of range, and the starts of windows
        is_written: Any = jnp.ones((1,) * x.ndim, jnp.bool_)
        for p in split:
            offset, length = shards.offset(self.operand[p.dim]), x.shape[p.dim]
            if p.column is None:
                # Every window consists of the first elements. The update is extended to the part, and the elements
                # beyond the window are restored afterwards.
                at = offset + jnp.arange(length, dtype=jnp.int32)
                changes = changes if p.axis is None else taken(changes, at, p.axis)
                is_written &= along(at < p.size, p.dim, x.ndim)
                continue
            start = jnp.clip(indices[..., p.column], 0, p.n - p.size)
            if drops(self.call.params):
                overlaps &= start == indices[..., p.column]
            start = start - offset
            overlaps &= (start > -p.size) & (start < length)
            # Windows may begin up to ``size - 1`` elements before the part. Others are written behind the part.
            x = x if single else _extended(x, p.dim, p.size - 1, p.size)
            starts[p.column] = (length + p.size - 1, start + p.size - 1)
        for column, (out_of_range, start) in starts.items():
            indices = with_column(indices, column, jnp.where(overlaps, start, out_of_range))
        if single:
            return [self._elements(shards, x, indices, changes, overlaps, split_columns)]
        (result,) = shards.bind(x, indices, changes, **_UNORDERED)
        for p in split:
            if p.column is not None:
                result = lax.slice_in_dim(result, p.size - 1, p.size - 1 + old.shape[p.dim], axis=p.dim)
        return [jnp.where(is_written, result, old) if None in split_columns else result]

    def _elements(
        self, shards: Shards, x: Any, indices: Any, changes: Any, overlaps: Any, split_columns: Container[int | None]
    ) -> Any:
        """Writes windows of one element along each split dimension."""
        if math.prod(indices.shape[:-1]) == 1:
            combine = combination(self.call.name, self.call.params)
            if combine is not None:
                return self._one_window(x, indices.reshape(-1), changes, overlaps.reshape(()), split_columns, combine)
            x = opaque_for_one(x, 1)
        if not drops(self.call.params):
            for column, d in enumerate(self.numbers.scatter_dims_to_operand_dims):
                if column not in split_columns:
                    last = self.call.in_shapes[0][d] - self._sizes[d]
                    indices = with_column(indices, column, jnp.clip(indices[..., column], 0, last))
        return shards.bind(x, indices, changes, mode=_FILL, **_UNORDERED)[0]

    def _one_window(
        self, x: Any, index: Any, changes: Any, overlaps: Any, split_columns: Container[int | None], combine: Combine
    ) -> Any:
        """Writes one window, or the old values if the window does not overlap the part."""
        start = [jnp.zeros((), index.dtype)] * x.ndim
        sizes = [n if size == whole else size for n, size, whole in zip(x.shape, self._sizes, self.call.in_shapes[0])]
        for column, d in enumerate(self.numbers.scatter_dims_to_operand_dims):
            start[d] = jnp.clip(index[column], 0, x.shape[d] - sizes[d])
            if drops(self.call.params) and column not in split_columns:
                overlaps &= start[d] == index[column]
        new = jnp.asarray(changes, x.dtype).reshape(sizes)
        return update_window(x, start, sizes, lambda old: combine(old, new), overlaps)

    @property
    def _sizes(self) -> list[int]:
        """The size of a window along each dimension of the operand."""
        windows = iter(self.numbers.update_window_dims)
        outer = {*self.numbers.inserted_window_dims, *self.numbers.operand_batching_dims}
        updates = self.call.in_shapes[2]
        return [1 if d in outer else updates[next(windows)] for d in range(len(self.call.in_shapes[0]))]


# Writes look-ups and scatters in fine form (``language.traits``).


def _gather(a: Maker, e: Equation) -> bool:
    """A gather, if merged dimensions of the operand are batching dimensions."""
    (x, indices), numbers, out = map(a.either, e.inputs), e.params["dimension_numbers"], e.outputs[0]
    batch = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if any(len(group) > 1 and d not in batch for d, group in enumerate(x.groups)) or len(indices.groups[-1]) > 1:
        return False
    of_batch = {index_dim: x.groups[d] for d, index_dim in batch.items()}
    index_groups = tuple(of_batch.get(d, group) for d, group in enumerate(indices.groups))
    indices = dataclasses.replace(indices, groups=index_groups)
    arrays = a.operands(e, [x.groups, indices.groups])
    if arrays is None:
        return False
    sizes = e.params["slice_sizes"]
    windows = [(sizes[d],) for d in range(len(x.groups)) if d not in batch and d not in numbers.collapsed_slice_dims]
    groups = _interleaved(windows, indices.groups[:-1], numbers.offset_dims)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=Fine(out, groups, frozenset()).all_dims(numbers.offset_dims),
        collapsed_slice_dims=x.all_dims(numbers.collapsed_slice_dims),
        start_index_map=x.all_dims(numbers.start_index_map),
        operand_batching_dims=x.all_dims(numbers.operand_batching_dims),
        start_indices_batching_dims=indices.all_dims(numbers.start_indices_batching_dims),
    )
    slice_sizes: list[int] = []
    for d, group in enumerate(x.groups):
        slice_sizes += [1] * len(group) if d in batch else [sizes[d]]
    return emit(a, e, arrays, groups, dimension_numbers=numbers, slice_sizes=tuple(slice_sizes))


def _scatter(a: Maker, e: Equation) -> bool:
    """A scatter, if merged dimensions of the operand are batching dimensions."""
    (x, at, updates), numbers = e.inputs, e.params["dimension_numbers"]
    indices = a.either(at)
    batch = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    groups = tuple(indices.groups[batch[d]] if d in batch else (n,) for d, n in enumerate(x.shape))
    windows = [(updates.shape[d],) for d in numbers.update_window_dims]
    update_groups = _interleaved(windows, indices.groups[:-1], numbers.update_window_dims)
    arrays = a.operands(e, [groups, indices.groups, update_groups])
    if len(indices.groups[-1]) > 1 or arrays is None:
        return False
    operand = Fine(x, groups, frozenset())
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=Fine(updates, update_groups, frozenset()).all_dims(numbers.update_window_dims),
        inserted_window_dims=operand.all_dims(numbers.inserted_window_dims),
        scatter_dims_to_operand_dims=operand.all_dims(numbers.scatter_dims_to_operand_dims),
        operand_batching_dims=operand.all_dims(numbers.operand_batching_dims),
        scatter_indices_batching_dims=indices.all_dims(numbers.scatter_indices_batching_dims),
    )
    return emit(a, e, arrays, groups, dimension_numbers=numbers)


def _interleaved(
    windows: Sequence[tuple[int, ...]], batch: Sequence[tuple[int, ...]], window_dims: Sequence[int]
) -> Groups:
    """The groups of windows at some dimensions, and the groups of the batch at all others."""
    of_windows, of_batch = iter(windows), iter(batch)
    return tuple(next(of_windows if d in window_dims else of_batch) for d in range(len(windows) + len(batch)))


set_traits("gather", merged=_gather)
set_traits("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", merged=_scatter)
