"""Cutting what one device holds."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.core.mesh import Atoms


def slice_part(x: Any, dim: int, size: int, atoms: Atoms) -> Any:
    """This device's part of ``size`` elements of dimension ``dim``, counted over ``atoms``."""
    return lax.dynamic_slice_in_dim(apart(x, dim, size), lax.axis_index(atoms) * size, size, axis=dim)


def apart(x: Any, dim: int, size: int) -> Any:
    """An array of which ``size`` elements along ``dim`` are about to be taken, hidden from XLA where it would err.

    XLA on CPU loses the factor of ``dynamic_slice(dynamic_slice(x) * 3)`` if the result is one integer.
    """
    count = x.size // x.shape[dim] * size if x.size else 0
    return lax.optimization_barrier(x) if count == 1 and jnp.issubdtype(x.dtype, jnp.integer) else x
