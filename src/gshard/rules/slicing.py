"""Static windows along dimensions: slice, pad, concatenate and reverse.

A dimension that stays as it is is parallel. One that is cut, padded, joined or reversed is an ``exchange`` factor:
its operand and result are cut in parts of their own sizes, and each device fetches from its neighbours the elements
that its part of the result needs (a halo exchange; ``comm.halo``).

    slice 1:7 of 8 over 2 parts       result parts 1..3 and 4..6; operand parts 0..3 and 4..7: nothing is sent
    slice 2:8 of 8 over 2 parts       result parts 2..4 and 5..7: element 4 travels
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.shards import Shards, rest_bytes
from gshard.comm.steps import PERMUTE
from gshard.core.mesh import Atoms, Mesh
from gshard.core.rule import Rule, RuleMaker, moves
from gshard.core.split import Split
from gshard.rules.registry import Call, rule


@rule("slice")
def slice_(call: Call) -> Rule:
    """Result part ``i`` begins at ``start + stride * i * size``.

    >>> params = {"start_indices": (0, 2), "limit_indices": (4, 5), "strides": None}
    >>> print(slice_(Call("slice", params, ((4, 6),), ((4, 3),), ("f",))))
    a b -> a b; exchange b
    """
    (source,), (target,) = call.in_shapes, call.out_shapes
    starts, limits = call.params["start_indices"], call.params["limit_indices"]
    strides = call.params["strides"] or (1,) * len(source)
    make = RuleMaker()
    moved = [not (n == m and stride == 1) for n, m, stride in zip(source, target, strides, strict=True)]
    dims = [cut(call, make, n) if m else make.factor(n) for n, m in zip(source, moved, strict=True)]

    def window(d: int, parts: int) -> Window:
        size = -(-target[d] // parts)
        extent, taking = ((size - 1) * strides[d] + 1, -(-target[d] // size)) if size else (0, 0)
        return Window(source[d], starts[d], strides[d] * size, parts, extent, taking=taking)

    def local(shards: Shards, x: Any) -> list[Any]:
        # What is whole is cut first: less is left to be sent.
        split = {d: shards.atoms(dim[0]) for d, dim in enumerate(dims) if moved[d] and shards.atoms(dim[0])}
        whole = [d for d, m in enumerate(moved) if m and d not in split]
        x = lax.slice(
            x,
            [starts[d] if d in whole else 0 for d in range(x.ndim)],
            [limits[d] if d in whole else n for d, n in enumerate(x.shape)],
            [strides[d] if d in whole else 1 for d in range(x.ndim)],
        )
        for d, atoms in split.items():
            x = shards.window(x, d, atoms, window(d, shards.mesh.count(atoms)), 0)
            x = lax.slice_in_dim(x, 0, x.shape[d], strides[d], d)
        return [x]

    def sends(mesh: Mesh, split: Split) -> int:
        shape, total = list(source), 0
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

    return make.rule([dims], [dims], local=local, sends=sends, linear=moves(0))


@rule("pad")
def pad(call: Call) -> Rule:
    """Result part ``i`` begins at ``i * size - low``, in the coordinates of the operand spread by the interior padding.

    >>> print(pad(Call("pad", {"padding_config": ((0, 0, 0), (1, 1, 0))}, ((4, 6), ()), ((4, 8),), ("f", "f"))))
    a b, () -> a b; exchange b
    """
    source, target = call.in_shapes[0], call.out_shapes[0]
    config = [(int(low), int(high), int(interior)) for low, high, interior in call.params["padding_config"]]
    make = RuleMaker()
    moved = [c != (0, 0, 0) for c in config]
    dims = [make.exchange(max(n, m)) if c else make.factor(n) for n, m, c in zip(source, target, moved, strict=True)]

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
    return make.rule([dims, []], [dims], local=local, sends=sends, linear=moves(0, 1))


@rule("rev")
def rev(call: Call) -> Rule:
    """Parts are reversed at home and change places, first with last; the padding, now in front, is shifted out."""
    (shape,) = call.in_shapes
    make = RuleMaker()
    moved = [d in call.params["dimensions"] for d in range(len(shape))]
    dims = [cut(call, make, n) if m else make.factor(n) for n, m in zip(shape, moved, strict=True)]

    def window(d: int, parts: int) -> Window:
        size = -(-shape[d] // parts)
        return Window(size * parts, size * parts - shape[d], size, parts, size)

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


def _mirrored(shards: Shards, x: Any, atoms: Atoms) -> Any:
    """The part that lies as far from the end as this device's from the beginning."""
    if shards.note is not None:
        shards.note(PERMUTE, atoms, x.size * x.dtype.itemsize, x)
    # From the other end every atom counts backwards, whatever their order; JAX wants that of the mesh.
    last = shards.mesh.count(atoms) - 1
    return lax.ppermute(x, tuple(a for a in shards.mesh.atoms if a in atoms), [(i, last - i) for i in range(last + 1)])


@rule("concatenate")
def concatenate(call: Call) -> Rule:
    """Result part ``i`` takes from each operand the window where the two overlap.

    >>> print(concatenate(Call("concatenate", {"dimension": 0}, ((3, 2), (5, 2)), ((8, 2),), ("f", "f"))))
    a b, a b -> a b; exchange a
    """
    axis = call.params["dimension"]
    return joined(call, axis, [(0, shape[axis]) for shape in call.in_shapes])


def joined(call: Call, axis: int, pieces: Sequence[tuple[int, int]]) -> Rule:
    """The rule of operands, cut from one element to another along ``axis`` and laid side by side."""
    (target,) = call.out_shapes
    make = RuleMaker()
    largest = max(target[axis], *(shape[axis] for shape in call.in_shapes))
    dims = [cut(call, make, largest) if d == axis else make.factor(n) for d, n in enumerate(target)]
    offsets = list(itertools.accumulate((end - start for start, end in pieces), initial=0))

    def window(k: int, parts: int) -> Window:
        """Result position ``r`` of piece ``k`` is element ``start + r - offset``; what follows it is not needed."""
        size = -(-target[axis] // parts)
        taking = -(-offsets[k + 1] // size) if size else 0
        return Window(pieces[k][1], pieces[k][0] - offsets[k], size, parts, size, taking=taking)

    def local(shards: Shards, *xs: Any) -> list[Any]:
        atoms = shards.atoms(dims[axis][0])
        if not atoms:
            return shards.bind(*xs)
        parts = shards.mesh.count(atoms)
        size = -(-target[axis] // parts)
        at = lax.axis_index(atoms) * size + lax.broadcasted_iota(jnp.int32, shards.out_shape(), axis)
        result = None
        for k, x in enumerate(xs):
            if offsets[k] == offsets[k + 1]:
                continue
            piece = shards.window(x, axis, atoms, window(k, parts), 0)
            result = piece if result is None else jnp.where(at >= offsets[k], piece, result)
        return [jnp.zeros(shards.out_shape(), xs[0].dtype) if result is None else result]

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(dims[axis][0], ()))
        if parts == 1:
            return 0
        total = 0
        for k, shape in enumerate(call.in_shapes):
            rest = rest_bytes(shape, call.in_dtypes[k], axis, dims, split, mesh)
            total += window(k, parts).bytes(-(-shape[axis] // parts), rest)
        return total

    linear = moves(*range(len(call.in_shapes)))
    return make.rule([dims for _ in call.in_shapes], [dims], local=local, sends=sends, linear=linear)


def cut(call: Call, make: RuleMaker, n: int) -> tuple[int, ...]:
    """A dimension along which elements move; those of PRNG keys stay whole, since halos are computed with."""
    return make.whole(n) if call.on_keys else make.exchange(n)


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
