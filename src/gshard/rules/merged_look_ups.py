"""Writes look-ups and scatters in fine form (``language.merged_dims``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax import lax

from gshard.core.program import Equation
from gshard.language.merged_dims import Fine, Groups, Maker, emit
from gshard.language.traits import set_traits


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
