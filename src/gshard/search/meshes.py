"""Enumerates the mesh shapes for a number of devices: those of one and two axes, and those that cut an axis in two.

>>> [dict(mesh.axes) for mesh in meshes(8)]
[{'data': 8}, {'data': 2, 'model': 4}, {'data': 4, 'model': 2}]
>>> [dict(mesh.axes) for mesh in cut_in_two(Mesh.abstract(data=4, model=2))]
[{'data': 2, 'model': 2, 'inner': 2}]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.sharding import Sharding

NAMES = ("data", "model", "inner")


def meshes(size: int, devices: tuple[Any, ...] | None = None) -> Iterator[Mesh]:
    """The meshes of a number of devices with one axis and with two."""
    available = tuple(jax.devices())
    if devices is None and len(available) >= size:
        devices = available[:size]
    for major in (size, *(n for n in range(2, size) if size % n == 0)):
        sizes = (major,) if major == size else (major, size // major)
        yield dataclasses.replace(Mesh.abstract(**dict(zip(NAMES, sizes, strict=False))), devices=devices)


def axes_text(mesh: Mesh) -> str:
    """The axes with their sizes.

    >>> axes_text(Mesh.abstract(data=4, model=2))
    'data=4, model=2'
    """
    return ", ".join(f"{name}={size}" for name, size in mesh.axes)


def cut_in_two(mesh: Mesh) -> Iterator[Mesh]:
    """The meshes of the same devices in the same order with one more axis: one axis is cut in two."""
    sizes = [size for _, size in mesh.axes]
    for i, size in enumerate(sizes):
        for major in range(2, size):
            if size % major == 0:
                finer = [*sizes[:i], major, size // major, *sizes[i + 1 :]]
                abstract = Mesh.abstract(**dict(zip(NAMES, finer, strict=True)))
                yield dataclasses.replace(abstract, devices=mesh.devices)


def on_finer(plan: Plan, mesh: Mesh) -> Plan:
    """The shardings and splits of a plan on a mesh of the same devices with other axes."""
    names = dict(zip(plan.mesh.atoms, mesh.atoms, strict=True))

    def renamed(atoms: Atoms) -> Atoms:
        return tuple(names[a] for a in atoms)

    shardings = {
        v: Sharding(tuple(map(renamed, s.dims))).with_unreduced({names[a]: monoid for a, monoid in s.unreduced})
        for v, s in plan.shardings.items()
    }
    splits = {e: {f: renamed(atoms) for f, atoms in split.items()} for e, split in plan.splits.items()}
    return Plan(plan.program, mesh, shardings, splits, {})
