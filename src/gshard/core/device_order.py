"""Converts marks that name devices to shardings and device orders.

A mark may name devices: as an array of device ids, or as a JAX mesh whose devices have another order. gshard reads such
a mark as a *table*, which lists the devices that hold each part of the array. If the table is regular on the program's
mesh, it equals a split over some atoms. Otherwise it equals a split over atoms with the devices in another order. One
CollectivePermute moves all parts from one order to another.

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
    """The devices of each part, for a mark that is an array of device ids.

    If there are fewer ids than devices, several consecutive devices hold each part.
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
    """The devices of each part, for dimensions that are split over named axes of a grid of devices."""
    names = [name for name, _ in axes]
    sizes = [size for _, size in axes]
    split_axes = [names.index(name) for dim in dims for name in dim]
    other_axes = [i for i in range(len(names)) if i not in split_axes]
    grid = np.asarray(devices).reshape(sizes).transpose([*split_axes, *other_axes])
    parts = [math.prod(sizes[names.index(name)] for name in dim) for dim in dims]
    return grid.reshape([*parts, -1])


def cut(table: np.ndarray, mesh: Mesh) -> tuple[Atoms, ...] | None:
    """The atoms that split each dimension such that each device holds the parts that the table gives it.

    None if no split over atoms does this.
    """
    positions = _positions(mesh)[table]
    first = positions.min(axis=-1)
    dims: list[Atoms] = []
    for d in range(first.ndim):
        along_d = tuple(slice(None) if i == d else 0 for i in range(first.ndim))
        atoms = _atoms_along(first[along_d], mesh)
        if atoms is None or any(set(atoms) & set(dim) for dim in dims):
            return None
        dims.append(atoms)
    return tuple(dims) if np.array_equal(np.sort(positions), positions_of_parts(tuple(dims), mesh)) else None


def order_for(table: np.ndarray, mesh: Mesh) -> tuple[tuple[Atoms, ...], Order]:
    """A split over atoms, and the device order in which this split gives each device its parts of the table."""
    free_atoms = list(mesh.atoms)
    dims: list[Atoms] = []
    for parts in table.shape[:-1]:
        atoms: list[str] = []
        for atom in list(free_atoms):
            if parts % mesh.atom_sizes[atom] == 0:
                parts //= mesh.atom_sizes[atom]
                atoms.append(atom)
                free_atoms.remove(atom)
        dims.append(tuple(atoms))
    order = np.empty(mesh.size, np.int64)
    order[positions_of_parts(tuple(dims), mesh)] = np.sort(table)
    return tuple(dims), tuple(map(int, order))


def _positions(mesh: Mesh) -> np.ndarray:
    """The position of each device."""
    return np.argsort(mesh.order) if mesh.order else np.arange(mesh.size)


@tabulated(1024)
def positions_of_parts(dims: tuple[Atoms, ...], mesh: Mesh) -> Any:
    """The positions that hold each part, in rising order: an array of shape ``[*parts, copies]``."""
    return np.sort(table_of_axes(dims, tuple(mesh.atom_sizes.items()), range(mesh.size)))


def _atoms_along(positions: np.ndarray, mesh: Mesh) -> Atoms | None:
    """The atoms, major to minor, whose positions are exactly these positions; None if there are none."""
    atom_of_stride: dict[int, str] = {}
    stride = 1
    for atom in reversed(mesh.atoms):
        atom_of_stride[stride] = atom
        stride *= mesh.atom_sizes[atom]
    atoms: list[str] = []
    reached = positions[:1]  # the positions along the atoms so far, minor atoms fastest
    while len(reached) < len(positions):
        step = int(positions[len(reached)] - positions[0])
        next_atom = atom_of_stride.get(step)
        if next_atom is None or next_atom in atoms:
            return None
        atoms.insert(0, next_atom)
        reached = np.concatenate([reached + k * step for k in range(mesh.atom_sizes[next_atom])])
    return tuple(atoms) if np.array_equal(reached, positions) else None


def permutation(dims: tuple[Atoms, ...], order: Order, mesh: Mesh) -> list[tuple[int, int]]:
    """The sender and receiver pairs that move an array from another device order to the order of the mesh.

    Devices that already hold the part that they need keep it.
    """
    new_positions = _positions(mesh)[np.asarray(order or range(mesh.size))]  # of the devices of ``order``
    parts = positions_of_parts(dims, mesh)
    pairs: list[tuple[int, int]] = []
    for receivers in parts.reshape(-1, parts.shape[-1]):
        holders = set(map(int, new_positions[receivers]))
        keepers = holders & set(map(int, receivers))
        pairs += [(position, position) for position in keepers]
        pairs += itertools.zip_longest(sorted(holders - keepers), (int(p) for p in receivers if p not in keepers))
    return sorted(pairs)
