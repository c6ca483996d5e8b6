"""Tiles: one all-to-all that moves atoms from several dimensions to several others.

    [8@(x,y), 8, 8] -> [8, 8@x, 8@y]      one message with 7 of 8 tiles, instead of two with 6 and 4 of 8
    [8@x, 8, 8]     -> [8, 8@(x,y), 8]    y is free: each device keeps every other part before anything is sent

Each dimension only loses its innermost atoms or only gains some. What is gained was there in another dimension, or is
free: then a device keeps its part. All cuts are even.
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
    gone, there = set(moved(before.dims, after.dims)), {a for dim in after.dims for a in dim}
    partial = {a for a, _ in before.unreduced}
    return bool(gone) and gone <= there and partial.isdisjoint(there)


def exchanged(x: Any, before: Sequence[Atoms], after: Sequence[Atoms], mesh: Mesh) -> Any:
    """One device's part of an array, moved so (inside ``shard_map``)."""
    sizes, going = mesh.atom_sizes, moved(before, after)
    shape, place, own = _parted(x.shape, before, after, mesh)
    x = x.reshape(shape)
    free = [a for a in place if a not in going]
    for a in free:
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(a), 1, place[a])
    kept = [shape[d] for d in own]
    to_whom = lax.transpose(x, [*(place[a] for a in (*going, *free)), *own])
    x = all_to_all(to_whom.reshape(mesh.count(going), *kept), going, 0, 0)
    from_whom = x.reshape(*(sizes[a] for a in going), *kept)
    whole = [n * mesh.count(have[len(wanted) :]) for n, have, wanted in zip(kept, before, after, strict=True)]
    return lax.transpose(from_whom, _order(before, after, going)).reshape(whole)


def turns(shape: Sequence[int], before: Sequence[Atoms], after: Sequence[Atoms], mesh: Mesh) -> tuple[bool, bool]:
    """Whether elements change places before they are exchanged, and after.

    Args:
        shape: of one device's part.
        before, after: atoms that cut each dimension.
        mesh: the devices.
    """
    going = moved(before, after)
    parted, place, own = _parted(shape, before, after, mesh)
    kept = [parted[d] for d in own]
    cut = [d for d in (*(place[a] for a in going), *own) if parted[d] > 1]
    sizes = [*(mesh.atom_sizes[a] for a in going), *kept]
    joined = [d for d in _order(before, after, going) if sizes[d] > 1]
    return cut != sorted(cut), joined != sorted(joined)


def _parted(
    shape: Sequence[int], before: Sequence[Atoms], after: Sequence[Atoms], mesh: Mesh
) -> tuple[list[int], dict[str, int], list[int]]:
    """A part's shape with a dimension for each atom that is gained, in front of what it cuts; where these are, and the
    others.
    """
    parted: list[int] = []
    place: dict[str, int] = {}
    own: list[int] = []
    for n, have, wanted in zip(shape, before, after, strict=True):
        gained = wanted[len(have) :]
        place.update({a: len(parted) + i for i, a in enumerate(gained)})
        parted += (mesh.atom_sizes[a] for a in gained)
        own.append(len(parted))
        parted.append(n // mesh.count(gained))
    return parted, place, own


def _order(before: Sequence[Atoms], after: Sequence[Atoms], going: Atoms) -> list[int]:
    """Where the dimensions of what arrives belong: first those of the atoms that it came over, then the array's."""
    lost = [have[len(wanted) :] for have, wanted in zip(before, after, strict=True)]
    return [i for d, atoms in enumerate(lost) for i in (*map(going.index, atoms), len(going) + d)]
