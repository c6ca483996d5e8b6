"""Slices local arrays by the position of the device."""

from __future__ import annotations

from typing import Any

from jax import lax

from gshard.core.mesh import Atoms
from gshard.core.xla_workarounds import opaque_for_slice


def slice_part(x: Any, dim: int, size: int, atoms: Atoms) -> Any:
    """This device's part of ``size`` elements of dimension ``dim``; parts are numbered along ``atoms``."""
    return lax.dynamic_slice_in_dim(opaque_for_slice(x, dim, size), lax.axis_index(atoms) * size, size, axis=dim)
