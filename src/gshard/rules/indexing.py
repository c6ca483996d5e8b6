"""Look-ups by index and their transposes: gather and the scatter family.

What splits:

    batching dimensions             parallel, shared by operand, indices and result
    window dimensions taken whole   parallel, shared by operand and result (or updates)
    dimensions of the indices       parallel for a gather; for a scatter that accumulates, a reduce factor: every
                                    device scatters its own updates and the results are combined
    dimensions that are indexed     gather: a reduce factor, every device looks up what it holds and contributes zero
                                    for the rest; scatter: parallel, every device writes what falls into its part
    partial windows                 whole

Indices out of range keep JAX's meaning for the whole array (clip, drop or fill): that is decided before the part's
offset is subtracted, and no index out of a part's range is ever emitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards, identity
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.rules.dynamic import adding
from gshard.rules.registry import Call, rule

_CLIP, _FILL = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP


@rule("gather")
def gather(call: Call) -> Rule:
    """
    >>> import jax
    >>> numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
    >>> params = {"dimension_numbers": numbers, "slice_sizes": (1, 6), "mode": None}
    >>> print(gather(Call("gather", params, ((10, 6), (4, 1)), ((4, 6),), ("f4", "i4"))))
    a b, c d -> c b; add over a=10; whole d
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
    looked_up: dict[int, int] = {}  # operand dimensions that are indexed one element at a time: their index column
    for d, n in enumerate(operand_shape):
        if d in shared:
            operand.append(batch[shared[d]])
        elif d in numbers.collapsed_slice_dims:
            if d in numbers.start_index_map and not call.on_keys:
                looked_up[d] = numbers.start_index_map.index(d)
                operand.append(make.factor(n, REDUCE, adding(call.in_dtypes[0])))
            else:
                operand.append(make.whole(n))
        elif slice_sizes[d] == n:
            operand.append(make.factor(n))
            result[next(offsets)] = operand[-1]
        else:
            operand.append(make.whole(n))
            result[next(offsets)] = make.whole(slice_sizes[d])

    def local(shards: Shards, x: Any, indices: Any) -> list[Any]:
        sizes = tuple(x.shape[d] if size == n else size for d, (n, size) in enumerate(zip(operand_shape, slice_sizes)))
        split = {d: column for d, column in looked_up.items() if shards.atoms(operand[d][0])}
        if not split:
            return shards.bind(x, indices, slice_sizes=sizes)
        indices, held, valid = _own_indices(shards, indices, split, operand, operand_shape, call.params["mode"], x)
        (found,) = shards.bind(x, indices, slice_sizes=sizes)
        held, valid = (_over_windows(flags, found.ndim, numbers.offset_dims) for flags in (held, valid))
        found = jnp.where(held & valid, found, jnp.zeros((), found.dtype))
        if call.params["mode"] == _FILL:
            first = shards.is_first(shards.reduced_atoms())
            fill = _fill_value(call.params["fill_value"], found.dtype)
            found = jnp.where(first & ~valid, fill, found)
        return [found]

    indices = [*batch, make.whole(indices_shape[-1])]
    return make.rule([operand, indices], [result], local=local, flops=math.prod(call.out_shapes[0]), masks_itself=True)


def _own_indices(
    shards: Shards,
    indices: Any,
    split: dict[int, int],
    operand: Sequence[tuple[int, ...]],
    shape: tuple[int, ...],
    mode: Any,
    x: Any,
) -> tuple[Any, Any, Any]:
    """Indices into this device's part, which of them it holds, and which are within the whole array."""
    if not jnp.issubdtype(indices.dtype, jnp.signedinteger) or indices.dtype.itemsize < 4:
        # Unsigned indices beyond the array stay beyond it.
        top = jnp.iinfo(jnp.int32).max
        indices = jnp.minimum(indices.astype(jnp.uint32), top).astype(jnp.int32) if (
            jnp.issubdtype(indices.dtype, jnp.unsignedinteger)
        ) else indices.astype(jnp.int32)
    held = valid = jnp.ones(indices.shape[:-1], jnp.bool_)
    for d, column in split.items():
        index = indices[..., column]
        if mode == _FILL:
            valid &= (index >= 0) & (index < shape[d])
        index = jnp.clip(index, 0, shape[d] - 1) - shards.offset(operand[d])
        held &= (index >= 0) & (index < x.shape[d])
        indices = indices.at[..., column].set(jnp.clip(index, 0, x.shape[d] - 1).astype(indices.dtype))
    return indices, held, valid


def _over_windows(flags: Any, ndim: int, window_dims: Sequence[int]) -> Any:
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


_MONOIDS = {"scatter-add": "add", "scatter-mul": "mul", "scatter-min": "min", "scatter-max": "max", "scatter": None}


@rule(*_MONOIDS)
def scatter(call: Call) -> Rule:
    """The transpose of ``gather``; updates that are split are scattered apart and combined.

    The operand itself must count once: all devices but the first along the split start from the monoid's identity.

    >>> import jax
    >>> numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    >>> params = {"dimension_numbers": numbers, "mode": None}
    >>> print(scatter(Call("scatter-add", params, ((10, 6), (4, 1), (4, 6)), ((10, 6),), ("f4", "i4", "f4"))))
    a b, c d, c b -> a b; add over c=4; whole d
    """
    numbers, monoid = call.params["dimension_numbers"], _MONOIDS[call.name]
    operand_shape, indices_shape, updates_shape = call.in_shapes
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    dtype = call.in_dtypes[0]
    accumulates = monoid is not None and not jax.dtypes.issubdtype(dtype, jnp.complexfloating)
    if monoid == "mul" and call.params.get("update_jaxpr") is None:
        accumulates = False
    make = RuleMaker()
    batch: list[tuple[int, ...]] = []
    for d, n in enumerate(indices_shape[:-1]):
        if d in batching.values():
            batch.append(make.factor(n))
        else:
            batch.append(make.factor(n, REDUCE, monoid) if accumulates else make.whole(n))
    updates: list[tuple[int, ...]] = [() for _ in updates_shape]
    outside = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    for d, dim in zip(outside, batch, strict=True):
        updates[d] = dim
    windows = iter(numbers.update_window_dims)
    operand: list[tuple[int, ...]] = []
    written: dict[int, int] = {}  # operand dimensions that are indexed one element at a time: their index column
    for d, n in enumerate(operand_shape):
        if d in batching:
            operand.append(batch[batching[d]])
        elif d in numbers.inserted_window_dims:
            indexed = d in numbers.scatter_dims_to_operand_dims and not call.on_keys
            operand.append(make.factor(n) if indexed else make.whole(n))
            if indexed:
                written[d] = numbers.scatter_dims_to_operand_dims.index(d)
        else:
            at = next(windows)
            same = updates_shape[at] == n
            operand.append(make.factor(n) if same else make.whole(n))
            updates[at] = operand[-1] if same else make.whole(updates_shape[at])

    def local(shards: Shards, x: Any, indices: Any, changes: Any) -> list[Any]:
        atoms = shards.reduced_atoms()
        if atoms:
            assert monoid is not None
            x = jnp.where(shards.is_first(atoms), x, jnp.asarray(identity(monoid, x.dtype), x.dtype))
        split = {d: column for d, column in written.items() if shards.atoms(operand[d][0])}
        if not split:
            return shards.bind(x, indices, changes)
        indices, held, valid = _own_indices(shards, indices, split, operand, operand_shape, call.params["mode"], x)
        mine = held & valid
        if monoid is not None:
            flags = _over_windows(mine, changes.ndim, numbers.update_window_dims)
            changes = jnp.where(flags, changes, jnp.asarray(identity(monoid, changes.dtype), changes.dtype))
            return shards.bind(x, indices, changes)
        # What is not ours is written to one more row, which is dropped again.
        d, column = next(iter(split.items()))
        indices = indices.at[..., column].set(jnp.where(mine, indices[..., column], x.shape[d]).astype(indices.dtype))
        longer = jnp.pad(x, [(0, int(k == d)) for k in range(x.ndim)])
        (result,) = shards.bind(longer, indices, changes)
        return [lax.slice_in_dim(result, 0, x.shape[d], axis=d)]

    indices = [*batch, make.whole(indices_shape[-1])]
    flops = math.prod(updates_shape)
    return make.rule([operand, indices, updates], [operand], local=local, flops=flops)
