"""Slices, pads, reversals, concatenations and splits along a dimension, also at positions known at run time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from gshard.comm.halo import HaloWindows, Window
from gshard.comm.route import Chunk, Route, routed
from gshard.comm.shards import Shards, along
from gshard.core.mesh import Mesh
from gshard.core.program import Equation, Value
from gshard.core.rule import REDUCE, Rule, RuleMaker, Span, Split, moves
from gshard.core.xla_workarounds import opaque_for_one, opaque_for_slice, taken
from gshard.language.registry import Call, rule
from gshard.language.traits import Groups, Maker, emit, flat
from gshard.rules.shape import AlongAxis, one_array


def function_primitive(
    name: str,
    run: Callable[..., Any],
    types: Callable[..., Any],
    *,
    dimension: str = "",
) -> Primitive:
    """A primitive with one result, for equations that gshard writes."""
    primitive = Primitive(name)
    primitive.def_impl(run)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    batching.primitive_batchers[primitive] = functools.partial(_mapped, primitive, run, dimension)
    return primitive


def _mapped(
    primitive: Primitive,
    run: Callable[..., Any],
    dimension: str,
    xs: Sequence[Any],
    dims: Sequence[Any],
    /,
    **params: Any,
) -> Any:
    """The batching rule of a primitive; the mapped dimension of the result is the first one."""
    pairs = list(zip(xs, dims, strict=True))
    if not dimension or any(d is not None and x.ndim == 1 for x, d in pairs):
        result = jax.vmap(functools.partial(run, **params), tuple(dims))(*xs)
    else:
        size = next(x.shape[d] for x, d in pairs if d is not None)
        in_first = [jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
        operands = [x if jnp.ndim(x) == 0 else batch for (x, _), batch in zip(pairs, in_first, strict=True)]
        result = primitive.bind(*operands, **{**params, dimension: params[dimension] + 1})
    return result, 0


def cut_in_fine_form(a: Maker, e: Equation) -> bool:
    """Writes an equation that cuts an array in fine form (``Traits.merged``)."""
    parts = [_cut(a, e, spans) for spans in one_array(e)]
    return None not in parts and all([a.note(e, *part, i) for i, part in enumerate(parts) if part is not None])


def _cut(a: Maker, e: Equation, spans: Sequence[Span]) -> tuple[Value, Groups] | None:
    """A part of an array in fine form, and its groups.

    Only two cuts of a merged dimension have a fine form: the whole dimension, and one element of its major dimension.
    """
    fine, dtype = a.either(e.inputs[0]), e.outputs[0].dtype
    slices: list[tuple[int, int, int]] = []  # start, end and step in each dimension
    groups: list[tuple[int, ...]] = []
    dropped: list[int] = []
    for d, (group, span) in enumerate(zip(fine.groups, spans, strict=True)):
        start, step = span.start, span.step
        end = start + step * (span.count - 1) + 1
        minor = [(0, n, 1) for n in group[1:]]
        minor_size = math.prod(group[1:])
        if len(group) == 1:
            slices.append((start, end, step))
            groups.append((span.count,))
        elif (start, end, step) == (0, math.prod(group), 1):
            slices += [(0, group[0], 1), *minor]
            groups.append(group)
        elif (end - start, start % minor_size, step) == (minor_size, 0, 1):
            slices += [(start // minor_size, end // minor_size, 1), *minor]
            groups.append(group[1:])
            dropped.append(fine.dims(d)[0])
        else:
            return None
    starts, ends, steps = zip(*slices, strict=True)
    params = {"start_indices": starts, "limit_indices": ends, "strides": steps}
    shape = tuple(-(-(end - start) // step) for start, end, step in slices)
    part = a.add(e, params, (fine.array,), shape, dtype, lax.slice_p)
    if dropped:
        part = a.add(e, {"dimensions": tuple(dropped)}, (part,), flat(tuple(groups)), dtype, lax.squeeze_p)
    return part, tuple(groups)


def _normal_slice(params: Mapping[str, Any], shape: Sequence[int]) -> Mapping[str, Any]:
    """A stride is 1 if the slice has one element. The limit follows the last element."""
    strides = params["strides"] or (1,) * len(shape)
    strides = tuple(1 if n == 1 else stride for n, stride in zip(shape, strides, strict=True))
    starts = params["start_indices"]
    limits = tuple(
        start + (n - 1) * stride + 1 if n else start for start, n, stride in zip(starts, shape, strides, strict=True)
    )
    return {"strides": strides, "limit_indices": limits}


@rule(
    "slice",
    moves=True,
    handed_on=True,
    normal=_normal_slice,
    merged=cut_in_fine_form,
)
def slice_(call: Call) -> Rule:
    """Part ``i`` of the result begins at element ``start + stride * i * size`` of the operand.

    >>> params = {"start_indices": (0, 2), "limit_indices": (4, 5), "strides": None}
    >>> print(slice_(Call("slice", params, ((4, 6),), ((4, 3),), ("f",))))
    a b -> a b; communicate b

    A slice of one element cannot be split. The device that holds the element contributes it to the result.

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

    halos = HaloWindows(dims, moved, window)

    def local(shards: Shards, x: Any) -> list[Any]:
        # Dimensions that are not split are cut first, so that less is sent.
        windows = halos.split_over(shards.mesh, shards.split)
        in_parts = [d for d in single if shards.atoms(dims[d][0])]
        whole = [d for d in range(x.ndim) if (moved[d] or d in single) and d not in (*windows, *in_parts)]
        for d in in_parts:
            holder, at = divmod(starts[d], x.shape[d])
            is_holder = lax.axis_index(shards.atoms(dims[d][0])) == holder
            x = jnp.where(is_holder, lax.slice_in_dim(x, at, at + 1, axis=d), jnp.zeros((), x.dtype))
        if whole:
            x = lax.slice(
                x,
                [starts[d] if d in whole else 0 for d in range(x.ndim)],
                [limits[d] if d in whole else n for d, n in enumerate(x.shape)],
                [strides[d] if d in whole else 1 for d in range(x.ndim)],
            )
        for d, w in windows.items():
            x = shards.window(x, d, shards.atoms(dims[d][0]), w, 0)
            x = x if strides[d] == 1 else lax.slice_in_dim(x, 0, x.shape[d], strides[d], d)
        return [x]

    def sends(mesh: Mesh, split: Split) -> int:
        windows = halos.split_over(mesh, split)
        shape = [n if d in windows else m for d, (n, m) in enumerate(zip(source, target, strict=True))]
        return halos.sends(shape, call.in_dtypes[0], lambda d, w: -(-target[d] // w.parts))(mesh, split)

    spans = zip(source, starts, target, strides, strict=True)
    index = tuple(taken_spans(n, int(start), m, int(stride)) for n, start, m, stride in spans)
    linear = moves(0)
    return make.rule([dims], [result], local=local, masks_itself=True, sends=sends, linear=linear, index=[index])


def taken_spans(n: int, start: int, count: int, step: int = 1) -> tuple[Span, ...]:
    """The spans of a cut dimension of the first operand; () if the cut is the whole dimension."""
    return () if (start, count, step) == (0, n, 1) else (Span(0, start, count, step),)


def _pad_merged(a: Maker, e: Equation) -> bool:
    fine, out = a.either(e.inputs[0]), e.outputs[0]
    config = [tuple(map(int, c)) for c in e.params["padding_config"]]
    if any(len(group) > 1 and any(c) for group, c in zip(fine.groups, config, strict=True)):
        return False
    groups = tuple(group if len(group) > 1 else (n,) for group, n in zip(fine.groups, out.shape, strict=True))
    fine_config = tuple(c for group, c in zip(groups, config, strict=True) for _ in group)
    return emit(a, e, (fine.array, e.inputs[1]), groups, padding_config=fine_config)


@rule("pad", moves=True, merged=_pad_merged)
def pad(call: Call) -> Rule:
    """Part ``i`` of the result begins at position ``i * size - low`` of the operand with interior padding.

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

    halos = HaloWindows(dims, moved, window)

    def local(shards: Shards, x: Any, value: Any) -> list[Any]:
        remaining = list(config)
        for d, w in halos.split_over(shards.mesh, shards.split).items():
            x = shards.window(x, d, shards.atoms(dims[d][0]), w, value)
            remaining[d] = (0, 0, 0)
        return [lax.pad(x, value, remaining)]

    sends = halos.sends(source, call.in_dtypes[0], lambda d, w: w.extent)
    kept = [n + min(low, 0) + min(high, 0) for n, (low, high, _) in zip(source, config, strict=True)]
    in_order = min(kept, default=0) >= 0 and not any(interior for _, _, interior in config)
    index = tuple(_padded_spans(low, high, n) for (low, high, _), n in zip(config, source, strict=True))
    return make.rule(
        [dims, []], [dims], local=local, sends=sends, linear=moves(0, 1), index=[index] if in_order else None
    )


def _padded_spans(low: int, high: int, n: int) -> tuple[Span, ...]:
    """The spans of a padded dimension: copies of the padding value, the elements that are kept, and copies."""
    if low == high == 0:
        return ()
    kept = Span(0, max(-low, 0), n + min(low, 0) + min(high, 0))
    return tuple(span for span in (Span(1, 0, low), kept, Span(1, 0, high)) if span.count > 0)


@rule("rev", moves=True, values=lambda params, x: np.flip(x, tuple(params["dimensions"])))
def rev(call: Call) -> Rule:
    """Devices reverse their parts and exchange them, the first with the last."""
    (shape,) = call.in_shapes
    make = RuleMaker()
    reversed_dims = set(call.params["dimensions"])
    dims = [cut(call, make, n) if d in reversed_dims else make.factor(n) for d, n in enumerate(shape)]
    arrays = [AlongAxis(shape, d, dims) for d in sorted(reversed_dims)]

    def route(n: int, parts: int) -> Route:
        """From the reversed parts, whose padding comes first, to the parts of the result."""
        size = -(-n // parts)
        chunks = ((part * size, min((part + 1) * size, n)) for part in range(parts))  # before they are reversed
        moved = (_moved(start + size - (end - start), start + size, n - end, size * parts, n, parts, 0, 0)
                 for start, end in chunks)  # fmt: skip
        return routed(tuple(itertools.chain.from_iterable(moved)))

    def local(shards: Shards, x: Any) -> list[Any]:
        (x,) = shards.bind(x)
        for array in arrays if x.size else ():
            if atoms := array.atoms(shards):
                n, size = shape[array.axis], x.shape[array.axis]
                x = shards.route(x, array.axis, atoms, route(n, shards.mesh.count(atoms)), size)
        return [x]

    def sends(mesh: Mesh, split: Split) -> int:
        sent_along = (
            array.route_bytes(call.in_dtypes[0], functools.partial(route, shape[array.axis])) for array in arrays
        )
        return sum(sent(mesh, split) for sent in sent_along)

    return make.rule([dims], [dims], local=local, sends=sends, linear=moves(0))


def cut(call: Call, make: RuleMaker, n: int) -> tuple[int, ...]:
    """A new dimension along which elements move. PRNG keys cannot be split along it: halos need arithmetic."""
    return make.replicate(n) if call.on_keys else make.communicate(n)


# Concatenations and splits along a dimension. Each chunk of elements has its own route (``comm.route``).


def _concatenate_merged(a: Maker, e: Equation) -> bool:
    d, out = e.params["dimension"], e.outputs[0]
    fine = next(x for x in map(a.either, e.inputs) if any(len(group) > 1 for group in x.groups))
    if len(fine.groups[d]) > 1:
        return False

    def groups_of_size(n: int) -> Groups:
        return tuple((n,) if i == d else group for i, group in enumerate(fine.groups))

    arrays = a.operands(e, [groups_of_size(x.shape[d]) for x in e.inputs])
    return arrays is not None and emit(a, e, arrays, groups_of_size(out.shape[d]), dimension=fine.dims(d)[0])


@rule("concatenate", moves=True, merged=_concatenate_merged)
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


@rule("split", moves=True, merged=cut_in_fine_form)
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


# Concatenates slices in one equation, so that each element moves once (``rewrite.compose_movement``).


def _run(*xs: Any, dimension: int, slices: Sequence[tuple[int, int]], added: bool) -> Any:
    array = next(x for x in xs if x.shape)

    def segment(x: Any, start: int, end: int) -> Any:
        if x.shape:
            return lax.slice_in_dim(x, start, end, axis=dimension)
        return lax.full([end - start if d == dimension else n for d, n in enumerate(array.shape)], x, array.dtype)

    x = lax.concatenate([segment(x, start, end) for x, (start, end) in zip(xs, slices, strict=True)], dimension)
    return with_zero(x) if added else x


def with_zero(x: Any) -> Any:
    """The sum of an array and zeros: -0.0 + 0.0 is 0.0."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(with_zero(x.real), with_zero(x.imag))
    return jnp.where(x == 0, jnp.zeros((), x.dtype), x)


def _shape(*xs: Any, dimension: int, slices: Sequence[tuple[int, int]], added: bool) -> Any:
    array = next(x for x in xs if x.shape)
    length = sum(end - start for start, end in slices)
    return jax.core.ShapedArray(tuple(length if d == dimension else n for d, n in enumerate(array.shape)), array.dtype)


concatenate_slices_p = function_primitive("concatenate_slices", _run, _shape, dimension="dimension")


@rule("concatenate_slices")
def concatenate_slices(call: Call) -> Rule:
    """Like ``concatenate``, for slices of the operands.

    >>> params = {"dimension": 0, "slices": ((7, 8), (0, 7)), "added": False}
    >>> print(concatenate_slices(Call("concatenate_slices", params, ((8, 2), (8, 2)), ((8, 2),), ("f", "f"))))
    a b, a b -> a b; communicate a
    """
    joined_rule = joined(call, call.params["dimension"], call.params["slices"])
    if not call.params["added"]:
        return joined_rule
    join = joined_rule.local
    assert join is not None
    linear = tuple(way for way in joined_rule.linear if way[0] in ("add", "pick"))
    return dataclasses.replace(
        joined_rule, local=lambda shards, *xs: [with_zero(x) for x in join(shards, *xs)], linear=linear
    )


# Slices and updates at positions that are known at run time (dynamic_slice, dynamic_update_slice).


@rule("dynamic_slice", handed_on=True)
def dynamic_slice(call: Call) -> Rule:
    """Dimensions that are not cut are parallel.

    >>> params, dtypes = {"slice_sizes": (4, 2)}, ("f", "i", "i")
    >>> print(dynamic_slice(Call("dynamic_slice", params, ((4, 6), (), ()), ((4, 2),), dtypes)))
    a b, (), () -> a c; pick over b=6; replicate c
    """
    shape, sizes = call.in_shapes[0], call.params["slice_sizes"]
    make = RuleMaker()
    operand, result = [], []
    for n, m in zip(shape, sizes, strict=True):
        if n == m:
            operand.append(make.factor(n))
            result.append(operand[-1])
        else:
            operand.append(make.replicate(n) if call.on_keys else make.factor(n, REDUCE, "pick"))
            result.append(make.replicate(m))

    def local(shards: Shards, x: Any, *starts: Any) -> list[Any]:
        starts = tuple(_clamped(start, n, m) for start, n, m in zip(starts, shape, sizes, strict=True))
        cut_across_parts = [d for d in range(len(shape)) if sizes[d] != shape[d] and shards.atoms(operand[d][0])]
        local_starts = [jnp.zeros_like(start) if d in cut_across_parts else start for d, start in enumerate(starts)]
        local_sizes = [
            local if n == m or d in cut_across_parts else m
            for d, (n, m, local) in enumerate(zip(shape, sizes, x.shape, strict=True))
        ]
        (x,) = shards.bind(x, *local_starts, slice_sizes=tuple(local_sizes))
        for d in cut_across_parts:
            index = starts[d] - shards.offset(operand[d]) + jnp.arange(sizes[d], dtype=jnp.int32)
            is_held = along((index >= 0) & (index < x.shape[d]), d, x.ndim)
            x = taken(opaque_for_slice(x, d, sizes[d]), index, d)
            x = jnp.where(is_held, x, jnp.zeros((), x.dtype))
        return [x]

    starts: list[list[tuple[int, ...]]] = [[] for _ in operand]
    return make.rule([operand, *starts], [result], local=local, masks_itself=True, linear=moves(0))


@rule("dynamic_update_slice")
def dynamic_update_slice(call: Call) -> Rule:
    """Dimensions of the operand are parallel. The update cannot be split along dimensions that it covers only partly.

    >>> params, shapes = {}, ((4, 6), (4, 2), (), ())
    >>> print(dynamic_update_slice(Call("dynamic_update_slice", params, shapes, ((4, 6),), ("f", "f", "i", "i"))))
    a b, a c, (), () -> a b; replicate c
    """
    shape, sizes = call.in_shapes[:2]
    make = RuleMaker()
    partial = [n != m for n, m in zip(shape, sizes, strict=True)]
    operand = [make.replicate(n) if p and call.on_keys else make.factor(n) for n, p in zip(shape, partial, strict=True)]
    update = [dim if n == m else make.replicate(m) for dim, n, m in zip(operand, shape, sizes, strict=True)]

    def local(shards: Shards, x: Any, values: Any, *starts: Any) -> list[Any]:
        starts = tuple(_clamped(start, n, m) for start, n, m in zip(starts, shape, sizes, strict=True))
        if not values.size:
            return [x]
        if not any(p and shards.atoms(dim[0]) for p, dim in zip(partial, operand, strict=True)):
            return shards.bind(x, values, *starts)
        # The device reads and writes only a window of its part, of the size of the update.
        sizes_here = [min(m, length) if p else length for m, length, p in zip(sizes, x.shape, partial, strict=True)]
        local_starts = list(starts)
        is_written = jnp.ones((1,) * x.ndim, jnp.bool_)
        for d, size in enumerate(sizes_here):
            if not partial[d]:
                local_starts[d] = jnp.zeros((), jnp.int32)
            elif shards.atoms(operand[d][0]):
                first = starts[d] - shards.offset(operand[d])
                local_starts[d] = jnp.clip(first, 0, x.shape[d] - size)
                index = local_starts[d] - first + jnp.arange(size, dtype=jnp.int32)
                if sizes[d] > 1:
                    values = taken(opaque_for_slice(values, d, size), index, d)
                is_written &= along((index >= 0) & (index < sizes[d]), d, x.ndim)
        x = opaque_for_one(x, math.prod(sizes_here))
        old_values = lax.dynamic_slice(x, local_starts, sizes_here)
        return [lax.dynamic_update_slice(x, jnp.where(is_written, values, old_values), local_starts)]

    starts: list[list[tuple[int, ...]]] = [[] for _ in operand]
    return make.rule([operand, update, *starts], [operand], local=local, linear=moves(0, 1))


def _clamped(start: Any, n: int, size: int) -> Any:
    """A start index (int32), clamped so that a window of ``size`` elements fits into ``n`` elements."""
    start = jnp.asarray(start)
    if start.dtype.itemsize < 4:
        start = start.astype(jnp.int32)
    return jnp.clip(start, jnp.zeros((), start.dtype), jnp.asarray(max(n - size, 0), start.dtype)).astype(jnp.int32)
