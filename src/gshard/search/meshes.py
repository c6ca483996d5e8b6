"""Enumerates the mesh shapes for a number of devices.

>>> [dict(mesh.axes) for mesh in meshes(8)]
[{'data': 8}, {'data': 2, 'model': 4}, {'data': 4, 'model': 2}]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from gshard.core.mesh import Mesh

NAMES = ("data", "model")


def meshes(size: int, devices: tuple[Any, ...] | None = None) -> Iterator[Mesh]:
    """The meshes of a number of devices with one axis and with two.

    Args:
        size: the number of devices.
        devices: the devices; None takes the first of ``jax.devices()``, if there are enough.
    """
    available = tuple(jax.devices())
    if devices is None and len(available) >= size:
        devices = available[:size]
    for major in (size, *(n for n in range(2, size) if size % n == 0)):
        sizes = (major,) if major == size else (major, size // major)
        yield dataclasses.replace(Mesh.abstract(**dict(zip(NAMES, sizes, strict=False))), devices=devices)
