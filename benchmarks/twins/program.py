"""A program beside the same written for shards by hand, and the words that programs by hand are written in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

PARTS = 8
_AUTO = jax.sharding.AxisType.Auto
MESH = jax.make_mesh((PARTS,), ("x",), axis_types=(_AUTO,))
GRID = jax.make_mesh((4, 2), ("x", "y"), axis_types=(_AUTO, _AUTO))
RNG = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, what it is by hand, its arguments, and how arguments and results lie.

    Attributes:
        name: what it does.
        whole: the program, of whole arrays.
        by_hand: the same of one device's parts, with every collective in its place.
        arguments: whole arrays.
        specs: how they are split.
        out: how the result is split; one for each of several results.
        tolerance: how far results may be off, relative to the largest number; 0 for the same bits.
        mesh: of eight devices.
        finite: whether parts of its sums are said to be finite (``gshard.jit(finite=True)``).
    """

    name: str
    whole: Callable[..., Any]
    by_hand: Callable[..., Any]
    arguments: tuple[np.ndarray, ...]
    specs: tuple[P, ...]
    out: Any
    tolerance: float = 0.0
    mesh: jax.sharding.Mesh = MESH
    finite: bool = False


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def from_left(x: Any, n: int = 1, *, dim: int = 0, around: bool = False) -> Any:
    """The last ``n`` rows of the device before; the first device gets zeros, or those of the last one."""
    pairs = [(i, (i + 1) % PARTS) for i in range(PARTS if around else PARTS - 1)]
    return lax.ppermute(lax.slice_in_dim(x, x.shape[dim] - n, x.shape[dim], axis=dim), "x", pairs)


def from_right(x: Any, n: int = 1, *, dim: int = 0, around: bool = False) -> Any:
    """The first ``n`` rows of the device after."""
    pairs = [((i + 1) % PARTS, i) for i in range(PARTS if around else PARTS - 1)]
    return lax.ppermute(lax.slice_in_dim(x, 0, n, axis=dim), "x", pairs)


def own_rows(n: int) -> Any:
    """The numbers of a device's rows."""
    return lax.axis_index("x") * (n // PARTS) + jnp.arange(n // PARTS)


def added(f: Callable[..., Any]) -> Callable[..., Any]:
    """What devices compute of their parts, added up."""
    return lambda *args: lax.psum(f(*args), "x")
