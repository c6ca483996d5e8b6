"""Look-ups and their transposes on arrays whose merged dimensions are apart (``language.merged_dims``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax import lax

from gshard.core.program import Equation
from gshard.language.merged_dims import Fine, Groups, Maker, emit
from gshard.language.traits import set_traits


def _gather(a: Maker, e: Equation) -> bool:
    """Each row of merged ones looks up in its own, or all in one table."""
    (x, at), numbers, out = map(a.either, e.inputs), e.params["dimension_numbers"], e.outputs[0]
    batch = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if any(len(group) > 1 and d not in batch for d, group in enumerate(x.groups)) or len(at.groups[-1]) > 1:
        return False
    merged = {at_d: x.groups[d] for d, at_d in batch.items()}
    at = dataclasses.replace(at, groups=tuple(merged.get(d, g) for d, g in enumerate(at.groups)))
    arrays = a.operands(e, [x.groups, at.groups])
    if arrays is None:
        return False
    sizes = e.params["slice_sizes"]
    windows = [(sizes[d],) for d in range(len(x.groups)) if d not in batch and d not in numbers.collapsed_slice_dims]
    groups = _interleaved(windows, at.groups[:-1], numbers.offset_dims)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=Fine(out, groups, frozenset()).all_dims(numbers.offset_dims),
        collapsed_slice_dims=x.all_dims(numbers.collapsed_slice_dims),
        start_index_map=x.all_dims(numbers.start_index_map),
        operand_batching_dims=x.all_dims(numbers.operand_batching_dims),
        start_indices_batching_dims=at.all_dims(numbers.start_indices_batching_dims),
    )
    slices = tuple(n for d, g in enumerate(x.groups) for n in ((1,) * len(g) if d in batch else (sizes[d],)))
    return emit(a, e, arrays, groups, dimension_numbers=numbers, slice_sizes=slices)


def _scatter(a: Maker, e: Equation) -> bool:
    """Each row of merged ones is written to in its own row."""
    (x, at, updates), numbers = e.inputs, e.params["dimension_numbers"]
    places = a.either(at)
    batch = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    groups = tuple(places.groups[batch[d]] if d in batch else (n,) for d, n in enumerate(x.shape))
    windows = [(updates.shape[d],) for d in numbers.update_window_dims]
    of_updates = _interleaved(windows, places.groups[:-1], numbers.update_window_dims)
    arrays = a.operands(e, [groups, places.groups, of_updates])
    if len(places.groups[-1]) > 1 or arrays is None:
        return False
    own = Fine(x, groups, frozenset())
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=Fine(updates, of_updates, frozenset()).all_dims(numbers.update_window_dims),
        inserted_window_dims=own.all_dims(numbers.inserted_window_dims),
        scatter_dims_to_operand_dims=own.all_dims(numbers.scatter_dims_to_operand_dims),
        operand_batching_dims=own.all_dims(numbers.operand_batching_dims),
        scatter_indices_batching_dims=places.all_dims(numbers.scatter_indices_batching_dims),
    )
    return emit(a, e, arrays, groups, dimension_numbers=numbers)


def _interleaved(windows: Sequence[tuple[int, ...]], rest: Sequence[tuple[int, ...]], at: Sequence[int]) -> Groups:
    """Groups of windows at some dimensions, those of the rest at the others."""
    left = [iter(rest), iter(windows)]
    return tuple(next(left[d in at]) for d in range(len(windows) + len(rest)))


set_traits("gather", merged=_gather)
set_traits("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", merged=_scatter)
