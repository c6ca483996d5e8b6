"""Read shardings: along which axes of the mesh the sharding in the text of a program cuts an array.

sharding={mesh['data'=2,'model'=4], [{'data'}, {}]}     names axes
sharding={devices=[4,2]<=[2,4]T(1,0)}                   lists the device of each part; the axes are found from it
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from gshard.core.mesh import Atoms, Mesh

WHOLE = "whole on each device"
_TILES = re.compile(
    r"\bsharding=\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))?([^{}]*(?:\{[^}]*\})?)"
)
_NAMED = re.compile(r"\bsharding=\{@?mesh\[[^\]]*\][^\[]*\[(.*?)\]\s*(?:,[^}]*)?\}")


@dataclasses.dataclass(frozen=True, slots=True)
class ReadSharding:
    """How an array is cut."""

    parts: tuple[int, ...]  # in how many parts each dimension is cut; none where all of the array is on each device
    dims: tuple[Atoms, ...] | None  # the atoms of the mesh that cut each dimension; None if the parts lie along no axes
    text: str  # ``P(data, None)``; the parts if no axes are known

    @property
    def count(self) -> int:
        """In how many parts the array is cut."""
        return math.prod(self.parts)


def read_sharding(attributes: str, mesh: Mesh) -> ReadSharding | None:
    """The sharding in the attributes of an instruction; None if it has none, or one of another kind.

    >>> mesh = Mesh.abstract(data=2, model=4)
    >>> read_sharding("sharding={devices=[4,2]<=[2,4]T(1,0)}", mesh).text
    'P(model, data)'
    >>> read_sharding("sharding={devices=[1,4,2]<=[8] last_tile_dim_replicate}", mesh).dims
    ((), ('data', 'model.0'))
    >>> read_sharding("sharding={replicated}", mesh).text
    'whole on each device'
    """
    if named := _NAMED.search(attributes):
        return _named(named[0], named[1], mesh)
    if tiles := _TILES.search(attributes):
        return _tiled(tiles, mesh)
    return ReadSharding((), (), WHOLE) if "sharding={replicated}" in attributes else None


def sharding_of_spec(axes_of: Sequence[Sequence[str]], sizes: Mapping[str, int], mesh: Mesh) -> ReadSharding:
    """The sharding that names axes for each dimension.

    >>> sharding_of_spec([[], ["model", "data"]], {"data": 2, "model": 4}, Mesh.abstract(data=2, model=4)).text
    'P(None, (model, data))'
    """
    parts = tuple(math.prod(sizes.get(axis, 1) for axis in axes) for axes in axes_of)
    # The user may call the axes otherwise.
    is_known = all(dict(mesh.axes).get(axis) == sizes.get(axis) for axes in axes_of for axis in axes)
    dims = tuple(tuple(a for axis in axes for a in mesh.atoms_of[axis]) for axes in axes_of) if is_known else None
    words = [axes[0] if len(axes) == 1 else f"({', '.join(axes)})" if axes else "None" for axes in axes_of]
    return ReadSharding(parts, dims, f"P({', '.join(words)})" if math.prod(parts) > 1 else WHOLE)


def _named(text: str, entries: str, mesh: Mesh) -> ReadSharding:
    axes_of = [re.findall(r"'([^']*)'", entry) for entry in re.findall(r"\{([^{}]*)\}", entries)]
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", text)}
    found = sharding_of_spec(axes_of, sizes, mesh)
    # An axis may be cut in parts: 'a':(1)2.
    return dataclasses.replace(found, dims=None) if ":(" in entries else found


def _tiled(found: re.Match[str], mesh: Mesh) -> ReadSharding:
    sizes, order, turned, listed, more = found.groups()
    shape = _numbers(sizes)
    beside = re.search(r"last_tile_dims=\{([^}]*)\}", more)  # dimensions that cut nothing
    rank = len(shape) - (len(beside[1].split(",")) if beside else "last_tile_dim_replicate" in more)
    parts = shape[:rank]
    if math.prod(parts) == 1:
        return ReadSharding(parts, ((),) * rank, WHOLE)
    devices = np.arange(math.prod(shape)) if listed is None else np.array(_numbers(listed))
    if order is not None:
        devices = devices.reshape(_numbers(order))
        devices = devices.transpose(_numbers(turned)) if turned else devices
    dims = None
    if devices.size == math.prod(shape) == mesh.size:
        part_of = np.empty((rank, mesh.size), int)  # of each device, the number of its part along each dimension
        part_of[:, devices.ravel()] = np.indices(shape)[:rank].reshape(rank, -1)
        along = [_atoms(part, count, mesh) for part, count in zip(part_of, parts, strict=True)]
        dims = None if None in along else tuple(atoms for atoms in along if atoms is not None)
    if dims is None:
        return ReadSharding(parts, None, f"in {' x '.join(map(str, parts))} parts")
    return ReadSharding(parts, dims, f"P({', '.join(_word(mesh, atoms) for atoms in dims)})")


def _atoms(part: np.ndarray, count: int, mesh: Mesh) -> Atoms | None:
    """The atoms that number the parts of a dimension, the slowest first; None if none do."""
    grid = part.reshape(tuple(mesh.atom_sizes.values()))
    step = {atom: int(np.diff(grid, axis=i).flat[0]) for i, atom in enumerate(mesh.atom_sizes)}
    atoms = tuple(sorted((atom for atom, by in step.items() if by), key=lambda atom: -step[atom]))
    left = count
    for atom in atoms:
        left //= mesh.atom_sizes[atom]
        if step[atom] != left:
            return None
    digits = np.indices(grid.shape)
    told = sum(by * digits[i] for i, by in enumerate(step.values()))
    return atoms if left == 1 and np.array_equal(told, grid) else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _word(mesh: Mesh, atoms: Atoms) -> str:
    names = mesh.format_atoms(atoms).split(",") if atoms else []
    return f"({', '.join(names)})" if len(names) > 1 else names[0] if names else "None"
