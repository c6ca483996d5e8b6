"""Static windows along dimensions: slice, pad, concatenate, split and reverse.

An unchanged dimension is parallel. One that is cut, padded, joined or reversed is a ``communicate`` factor:
its operand and result are cut in parts of their own sizes, and each device fetches from its neighbours the elements
that its part of the result needs (a halo exchange; ``comm.halo``).

    slice 1:7 of 8 over 2 parts       result parts 1..3 and 4..6; operand parts 0..3 and 4..7: nothing is sent
    slice 2:8 of 8 over 2 parts       result parts 2..4 and 5..7: element 4 is sent
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.route import Chunk, Route, routed
from gshard.comm.shards import Shards, rest_bytes
from gshard.comm.steps import PERMUTE
from gshard.core.context import NO_CONTEXT
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms, Mesh
from gshard.core.rule import REDUCE, Rule, RuleMaker, Span, moves
from gshard.core.split import Split
from gshard.core.xla_workarounds import ppermute
from gshard.language.registry import Call, rule


@rule("slice")
def slice_(call: Call) -> Rule:
    """Result part ``i`` begins at ``start + stride * i * size``.

    >>> params = {"start_indices": (0, 2), "limit_indices": (4, 5), "strides": None}
    >>> print(slice_(Call("slice", params, ((4, 6),), ((4, 3),), ("f",))))
    a b -> a b; communicate b

    A single element has no parts: the device that holds it contributes it, all others nothing.

    >>> params = {"start_indices": (0, 2), "limit_indices": (4, 3), "strides": None}
    >>> print(slice_(Call("slice", params, ((4, 6),), ((4, 1),), ("f",))))
    a b -> a c; pick over b=6; replicate c
    """
    (source,), (target,) = call.in_shapes, call.out_shapes
    starts, limits = call.params["start_indices"], call.params["limit_indices"]
    strides = call.params["strides"] or (1,) * len(source)
    make = RuleMaker()
    moved = [not (n == m and stride == 1) for n, m, stride in zip(source, target, strides, strict=True)]
    single = [d for d, m in enumerate(target) if m == 1 < source[d] and not call.on_keys]
    dims, result = [], []
    for d, n in enumerate(source):
        if d in single:
            moved[d] = False
            dims.append(make.factor(n, REDUCE, "pick"))
            result.append(make.replicate(1))
        else:
            dims.append(cut(call, make, n) if moved[d] else make.factor(n))
            result.append(dims[-1])

    def window(d: int, parts: int) -> Window:
        size = -(-target[d] // parts)
        extent, taking = ((size - 1) * strides[d] + 1, -(-target[d] // size)) if size else (0, 0)
        return Window(source[d], starts[d], strides[d] * size, parts, extent, taking=taking, inside=True)

    def local(shards: Shards, x: Any) -> list[Any]:
        # What is whole is cut first: less is left to be sent.
        split = {d: shards.atoms(dim[0]) for d, dim in enumerate(dims) if moved[d] and shards.atoms(dim[0])}
        whole = [d for d, m in enumerate(moved) if m and d not in split]
        for d in single:
            x = _element(shards, x, d, starts[d], dims[d][0])
        if whole:
            x = lax.slice(
                x,
                [starts[d] if d in whole else 0 for d in range(x.ndim)],
                [limits[d] if d in whole else n for d, n in enumerate(x.shape)],
                [strides[d] if d in whole else 1 for d in range(x.ndim)],
            )
        for d, atoms in split.items():
            x = shards.window(x, d, atoms, window(d, shards.mesh.count(atoms)), 0)
            x = x if strides[d] == 1 else lax.slice_in_dim(x, 0, x.shape[d], strides[d], d)
        return [x]

    def sends(mesh: Mesh, split: Split) -> int:
        shape, total = [1 if d in single else n for d, n in enumerate(source)], 0
        cut = {d: mesh.count(split.get(dim[0], ())) for d, dim in enumerate(dims) if moved[d]}
        for d, parts in cut.items():
            if parts == 1:
                shape[d] = target[d]
        for d, parts in cut.items():
            if parts > 1:
                rest = rest_bytes(tuple(shape), call.in_dtypes[0], d, dims, split, mesh)
                total += window(d, parts).bytes(-(-source[d] // parts), rest)
                shape[d] = target[d]
        return total

    spans = zip(source, starts, target, strides, strict=True)
    index = tuple(_taken(n, int(start), m, int(stride)) for n, start, m, stride in spans)
    linear = moves(0)
    return make.rule([dims], [result], local=local, masks_itself=True, sends=sends, linear=linear, index=[index])


def _taken(n: int, start: int, count: int, step: int = 1) -> tuple[Span, ...]:
    """The spans of one dimension of the first operand; none for all of it."""
    return () if (start, count, step) == (0, n, 1) else (Span(0, start, count, step),)


def _element(shards: Shards, x: Any, dim: int, index: int, factor: int) -> Any:
    """One element along a dimension, on devices that do not hold it zero."""
    if not (atoms := shards.atoms(factor)):
        return lax.slice_in_dim(x, index, index + 1, axis=dim)
    holder, at = divmod(index, x.shape[dim])
    mine = lax.axis_index(atoms) == holder
    return jnp.where(mine, lax.slice_in_dim(x, at, at + 1, axis=dim), jnp.zeros((), x.dtype))


@rule("pad")
def pad(call: Call) -> Rule:
    """Result part ``i`` begins at ``i * size - low``, in the coordinates of the operand spread by the interior padding.

    >>> print(pad(Call("pad", {"padding_config": ((0, 0, 0), (1, 1, 0))}, ((4, 6), ()), ((4, 8),), ("f", "f"))))
    a b, () -> a b; communicate b
    """
    source, target = call.in_shapes[0], call.out_shapes[0]
    config = [(int(low), int(high), int(interior)) for low, high, interior in call.params["padding_config"]]
    make = RuleMaker()
    moved = [c != (0, 0, 0) for c in config]
    dims = [make.communicate(max(n, m)) if c else make.factor(n) for n, m, c in zip(source, target, moved, strict=True)]

    def window(d: int, parts: int) -> Window:
        size = -(-target[d] // parts)
        low, _, interior = config[d]
        return Window(source[d], -low, size, parts, size, interior + 1)

    def local(shards: Shards, x: Any, value: Any) -> list[Any]:
        remaining = list(config)
        for d, dim in enumerate(dims):
            atoms = shards.atoms(dim[0])
            if moved[d] and atoms:
                x = shards.window(x, d, atoms, window(d, shards.mesh.count(atoms)), value)
                remaining[d] = (0, 0, 0)
        return [lax.pad(x, value, remaining)]

    sends = sends_of(call, 0, dims, moved, window)
    index = tuple(_filled(*c, n) for c, n in zip(config, source, strict=True))
    left = [n + min(low, 0) + min(high, 0) for n, (low, high, _) in zip(source, config, strict=True)]
    in_order = min(left, default=0) > 0 and not any(interior for _, _, interior in config)
    linear = moves(0, 1)
    return make.rule([dims, []], [dims], local=local, sends=sends, linear=linear, index=[index] if in_order else None)


def _filled(low: int, high: int, interior: int, n: int) -> tuple[Span, ...]:
    """The spans of one dimension that is padded: copies of the number, the elements that are left, and copies."""
    if (low, high, interior) == (0, 0, 0):
        return ()
    kept = Span(0, max(-low, 0), n + min(low, 0) + min(high, 0))
    return tuple(span for span in (Span(1, 0, low), kept, Span(1, 0, high)) if span.count > 0)


@rule("rev")
def rev(call: Call) -> Rule:
    """Parts are reversed at home and change places, first with last; the padding, now in front, is shifted out."""
    (shape,) = call.in_shapes
    make = RuleMaker()
    moved = [d in call.params["dimensions"] for d in range(len(shape))]
    dims = [cut(call, make, n) if m else make.factor(n) for n, m in zip(shape, moved, strict=True)]

    def window(d: int, parts: int) -> Window:
        size = -(-shape[d] // parts)
        return Window(size * parts, size * parts - shape[d], size, parts, size, inside=True)

    def local(shards: Shards, x: Any) -> list[Any]:
        (x,) = shards.bind(x)
        for d, dim in enumerate(dims):
            atoms = shards.atoms(dim[0])
            if moved[d] and atoms and x.size:
                x = _mirrored(shards, x, atoms)
                parts = shards.mesh.count(atoms)
                x = shards.window(x, d, atoms, window(d, parts), 0) if shape[d] % parts else x
        return [x]

    def sends(mesh: Mesh, split: Split) -> int:
        total = 0
        for d, dim in enumerate(dims):
            parts = mesh.count(split.get(dim[0], ()))
            if moved[d] and parts > 1:
                size, rest = -(-shape[d] // parts), rest_bytes(shape, call.in_dtypes[0], d, dims, split, mesh)
                total += size * rest + window(d, parts).bytes(size, rest)
        return total

    return make.rule([dims], [dims], local=local, sends=sends, linear=moves(0))


@in_context(NO_CONTEXT)
def _mirrored(shards: Shards, x: Any, atoms: Atoms) -> Any:
    """The part that is as far from the end as this device's from the beginning."""
    if shards.note is not None:
        shards.note(PERMUTE, atoms, x.size * x.dtype.itemsize, x)
    # From the other end every atom counts backwards, whatever their order; JAX wants that of the mesh.
    last = shards.mesh.count(atoms) - 1
    return ppermute(x, tuple(a for a in shards.mesh.atoms if a in atoms), [(i, last - i) for i in range(last + 1)])


@rule("concatenate")
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


@rule("split")
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
    spans = [_taken(source[axis], end - size, size) for end, size in zip(ends, sizes, strict=True)]
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


def cut(call: Call, make: RuleMaker, n: int) -> tuple[int, ...]:
    """A dimension along which elements move; those of PRNG keys stay whole, since halos are computed with."""
    return make.replicate(n) if call.on_keys else make.communicate(n)


def sends_of(
    call: Call,
    operand: int,
    dims: Sequence[tuple[int, ...]],
    moved: Sequence[bool],
    window: Callable[[int, int], Window],
) -> Callable[[Mesh, Split], int]:
    """What the windows of an operand send: for each moved dimension that is split, its halo."""

    def sends(mesh: Mesh, split: Split) -> int:
        shape, total = call.in_shapes[operand], 0
        for d, dim in enumerate(dims):
            parts = mesh.count(split.get(dim[0], ())) if dim else 1
            if moved[d] and parts > 1:
                rest = rest_bytes(shape, call.in_dtypes[operand], d, dims, split, mesh)
                total += window(d, parts).bytes(-(-shape[d] // parts), rest)
        return total

    return sends
