"""Operators on arrays whose merged dimensions are apart (``rewrite.split_merged_dims``): the fine form of an array.

    (B * S, D)      in fine form (B, S, D), its groups ((B, S), (D,))

An equation treats all elements of a merged dimension alike if it can be written with the dimensions that it was merged
from: what was one dimension in its parameters is then a group of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jax import lax

from gshard.core.program import Equation, Value
from gshard.core.rule import Span
from gshard.rewrite.equation_graph import Array
from gshard.rules.elementwise import N_ARY, UNARY
from gshard.rules.movement import one_array

Groups = tuple[tuple[int, ...], ...]  # for each dimension the sizes of those that it was merged from

ELEMENTWISE = frozenset((*UNARY, *N_ARY)) - {"copy_p", "name", "optimization_barrier"}
_REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
_ALONG_ONE = "cumsum cumprod cummax cummin cumlogsumexp".split()
_SCATTERS = "scatter scatter-add scatter-mul scatter-min scatter-max".split()


@dataclasses.dataclass(frozen=True, slots=True)
class Fine:
    """An array in fine form.

    Attributes:
        array: it; its shape is the groups' numbers in a row.
        groups: for each dimension of the merged array the sizes of its own.
        roots: where it was merged: what would have been made there.
    """

    array: Array
    groups: Groups
    roots: frozenset[Value]

    def dims(self, d: int) -> range:
        """The dimensions that stand for one of the merged array."""
        first = sum(map(len, self.groups[:d]))
        return range(first, first + len(self.groups[d]))

    def all_dims(self, dims: Iterable[int]) -> tuple[int, ...]:
        return tuple(i for d in dims for i in self.dims(d))


class Maker(Protocol):
    """Interface of the rewriter (``rewrite.split_merged_dims``)."""

    def either(self, x: Array) -> Fine:
        """An array in fine form, or one none of whose dimensions was merged."""

    def operands(self, e: Equation, groups: Sequence[Groups]) -> list[Array] | None:
        """The operands of an equation with their dimensions as in some groups; None if one was merged from others."""

    def add(self, at: Equation, params: dict[str, Any], inputs: Sequence[Array], shape: tuple[int, ...], dtype: Any,
            primitive: Any = None) -> Value:  # fmt: skip
        """Appends an equation, of the primitive of ``at`` or another one, and returns its result."""

    def note(self, e: Equation, array: Value, groups: Groups, which: int = 0) -> bool:
        """Notes what a result of an equation is in fine form."""


def flat(groups: Groups) -> tuple[int, ...]:
    """The shape in fine form."""
    return tuple(n for group in groups for n in group)


def groups_of(fine: Sequence[int], merged: Sequence[int]) -> Groups | None:
    """The sizes that dimensions have if an array of one shape becomes one of another; None if they cross.

    >>> groups_of((8, 512, 128), (4096, 2, 64))
    ((8, 512), (2,), (64,))
    >>> groups_of((4, 6), (3, 8)) is None
    True
    """
    rest, groups = [n for n in fine if n != 1][::-1], []
    for m in merged:
        group: list[int] = []
        while m > 1:
            n = rest.pop()
            if n > m:
                if n % m:
                    return None
                rest.append(n // m)
                n = m
            if m % n:
                return None
            group.append(n)
            m //= n
        groups.append(tuple(group) or (1,))
    return tuple(groups)


def _emit(a: Maker, e: Equation, inputs: Sequence[Array], groups: Groups, **params: Any) -> bool:
    """Computes an equation in fine form, with some parameters changed; True."""
    return a.note(e, a.add(e, {**e.params, **params}, inputs, flat(groups), e.outputs[0].dtype), groups)


def _transpose(a: Maker, e: Equation) -> bool:
    own, order = a.either(e.inputs[0]), e.params["permutation"]
    return _emit(a, e, (own.array,), tuple(own.groups[d] for d in order), permutation=own.all_dims(order))


def _broadcast(a: Maker, e: Equation) -> bool:
    own, dims, shape = a.either(e.inputs[0]), e.params["broadcast_dimensions"], e.params["shape"]
    groups: list[tuple[int, ...]] = [(n,) for n in shape]
    for d, group in zip(dims, own.groups, strict=True):
        if math.prod(group) == shape[d]:
            groups[d] = group
        elif len(group) > 1:
            return False
    made = Fine(e.outputs[0], tuple(groups), frozenset())
    sizes = {"shape": flat(made.groups), "broadcast_dimensions": made.all_dims(dims)}
    return _emit(a, e, (own.array,), made.groups, **sizes)


def _reduce(a: Maker, e: Equation) -> bool:
    own, axes = a.either(e.inputs[0]), e.params["axes"]
    if len(e.inputs) > 1 or (e.name.startswith("arg") and any(len(own.groups[d]) > 1 for d in axes)):
        return False
    groups = tuple(g for d, g in enumerate(own.groups) if d not in axes)
    return _emit(a, e, (own.array,), groups, axes=own.all_dims(axes))


def _along_one(a: Maker, e: Equation) -> bool:
    own, axis = a.either(e.inputs[0]), e.params["axis"]
    return len(own.groups[axis]) == 1 and _emit(a, e, (own.array,), own.groups, axis=own.dims(axis)[0])


def _parts(a: Maker, e: Equation) -> bool:
    made = [_cut(a, e, cuts) for cuts in one_array(e)]
    return None not in made and all([a.note(e, *own, i) for i, own in enumerate(made) if own is not None])


def _cut(a: Maker, e: Equation, cuts: Sequence[Span]) -> tuple[Value, Groups] | None:
    """A part of an array: of a merged dimension all, or one of the first that it was merged from."""
    own, out = a.either(e.inputs[0]), e.outputs[0]
    every: list[tuple[int, int, int]] = []
    groups: list[tuple[int, ...]] = []
    dropped: list[int] = []
    for d, (group, span) in enumerate(zip(own.groups, cuts, strict=True)):
        start, step, end = span.start, span.step, span.start + span.step * (span.count - 1) + 1
        inner = [(0, n, 1) for n in group[1:]]
        m = math.prod(group[1:])
        if len(group) == 1:
            every.append((start, end, step))
            groups.append((span.count,))
        elif (start, end, step) == (0, math.prod(group), 1):
            every += [(0, group[0], 1), *inner]
            groups.append(group)
        elif (end - start, start % m, step) == (m, 0, 1):
            every += [(start // m, end // m, 1), *inner]
            groups.append(group[1:])
            dropped.append(own.dims(d)[0])
        else:
            return None
    params = dict(zip(("start_indices", "limit_indices", "strides"), zip(*every, strict=True), strict=True))
    shape = tuple(-(-(end - start) // step) for start, end, step in every)
    made = a.add(e, params, (own.array,), shape, out.dtype, lax.slice_p)
    if dropped:
        made = a.add(e, {"dimensions": tuple(dropped)}, (made,), flat(tuple(groups)), out.dtype, lax.squeeze_p)
    return made, tuple(groups)


def _pad(a: Maker, e: Equation) -> bool:
    own, out = a.either(e.inputs[0]), e.outputs[0]
    config = [tuple(map(int, c)) for c in e.params["padding_config"]]
    if any(len(g) > 1 and any(c) for g, c in zip(own.groups, config, strict=True)):
        return False
    groups = tuple(g if len(g) > 1 else (n,) for g, n in zip(own.groups, out.shape, strict=True))
    every = tuple(c for g, c in zip(groups, config, strict=True) for _ in g)
    return _emit(a, e, (own.array, e.inputs[1]), groups, padding_config=every)


def _concatenate(a: Maker, e: Equation) -> bool:
    d, out = e.params["dimension"], e.outputs[0]
    own = next(x for x in map(a.either, e.inputs) if any(len(g) > 1 for g in x.groups))
    if len(own.groups[d]) > 1:
        return False

    def with_own(n: int) -> Groups:
        return tuple((n,) if i == d else g for i, g in enumerate(own.groups))

    arrays, groups = a.operands(e, [with_own(x.shape[d]) for x in e.inputs]), with_own(out.shape[d])
    return arrays is not None and _emit(a, e, arrays, groups, dimension=own.dims(d)[0])


def _dot(a: Maker, e: Equation) -> bool:
    lhs, rhs = map(a.either, e.inputs)
    summed, batch = e.params["dimension_numbers"]
    for ours, theirs in (*zip(*summed, strict=True), *zip(*batch, strict=True)):
        if lhs.groups[ours] != rhs.groups[theirs]:
            return False
    numbers = tuple((lhs.all_dims(ours), rhs.all_dims(theirs)) for ours, theirs in (summed, batch))
    free = [[g for d, g in enumerate(x.groups) if d not in (*own, *shared)]
            for x, own, shared in zip((lhs, rhs), summed, batch, strict=True)]  # fmt: skip
    groups = (*(lhs.groups[d] for d in batch[0]), *free[0], *free[1])
    return _emit(a, e, (lhs.array, rhs.array), groups, dimension_numbers=numbers)


def _squeeze(a: Maker, e: Equation) -> bool:
    own, dims = a.either(e.inputs[0]), {d % len(e.inputs[0].shape) for d in e.params["dimensions"]}
    groups = tuple(g for d, g in enumerate(own.groups) if d not in dims)
    return _emit(a, e, (own.array,), groups, dimensions=own.all_dims(sorted(dims)))


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
    return _emit(a, e, arrays, groups, dimension_numbers=numbers, slice_sizes=slices)


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
    return _emit(a, e, arrays, groups, dimension_numbers=numbers)


def _interleaved(windows: Sequence[tuple[int, ...]], rest: Sequence[tuple[int, ...]], at: Sequence[int]) -> Groups:
    """Groups of windows at some dimensions, those of the rest at the others."""
    left = [iter(rest), iter(windows)]
    return tuple(next(left[d in at]) for d in range(len(windows) + len(rest)))


HOW: Mapping[str, Callable[[Maker, Equation], bool]] = {
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot,
    "slice": _parts,
    "split": _parts,
    "pad": _pad,
    "concatenate": _concatenate,
    "squeeze": _squeeze,
    "gather": _gather,
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(_ALONG_ONE, _along_one),
    **dict.fromkeys(_SCATTERS, _scatter),
}
