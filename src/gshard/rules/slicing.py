"""Slices, pads and reversals (concatenations and splits: ``rules.joining``).

An unchanged dimension is parallel. A dimension that is cut, padded or reversed is a ``communicate`` factor. Operand and
result have parts of their own sizes, and each device fetches the elements that its part of the result needs from its
neighbours (a halo exchange; ``comm.halo``).

    slice 1:7 of 8 over 2 parts       result parts 1..3 and 4..6; operand parts 0..3 and 4..7: nothing is sent
    slice 2:8 of 8 over 2 parts       result parts 2..4 and 5..7: element 4 is sent
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.halo_windows import HaloWindows
from gshard.comm.shards import Shards, along
from gshard.comm.steps import PERMUTE
from gshard.core.context import NO_CONTEXT
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Equation, Value, itemsize
from gshard.core.rule import REDUCE, Rule, RuleMaker, Span, moves
from gshard.core.split import Split, place
from gshard.core.xla_workarounds import ppermute
from gshard.language.merged_dims import Groups, Maker, emit, flat
from gshard.language.registry import Call, rule
from gshard.language.traits import Part, Places
from gshard.rules.movement import one_array


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


def _slice_at(part: Part, e: Equation, at: Places) -> Any:
    (x,), starts, limits = e.inputs, e.params["start_indices"], e.params["limit_indices"]
    steps = e.params["strides"] or (1,) * len(starts)
    at_operand = tuple(i if i is None else start + step * i for i, start, step in zip(at, starts, steps, strict=True))
    result = part.of(x, at_operand)
    for d, i in enumerate(at):
        if i is None:
            result = lax.slice_in_dim(result, starts[d], limits[d], steps[d], d)
    return result


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
    shape_in="limit_indices",
    normal=_normal_slice,
    merged=cut_in_fine_form,
    placed=_slice_at,
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
            x = _element(x, d, starts[d], shards.atoms(dims[d][0]))
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
        return halos.sent_bytes(shape, call.in_dtypes[0], mesh, split, lambda d, w: -(-target[d] // w.parts))

    spans = zip(source, starts, target, strides, strict=True)
    index = tuple(taken_spans(n, int(start), m, int(stride)) for n, start, m, stride in spans)
    linear = moves(0)
    return make.rule([dims], [result], local=local, masks_itself=True, sends=sends, linear=linear, index=[index])


def taken_spans(n: int, start: int, count: int, step: int = 1) -> tuple[Span, ...]:
    """The spans of a cut dimension of the first operand; () if the cut is the whole dimension."""
    return () if (start, count, step) == (0, n, 1) else (Span(0, start, count, step),)


def _element(x: Any, dim: int, index: int, atoms: Atoms) -> Any:
    """One element along a dimension that is split over some atoms; zero on devices that do not hold it."""
    holder, at = divmod(index, x.shape[dim])
    is_holder = lax.axis_index(atoms) == holder
    return jnp.where(is_holder, lax.slice_in_dim(x, at, at + 1, axis=dim), jnp.zeros((), x.dtype))


def _pad_merged(a: Maker, e: Equation) -> bool:
    fine, out = a.either(e.inputs[0]), e.outputs[0]
    config = [tuple(map(int, c)) for c in e.params["padding_config"]]
    if any(len(group) > 1 and any(c) for group, c in zip(fine.groups, config, strict=True)):
        return False
    groups = tuple(group if len(group) > 1 else (n,) for group, n in zip(fine.groups, out.shape, strict=True))
    fine_config = tuple(c for group, c in zip(groups, config, strict=True) for _ in group)
    return emit(a, e, (fine.array, e.inputs[1]), groups, padding_config=fine_config)


def _pad_at(part: Part, e: Equation, at: Places) -> Any:
    x, padding_value = e.inputs
    config = [(int(low), int(high), int(interior)) for low, high, interior in e.params["padding_config"]]
    at_operand: list[Any] = list(at)
    inside = jnp.ones((1,) * len(at), jnp.bool_)
    for d, (n, i, (low, _, interior)) in enumerate(zip(x.shape, at, config, strict=True)):
        if i is not None:
            index, between = (i - low) // (interior + 1), (i - low) % (interior + 1)
            at_operand[d] = jnp.clip(index, 0, max(n - 1, 0))
            inside &= along((between == 0) & (index >= 0) & (index < n), d, len(at))
    fill = part.of(padding_value, ())
    remaining = [c if i is None else (0, 0, 0) for c, i in zip(config, at, strict=True)]
    return jnp.where(inside, lax.pad(part.of(x, tuple(at_operand)), fill, remaining), fill)


@rule("pad", moves=True, same_on_parts=True, merged=_pad_merged, placed=_pad_at)
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

    def sends(mesh: Mesh, split: Split) -> int:
        return halos.sent_bytes(source, call.in_dtypes[0], mesh, split, lambda d, w: w.extent)

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


def _rev_at(part: Part, e: Equation, at: Places) -> Any:
    (x,), dims = e.inputs, e.params["dimensions"]
    at_operand = tuple(
        n - 1 - i if i is not None and d in dims else i for d, (n, i) in enumerate(zip(x.shape, at, strict=True))
    )
    return lax.rev(part.of(x, at_operand), [d for d in dims if at[d] is None])


@rule(
    "rev", moves=True, same_on_parts=True, values=lambda params, x: np.flip(x, tuple(params["dimensions"])),
    placed=_rev_at,
)  # fmt: skip
def rev(call: Call) -> Rule:
    """Devices reverse their parts and exchange them, the first with the last. Then padding moves to the end."""
    (shape,) = call.in_shapes
    make = RuleMaker()
    moved = [d in call.params["dimensions"] for d in range(len(shape))]
    dims = [cut(call, make, n) if m else make.factor(n) for n, m in zip(shape, moved, strict=True)]

    def window(d: int, parts: int) -> Window:
        size = -(-shape[d] // parts)
        return Window(size * parts, size * parts - shape[d], size, parts, size, inside=True)

    halos = HaloWindows(dims, moved, window)

    def local(shards: Shards, x: Any) -> list[Any]:
        (x,) = shards.bind(x)
        if not x.size:
            return [x]
        for d, w in halos.split_over(shards.mesh, shards.split).items():
            atoms = shards.atoms(dims[d][0])
            x = _exchange_mirrored(shards, x, atoms)
            x = shards.window(x, d, atoms, w, 0) if shape[d] % w.parts else x
        return [x]

    def sends(mesh: Mesh, split: Split) -> int:
        sizes = (-(-n // mesh.count(atoms)) for n, atoms in zip(shape, place(tuple(dims), split), strict=True))
        part = math.prod(sizes) * itemsize(call.in_dtypes[0])
        exchanged = part * len(halos.split_over(mesh, split))
        return exchanged + halos.sent_bytes(shape, call.in_dtypes[0], mesh, split, lambda d, w: w.extent)

    return make.rule([dims], [dims], local=local, sends=sends, linear=moves(0))


@in_context(NO_CONTEXT)
def _exchange_mirrored(shards: Shards, x: Any, atoms: Atoms) -> Any:
    """The part that is as far from the end as this device's part is from the beginning."""
    if shards.note is not None:
        shards.note(PERMUTE, atoms, x.size * x.dtype.itemsize, x)
    # Counted from the end, the positions along every atom are reversed. So JAX may number devices in the mesh's order.
    last = shards.mesh.count(atoms) - 1
    return ppermute(x, tuple(a for a in shards.mesh.atoms if a in atoms), [(i, last - i) for i in range(last + 1)])


def cut(call: Call, make: RuleMaker, n: int) -> tuple[int, ...]:
    """A new dimension along which elements move. PRNG keys cannot be split along it: halos need arithmetic."""
    return make.replicate(n) if call.on_keys else make.communicate(n)
