"""Static windows along dimensions: slice, pad and reverse (``rules.joining``: concatenate, split).

An unchanged dimension is parallel. One that is cut, padded or reversed is a ``communicate`` factor:
its operand and result are cut in parts of their own sizes, and each device fetches from its neighbours the elements
that its part of the result needs (a halo exchange; ``comm.halo``).

    slice 1:7 of 8 over 2 parts       result parts 1..3 and 4..6; operand parts 0..3 and 4..7: nothing is sent
    slice 2:8 of 8 over 2 parts       result parts 2..4 and 5..7: element 4 is sent
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.shards import Shards, along, rest_bytes
from gshard.comm.steps import PERMUTE
from gshard.core.context import NO_CONTEXT
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Equation, Value
from gshard.core.rule import REDUCE, Rule, RuleMaker, Span, moves
from gshard.core.split import Split
from gshard.core.xla_workarounds import ppermute
from gshard.language.merged_dims import Groups, Maker, emit, flat
from gshard.language.registry import Call, rule
from gshard.language.traits import Part, Places
from gshard.rules.movement import one_array


def parts_merged(a: Maker, e: Equation) -> bool:
    """Parts of an array whose merged dimensions are apart."""
    made = [_cut_merged(a, e, cuts) for cuts in one_array(e)]
    return None not in made and all([a.note(e, *own, i) for i, own in enumerate(made) if own is not None])


def _cut_merged(a: Maker, e: Equation, cuts: Sequence[Span]) -> tuple[Value, Groups] | None:
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


def _slice_at(part: Part, e: Equation, at: Places) -> Any:
    (x,), starts, limits = e.inputs, e.params["start_indices"], e.params["limit_indices"]
    steps = e.params["strides"] or (1,) * len(starts)
    own = tuple(i if i is None else a + s * i for i, a, s in zip(at, starts, steps, strict=True))
    found = part.of(x, own)
    for d, i in enumerate(at):
        if i is None:
            found = lax.slice_in_dim(found, starts[d], limits[d], steps[d], d)
    return found


@rule("slice", moves=True, handed_on=True, shape_in="limit_indices", merged=parts_merged, placed=_slice_at)
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
    index = tuple(taken_spans(n, int(start), m, int(stride)) for n, start, m, stride in spans)
    linear = moves(0)
    return make.rule([dims], [result], local=local, masks_itself=True, sends=sends, linear=linear, index=[index])


def taken_spans(n: int, start: int, count: int, step: int = 1) -> tuple[Span, ...]:
    """The spans of one dimension of the first operand; none for all of it."""
    return () if (start, count, step) == (0, n, 1) else (Span(0, start, count, step),)


def _element(shards: Shards, x: Any, dim: int, index: int, factor: int) -> Any:
    """One element along a dimension, on devices that do not hold it zero."""
    if not (atoms := shards.atoms(factor)):
        return lax.slice_in_dim(x, index, index + 1, axis=dim)
    holder, at = divmod(index, x.shape[dim])
    mine = lax.axis_index(atoms) == holder
    return jnp.where(mine, lax.slice_in_dim(x, at, at + 1, axis=dim), jnp.zeros((), x.dtype))


def _pad_merged(a: Maker, e: Equation) -> bool:
    own, out = a.either(e.inputs[0]), e.outputs[0]
    config = [tuple(map(int, c)) for c in e.params["padding_config"]]
    if any(len(g) > 1 and any(c) for g, c in zip(own.groups, config, strict=True)):
        return False
    groups = tuple(g if len(g) > 1 else (n,) for g, n in zip(own.groups, out.shape, strict=True))
    every = tuple(c for g, c in zip(groups, config, strict=True) for _ in g)
    return emit(a, e, (own.array, e.inputs[1]), groups, padding_config=every)


def _pad_at(part: Part, e: Equation, at: Places) -> Any:
    (x, value), config = e.inputs, [(int(a), int(b), int(c)) for a, b, c in e.params["padding_config"]]
    own: list[Any] = list(at)
    inside = jnp.ones((1,) * len(at), jnp.bool_)
    for d, (n, i, (low, _, interior)) in enumerate(zip(x.shape, at, config, strict=True)):
        if i is not None:
            k, left = (i - low) // (interior + 1), (i - low) % (interior + 1)
            own[d] = jnp.clip(k, 0, max(n - 1, 0))
            inside &= along((left == 0) & (k >= 0) & (k < n), d, len(at))
    number = part.of(value, ())
    remaining = [c if i is None else (0, 0, 0) for c, i in zip(config, at, strict=True)]
    found = lax.pad(part.of(x, tuple(own)), number, remaining)
    return jnp.where(inside, found, number)


@rule("pad", moves=True, same_on_parts=True, merged=_pad_merged, placed=_pad_at)
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


def _rev_at(part: Part, e: Equation, at: Places) -> Any:
    (x,), dims = e.inputs, e.params["dimensions"]
    own = tuple(
        n - 1 - i if i is not None and d in dims else i for d, (n, i) in enumerate(zip(x.shape, at, strict=True))
    )
    return lax.rev(part.of(x, own), [d for d in dims if at[d] is None])


@rule(
    "rev", moves=True, same_on_parts=True, values=lambda params, x: np.flip(x, tuple(params["dimensions"])),
    placed=_rev_at,
)  # fmt: skip
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
