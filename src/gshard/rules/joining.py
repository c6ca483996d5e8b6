"""Concatenations and splits along a dimension. Each chunk of elements has its own route (``comm.route``).

concatenate 8 and 8 elements over 4 parts       parts of 2 and 2 become parts of 4: the first two go to part 0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.route import Chunk, Route, routed
from gshard.comm.shards import Shards, along
from gshard.core.program import Equation
from gshard.core.rule import Rule, RuleMaker, Span, moves
from gshard.language.merged_dims import Groups, Maker, emit
from gshard.language.registry import Call, rule
from gshard.language.traits import Part, Places
from gshard.rules.along_axis import AlongAxis
from gshard.rules.movement import at_places
from gshard.rules.slicing import cut, cut_in_fine_form, taken_spans

_LOOK_UP = 8  # operations that cost as much as one look-up of an element


def _concatenate_merged(a: Maker, e: Equation) -> bool:
    d, out = e.params["dimension"], e.outputs[0]
    fine = next(x for x in map(a.either, e.inputs) if any(len(group) > 1 for group in x.groups))
    if len(fine.groups[d]) > 1:
        return False

    def groups_of_size(n: int) -> Groups:
        return tuple((n,) if i == d else group for i, group in enumerate(fine.groups))

    arrays = a.operands(e, [groups_of_size(x.shape[d]) for x in e.inputs])
    return arrays is not None and emit(a, e, arrays, groups_of_size(out.shape[d]), dimension=fine.dims(d)[0])


def _concatenate_at(part: Part, e: Equation, at: Places) -> Any:
    d = e.params["dimension"]
    positions = at[d]
    if positions is None:
        return lax.concatenate([part.of(x, at) for x in e.inputs], d)
    # To compute each operand at all positions may cost more than to compute the whole result and look elements up.
    count = positions.shape[0]
    if e.outputs[0].shape[d] + _LOOK_UP * count < len(e.inputs) * count:
        return at_places(part.of(e.outputs[0], (*at[:d], None, *at[d + 1 :])), (*(None,) * d, positions))
    result = None
    start = sum(x.shape[d] for x in e.inputs)
    for x in reversed(e.inputs):
        start -= x.shape[d]
        if x.shape[d]:
            of_operand = part.of(x, (*at[:d], jnp.clip(positions - start, 0, x.shape[d] - 1), *at[d + 1 :]))
            is_before_end = along(positions < start + x.shape[d], d, len(at))
            result = of_operand if result is None else jnp.where(is_before_end, of_operand, result)
    return result


@rule("concatenate", moves=True, same_on_parts=True, merged=_concatenate_merged, placed=_concatenate_at)
def concatenate(call: Call) -> Rule:
    """Each part of the result fetches the elements of each operand that it contains.

    >>> print(concatenate(Call("concatenate", {"dimension": 0}, ((3, 2), (5, 2)), ((8, 2),), ("f", "f"))))
    a b, a b -> a b; communicate a
    """
    axis = call.params["dimension"]
    return joined(call, axis, [(0, shape[axis]) for shape in call.in_shapes])


def joined(call: Call, axis: int, chunks: Sequence[tuple[int, int]]) -> Rule:
    """The rule of a concatenation of slices."""
    (target,) = call.out_shapes
    make = RuleMaker()
    lengths = [shape[axis] if shape else None for shape in call.in_shapes]
    largest = max(target[axis], *(n for n in lengths if n is not None))
    result = AlongAxis.of(make, target, axis, lambda n: cut(call, make, largest))
    offsets = list(itertools.accumulate((end - start for start, end in chunks), initial=0))

    def route(parts: int, begins: Sequence[int]) -> Route:
        """From the concatenated parts of the operands, which begin at ``begins``, to the part of the result."""
        moved: list[Chunk] = []
        for (start, end), offset, begin, n in zip(chunks, offsets[:-1], begins, lengths, strict=True):
            if n is not None:
                moved += _moved(start, end, offset, n, target[axis], parts, begin, 0)
        return routed(tuple(moved))

    def local(shards: Shards, *xs: Any) -> list[Any]:
        atoms = result.atoms(shards)
        if not atoms:
            return shards.bind(*xs)
        # The parts of all operands are concatenated; an operand that is used twice is there once.
        distinct = list({id(x): x for x in xs if x.shape}.values())
        begins = dict(zip(map(id, distinct), itertools.accumulate((x.shape[axis] for x in distinct), initial=0)))
        part = lax.concatenate(distinct, axis) if len(distinct) > 1 else distinct[0]
        size = shards.out_shape()[axis]
        route_here = route(shards.mesh.count(atoms), [begins.get(id(x), 0) for x in xs])
        part = shards.route(part, axis, atoms, route_here, size)
        numbers = [(x, low, high) for x, low, high in zip(xs, offsets[:-1], offsets[1:], strict=True) if not x.shape]
        if numbers:
            position = lax.axis_index(atoms) * size + lax.broadcasted_iota(jnp.int32, part.shape, axis)
            for x, low, high in numbers:
                part = jnp.where((position >= low) & (position < high), jnp.asarray(x, part.dtype), part)
        return [part]

    sends = result.route_bytes(call.in_dtypes[0], lambda parts: route(parts, [0] * len(chunks)))
    linear = moves(*range(len(call.in_shapes)))
    operands = [result.dims if shape else [] for shape in call.in_shapes]
    spans = tuple(Span(i, int(start), int(end - start)) for i, (start, end) in enumerate(chunks))
    index = tuple(spans if d == axis else () for d in range(len(target)))
    return make.rule(operands, [result.dims], local=local, sends=sends, linear=linear, index=[index])


@rule("split", moves=True, same_on_parts=True, merged=cut_in_fine_form)
def split(call: Call) -> Rule:
    """Part ``i`` of each result fetches the elements of the operand that it contains.

    >>> print(split(Call("split", {"axis": 0, "sizes": (3, 5)}, ((8, 2),), ((3, 2), (5, 2)), ("f",))))
    a b -> a b, a b; communicate a
    """
    axis, sizes = call.params["axis"], tuple(map(int, call.params["sizes"]))
    (source,) = call.in_shapes
    make = RuleMaker()
    operand = AlongAxis.of(make, source, axis, lambda n: cut(call, make, n))

    def route(parts: int) -> Route:
        """From the part of the operand to the concatenated parts of all results."""
        moved: list[Chunk] = []
        start = begin = 0
        for n in sizes:
            moved += _moved(start, start + n, 0, source[axis], n, parts, 0, begin)
            start += n
            begin += -(-n // parts)
        return routed(tuple(moved))

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = operand.atoms(shards)
        if not atoms:
            return shards.bind(x)
        part_sizes = [shards.out_shape(i)[axis] for i in range(len(sizes))]
        x = shards.route(x, axis, atoms, route(shards.mesh.count(atoms)), sum(part_sizes))
        return list(lax.split(x, part_sizes, axis))

    sends = operand.route_bytes(call.in_dtypes[0], route)
    ends = itertools.accumulate(sizes)
    spans = [taken_spans(source[axis], end - size, size) for end, size in zip(ends, sizes, strict=True)]
    index = [tuple(of_result if d == axis else () for d in range(len(source))) for of_result in spans]
    results = [operand.dims for _ in sizes]
    return make.rule([operand.dims], results, local=local, sends=sends, linear=moves(0), index=index)


def _moved(
    start: int, end: int, at: int, source: int, target: int, parts: int, source_begin: int, target_begin: int
) -> Iterator[Chunk]:
    """The chunks of a range of elements that lie in one part of the source and in one part of the target."""
    source_size, target_size = -(-source // parts), -(-target // parts)
    while start < end:
        sender, low = divmod(start, source_size)
        receiver, to = divmod(at, target_size)
        length = min(end - start, source_size - low, target_size - to)
        yield Chunk(sender, source_begin + low, receiver, target_begin + to, length)
        start += length
        at += length
