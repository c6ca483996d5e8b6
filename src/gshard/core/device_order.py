"""Device order: the device at each position of the mesh.

A mark may name devices: an array of device ids, or a mesh of JAX's with its devices in an order of its own. What it
says is a *table*: for each part of the array the devices that hold it. Where the table is regular on the program's mesh
it is a cut over some atoms. Otherwise it is a cut over the atoms of the same devices in another order, and from one
order to another every part takes one CollectivePermute.

    >>> mesh = Mesh.abstract(devices=4)
    >>> cut(table_of_ids(np.array([[0, 2], [1, 3]]), mesh), mesh)       # columns are neighbours
    (('devices.1',), ('devices.0',))
    >>> crooked = table_of_ids(np.array([0, 1, 3, 2]), mesh)
    >>> cut(crooked, mesh) is None, order_for(crooked, mesh)
    (True, ((('devices.0', 'devices.1'),), (0, 1, 3, 2)))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gshard.core.errors import ShardingError
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated

Order = tuple[int, ...]  # the device at each position; () as the mesh came


def table_of_ids(ids: np.ndarray, mesh: Mesh) -> np.ndarray:
    """For each part the devices that an array of device ids gives it: ``[*parts, copies]``.

    Fewer ids than devices mean that each part is held by several consecutive devices.

    Raises:
        ShardingError: an id is missing, or there are no such devices.
    """
    count = ids.size
    if not count:
        raise ShardingError(
            "the device assignment names no device.",
            got=f"device assignment of shape {ids.shape}",
            hint="Name each of the devices 0 to n-1 once, where n divides the number of devices.",
        )
    missing = sorted(set(range(count)) - set(ids.flat))
    if count > mesh.size or ids.max() >= mesh.size:
        raise ShardingError(
            f"the device assignment names device {ids.max()}, and the mesh has {mesh.size} devices.",
            hint=f"Use the ids 0 to {mesh.size - 1}.",
        )
    if missing or mesh.size % count:
        what = f"device {missing[0]} is missing from" if missing else f"{mesh.size} devices cannot hold copies of"
        raise ShardingError(
            f"{what} a device assignment of {count} parts.",
            hint="Name each of the devices 0 to n-1 once, where n divides the number of devices.",
        )
    copies = mesh.size // count
    return ids[..., None] * copies + np.arange(copies)


def table_of_axes(dims: Sequence[Sequence[str]], axes: Sequence[tuple[str, int]], devices: Sequence[int]) -> np.ndarray:
    """The same for dimensions cut over named axes of a grid of devices, given in its row-major order."""
    names = [name for name, _ in axes]
    sizes = [size for _, size in axes]
    used = [names.index(name) for dim in dims for name in dim]
    rest = [i for i in range(len(names)) if i not in used]
    grid = np.asarray(devices).reshape(sizes).transpose([*used, *rest])
    parts = [math.prod(sizes[names.index(name)] for name in dim) for dim in dims]
    return grid.reshape([*parts, -1])


def cut(table: np.ndarray, mesh: Mesh) -> tuple[Atoms, ...] | None:
    """The atoms over which to cut each dimension so that devices get what the table gives them, if there are any."""
    at = _positions(mesh)[table]
    first = at.min(axis=-1)
    dims: list[Atoms] = []
    for d in range(first.ndim):
        atoms = _atoms_along(first[tuple(slice(None) if i == d else 0 for i in range(first.ndim))], mesh)
        if atoms is None or any(set(atoms) & set(dim) for dim in dims):
            return None
        dims.append(atoms)
    return tuple(dims) if np.array_equal(np.sort(at), positions_of_parts(tuple(dims), mesh)) else None


def order_for(table: np.ndarray, mesh: Mesh) -> tuple[tuple[Atoms, ...], Order]:
    """A cut, and the order of the devices in which it gives every device the part that the table gives it."""
    left, dims = list(mesh.atoms), []
    for parts in table.shape[:-1]:
        atoms: list[str] = []
        for atom in list(left):
            if parts % mesh.atom_sizes[atom] == 0:
                parts //= mesh.atom_sizes[atom]
                atoms.append(atom)
                left.remove(atom)
        dims.append(tuple(atoms))
    order = np.empty(mesh.size, np.int64)
    order[positions_of_parts(tuple(dims), mesh)] = np.sort(table)
    return tuple(dims), tuple(map(int, order))


def _positions(mesh: Mesh) -> np.ndarray:
    """The position of each device."""
    return np.argsort(mesh.order) if mesh.order else np.arange(mesh.size)


@tabulated(1024)
def positions_of_parts(dims: tuple[Atoms, ...], mesh: Mesh) -> Any:
    """For each part the positions that hold it, in rising order: ``[*parts, copies]``."""
    return np.sort(table_of_axes(dims, tuple(mesh.atom_sizes.items()), range(mesh.size)))


def _atoms_along(positions: np.ndarray, mesh: Mesh) -> Atoms | None:
    """The atoms, major to minor, along which these positions are."""
    strides, stride = {}, 1
    for atom in reversed(mesh.atoms):
        strides[stride] = atom
        stride *= mesh.atom_sizes[atom]
    atoms: list[str] = []
    followed = positions[:1]  # the positions that the atoms found so far run through, minor ones fastest
    while len(followed) < len(positions):
        step = int(positions[len(followed)] - positions[0])
        found = strides.get(step)
        if found is None or found in atoms:
            return None
        atoms.insert(0, found)
        followed = np.concatenate([followed + k * step for k in range(mesh.atom_sizes[found])])
    return tuple(atoms) if np.array_equal(followed, positions) else None


def permutation(dims: tuple[Atoms, ...], order: Order, mesh: Mesh) -> list[tuple[int, int]]:
    """Who sends its part to whom, as positions of the mesh, so that a cut of another order becomes the mesh's own.

    Devices that already hold what they need keep it.
    """
    there = _positions(mesh)[np.asarray(order or range(mesh.size))]  # where the device of each position stands here
    parts = positions_of_parts(dims, mesh)
    pairs: list[tuple[int, int]] = []
    for wanted in parts.reshape(-1, parts.shape[-1]):
        holders = set(map(int, there[wanted]))
        stay = holders & set(map(int, wanted))
        pairs += [(d, d) for d in stay]
        pairs += itertools.zip_longest(sorted(holders - stay), (int(d) for d in wanted if d not in stay))
    return sorted(pairs)
