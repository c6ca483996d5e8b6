"""Runs one all-to-all that moves atoms from several dimensions to several others.

    [8@(x,y), 8, 8] -> [8, 8@x, 8@y]      one message with 7 of 8 tiles, instead of two with 6 and 4 of 8
    [8@x, 8, 8]     -> [8, 8@(x,y), 8]    y is free: each device first keeps every other part

Each dimension either loses its innermost atoms or gains atoms. A gained atom comes from another dimension, or is free;
in the latter case each device keeps its part. All splits are even.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from gshard.core.mesh import Atoms, Mesh
from gshard.core.sharding import Sharding, common_prefix
from gshard.core.xla_workarounds import all_to_all


def moved(before: Sequence[Atoms], after: Sequence[Atoms]) -> Atoms:
    """The atoms that leave a dimension, in the order of the dimensions."""
    pairs = zip(before, after, strict=True)
    return tuple(a for have, wanted in pairs for a in have[len(common_prefix(have, wanted)) :])


def can_be_exchanged(before: Sharding, after: Sharding, shape: Sequence[int], mesh: Mesh) -> bool:
    """Whether one all-to-all of tiles leads from a sharding to another one."""
    if before.unreduced != after.unreduced:
        return False
    for n, have, wanted in zip(shape, before.dims, after.dims, strict=True):
        if len(common_prefix(have, wanted)) not in (len(have), len(wanted)):
            return False
        if n % mesh.count(have) or n % mesh.count(wanted):
            return False
    moving = set(moved(before.dims, after.dims))
    atoms_after = {a for dim in after.dims for a in dim}
    unreduced = {a for a, _ in before.unreduced}
    return bool(moving) and moving <= atoms_after and unreduced.isdisjoint(atoms_after)


def exchanged(x: Any, before: Sequence[Atoms], after: Sequence[Atoms], mesh: Mesh) -> Any:
    """Runs the all-to-all on one device's part of an array, inside ``shard_map``."""
    sizes, moving = mesh.atom_sizes, moved(before, after)
    shape, dim_of_atom, other_dims = _with_atom_dims(x.shape, before, after, mesh)
    x = x.reshape(shape)
    free = [a for a in dim_of_atom if a not in moving]
    for a in free:
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(a), 1, dim_of_atom[a])
    tile = [shape[d] for d in other_dims]
    by_receiver = lax.transpose(x, [*(dim_of_atom[a] for a in (*moving, *free)), *other_dims])
    x = all_to_all(by_receiver.reshape(mesh.count(moving), *tile), moving, 0, 0)
    by_sender = x.reshape(*(sizes[a] for a in moving), *tile)
    result_shape = [n * mesh.count(have[len(wanted) :]) for n, have, wanted in zip(tile, before, after, strict=True)]
    return lax.transpose(by_sender, _order(before, after, moving)).reshape(result_shape)


def turns(shape: Sequence[int], before: Sequence[Atoms], after: Sequence[Atoms], mesh: Mesh) -> tuple[bool, bool]:
    """Whether elements are transposed before and after the all-to-all."""
    moving = moved(before, after)
    with_atom_dims, dim_of_atom, other_dims = _with_atom_dims(shape, before, after, mesh)
    tile = [with_atom_dims[d] for d in other_dims]
    sent_order = [d for d in (*(dim_of_atom[a] for a in moving), *other_dims) if with_atom_dims[d] > 1]
    sizes = [*(mesh.atom_sizes[a] for a in moving), *tile]
    received_order = [d for d in _order(before, after, moving) if sizes[d] > 1]
    return sent_order != sorted(sent_order), received_order != sorted(received_order)


def _with_atom_dims(
    shape: Sequence[int], before: Sequence[Atoms], after: Sequence[Atoms], mesh: Mesh
) -> tuple[list[int], dict[str, int], list[int]]:
    """The shape of a part with a dimension for each gained atom, in front of the dimension that the atom splits."""
    new_shape: list[int] = []
    dim_of_atom: dict[str, int] = {}
    other_dims: list[int] = []
    for n, have, wanted in zip(shape, before, after, strict=True):
        gained = wanted[len(have) :]
        dim_of_atom.update({a: len(new_shape) + i for i, a in enumerate(gained)})
        new_shape += (mesh.atom_sizes[a] for a in gained)
        other_dims.append(len(new_shape))
        new_shape.append(n // mesh.count(gained))
    return new_shape, dim_of_atom, other_dims


def _order(before: Sequence[Atoms], after: Sequence[Atoms], moving: Atoms) -> list[int]:
    """The permutation of the received dimensions (moved atoms, then the array's) to their places in the result."""
    lost = [have[len(wanted) :] for have, wanted in zip(before, after, strict=True)]
    return [i for d, atoms in enumerate(lost) for i in (*map(moving.index, atoms), len(moving) + d)]
