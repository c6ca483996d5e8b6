"""Joins along a dimension, and splits: concatenate and split. Each chunk is routed by itself (``comm.route``).

concatenate 8 and 8 elements over 4 parts       parts of 2 and 2 become parts of 4: the first two go to part 0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.route import Chunk, Route, routed
from gshard.comm.shards import Shards, along, rest_bytes
from gshard.core.mesh import Mesh
from gshard.core.program import Equation
from gshard.core.rule import Rule, RuleMaker, Span, moves
from gshard.core.split import Split
from gshard.language.merged_dims import Groups, Maker, emit
from gshard.language.registry import Call, rule
from gshard.language.traits import Part, Places
from gshard.rules.movement import at_places
from gshard.rules.slicing import cut, parts_merged, taken_spans

_LOOK_UP = 8  # operations that are no more than looking up an element


def _concatenate_merged(a: Maker, e: Equation) -> bool:
    d, out = e.params["dimension"], e.outputs[0]
    own = next(x for x in map(a.either, e.inputs) if any(len(g) > 1 for g in x.groups))
    if len(own.groups[d]) > 1:
        return False

    def with_own(n: int) -> Groups:
        return tuple((n,) if i == d else g for i, g in enumerate(own.groups))

    arrays, groups = a.operands(e, [with_own(x.shape[d]) for x in e.inputs]), with_own(out.shape[d])
    return arrays is not None and emit(a, e, arrays, groups, dimension=own.dims(d)[0])


def _concatenate_at(part: Part, e: Equation, at: Places) -> Any:
    d = e.params["dimension"]
    i = at[d]
    if i is None:
        return lax.concatenate([part.of(x, at) for x in e.inputs], d)
    # Each operand at all positions may be more than all of it, and what looking it up takes.
    if e.outputs[0].shape[d] + _LOOK_UP * i.shape[0] < len(e.inputs) * i.shape[0]:
        return at_places(part.of(e.outputs[0], (*at[:d], None, *at[d + 1 :])), (*(None,) * d, i))
    found, end = None, sum(x.shape[d] for x in e.inputs)
    for x in reversed(e.inputs):
        end -= x.shape[d]
        if x.shape[d]:
            own = part.of(x, (*at[:d], jnp.clip(i - end, 0, x.shape[d] - 1), *at[d + 1 :]))
            found = own if found is None else jnp.where(along(i < end + x.shape[d], d, len(at)), own, found)
    return found


@rule("concatenate", moves=True, same_on_parts=True, merged=_concatenate_merged, placed=_concatenate_at)
def concatenate(call: Call) -> Rule:
    """Result part ``i`` takes from each operand the window where the two overlap.

    >>> print(concatenate(Call("concatenate", {"dimension": 0}, ((3, 2), (5, 2)), ((8, 2),), ("f", "f"))))
    a b, a b -> a b; communicate a
    """
    axis = call.params["dimension"]
    return joined(call, axis, [(0, shape[axis]) for shape in call.in_shapes])


def joined(call: Call, axis: int, chunks: Sequence[tuple[int, int]]) -> Rule:
    """The rule of operands, cut from one element to another along ``axis`` and laid side by side.

    An operand without dimensions is a number: as many copies of it.
    """
    (target,) = call.out_shapes
    make = RuleMaker()
    lengths = [shape[axis] if shape else None for shape in call.in_shapes]
    largest = max(target[axis], *(n for n in lengths if n is not None))
    dims = [cut(call, make, largest) if d == axis else make.factor(n) for d, n in enumerate(target)]
    at = list(itertools.accumulate((end - start for start, end in chunks), initial=0))

    def route(parts: int, begins: Sequence[int]) -> Route:
        """From the parts of all operands to that of the result; operand ``k``'s begins at ``begins[k]``."""
        wanted: list[Chunk] = []
        for (start, end), to, begin, n in zip(chunks, at[:-1], begins, lengths, strict=True):
            if n is not None:
                wanted += _moved(start, end, to, n, target[axis], parts, begin, 0)
        return routed(tuple(wanted))

    def local(shards: Shards, *xs: Any) -> list[Any]:
        atoms = shards.atoms(dims[axis][0])
        if not atoms:
            return shards.bind(*xs)
        # Parts of all operands are side by side; one that is used twice is there once.
        distinct = list({id(x): x for x in xs if x.shape}.values())
        begin = dict(zip(map(id, distinct), itertools.accumulate((x.shape[axis] for x in distinct), initial=0)))
        x = lax.concatenate(distinct, axis) if len(distinct) > 1 else distinct[0]
        way = route(shards.mesh.count(atoms), [begin.get(id(x), 0) for x in xs])
        size = shards.out_shape()[axis]
        x = shards.route(x, axis, atoms, way, size)
        position = lax.axis_index(atoms) * size + lax.broadcasted_iota(jnp.int32, x.shape, axis)
        for number, low, high in zip(xs, at[:-1], at[1:], strict=True):
            if not number.shape:
                x = jnp.where((position >= low) & (position < high), jnp.asarray(number, x.dtype), x)
        return [x]

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(dims[axis][0], ()))
        rest = rest_bytes(target, call.in_dtypes[0], axis, dims, split, mesh)
        return rest * sum(route(parts, [0] * len(chunks)).messages) if parts > 1 else 0

    linear = moves(*range(len(call.in_shapes)))
    operands = [dims if shape else [] for shape in call.in_shapes]
    spans = tuple(Span(i, int(start), int(end - start)) for i, (start, end) in enumerate(chunks))
    index = tuple(spans if d == axis else () for d in range(len(target)))
    return make.rule(operands, [dims], local=local, sends=sends, linear=linear, index=[index])


@rule("split", moves=True, same_on_parts=True, merged=parts_merged)
def split(call: Call) -> Rule:
    """Part ``i`` of each result takes from the operand the window where it and the result overlap.

    >>> print(split(Call("split", {"axis": 0, "sizes": (3, 5)}, ((8, 2),), ((3, 2), (5, 2)), ("f",))))
    a b -> a b, a b; communicate a
    """
    axis, sizes, (source,) = call.params["axis"], tuple(map(int, call.params["sizes"])), call.in_shapes
    make = RuleMaker()
    dims = [cut(call, make, n) if d == axis else make.factor(n) for d, n in enumerate(source)]

    def route(parts: int) -> Route:
        """From the parts of the operand to those of all results, which are side by side."""
        wanted: list[Chunk] = []
        start = begin = 0
        for n in sizes:
            wanted += _moved(start, start + n, 0, source[axis], n, parts, 0, begin)
            start, begin = start + n, begin - (-n // parts)
        return routed(tuple(wanted))

    def local(shards: Shards, x: Any) -> list[Any]:
        if not (atoms := shards.atoms(dims[axis][0])):
            return shards.bind(x)
        rooms = [shards.out_shape(i)[axis] for i in range(len(sizes))]
        x = shards.route(x, axis, atoms, route(shards.mesh.count(atoms)), sum(rooms))
        return list(lax.split(x, rooms, axis))

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(dims[axis][0], ()))
        rest = rest_bytes(source, call.in_dtypes[0], axis, dims, split, mesh)
        return rest * sum(route(parts).messages) if parts > 1 else 0

    ends = itertools.accumulate(sizes)
    spans = [taken_spans(source[axis], end - size, size) for end, size in zip(ends, sizes, strict=True)]
    index = [tuple(own if d == axis else () for d in range(len(source))) for own in spans]
    return make.rule([dims], [dims for _ in sizes], local=local, sends=sends, linear=moves(0), index=index)


def _moved(
    start: int, end: int, at: int, source: int, target: int, parts: int, begin: int, beginning: int
) -> Iterator[Chunk]:
    """The chunks in which elements move that two cuts of a dimension hold.

    Args:
        start, end: the elements of the source.
        at: the position of the first of them in the target.
        source, target: how many elements there are in either.
        parts: in how many both are cut.
        begin, beginning: where parts begin in the arrays that hold them.
    """
    have, want = -(-source // parts), -(-target // parts)
    while start < end:
        (sender, low), (receiver, to) = divmod(start, have), divmod(at, want)
        length = min(end - start, have - low, want - to)
        yield Chunk(sender, begin + low, receiver, beginning + to, length)
        start, at = start + length, at + length
