"""Param: the description of a parameter, before it has a value.

A model describes its arrays in one nested dict of ``Param``. Initial values, shapes, the number of weights, and the
dimensions that an optimizer may average over follow from it.

    specs = {"wi": Param((8, 64, 256), ("experts", "model", "hidden"), init="normal", scale=64**-0.5)}
    params = init_params(specs, jax.random.key(0))        # the same tree, of arrays

Dimensions have names. ``layers`` (layers stacked for ``scan``) and ``experts`` are *batch* dimensions: they count
separate arrays. An optimizer that averages second moments over rows and columns (Adafactor) must not average over them.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp

BATCH_DIMS = ("layers", "experts")


@dataclasses.dataclass(frozen=True, slots=True)
class Param:
    """One parameter: its shape and its initial value.

    Attributes:
        shape: global shape.
        dims: a name for each dimension: layers, experts, model, hidden, heads, head, vocabulary, gates.
        init: ``normal`` (standard deviation ``scale``), ``uniform`` (from ``-scale`` to ``scale``) or
            ``constant`` (``scale`` everywhere).
        scale: see ``init``; never derived from the shape, so that stacking layers changes nothing.
        dtype: name of the dtype it is stored in.

    >>> wi = Param((6, 8, 64, 256), ("layers", "experts", "model", "hidden"), scale=0.125)
    >>> wi.size, wi.batch_axes, wi.factor_axes
    (786432, (0, 1), (2, 3))
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    init: str = "normal"
    scale: float = 1.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.dims), f"{self.shape} needs a name for each dimension, got {self.dims}"
        assert self.init in ("normal", "uniform", "constant"), f"no initialiser is called {self.init!r}"

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def batch_axes(self) -> tuple[int, ...]:
        """Positions of the dimensions that count separate arrays."""
        return tuple(i for i, name in enumerate(self.dims) if name in BATCH_DIMS)

    @property
    def factor_axes(self) -> tuple[int, int] | None:
        """Positions of the two dimensions a factored second moment keeps, or None if it cannot be factored.

        They are the two largest that are no batch dimensions, in order; the later ones among equals.
        """
        inner = [i for i in range(len(self.shape)) if i not in self.batch_axes]
        if len(inner) < 2:
            return None
        first, second = sorted(sorted(inner, key=lambda i: (self.shape[i], i))[-2:])
        return first, second

    def stacked(self, layers: int) -> Param:
        """The same parameter for each of ``layers`` layers, in one array."""
        return dataclasses.replace(self, shape=(layers, *self.shape), dims=("layers", *self.dims))


def init_params(specs: Any, key: jax.Array) -> Any:
    """Draws every parameter of a tree of ``Param``.

    A parameter's values depend on the key, its path and its shape only: adding another one to the
    model changes nothing here.

    Args:
        specs: nested dict of ``Param``.
        key: a JAX random key, typed or raw.

    Returns:
        the same nested dict, of arrays.

    >>> params = init_params({"scale": Param((2,), ("model",), init="constant")}, jax.random.key(0))
    >>> params["scale"].tolist()
    [1.0, 1.0]
    """

    def draw(path: Any, spec: Param) -> jax.Array:
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        match spec.init:
            case "normal":
                return spec.scale * jax.random.normal(own, spec.shape, spec.dtype)
            case "uniform":
                return jax.random.uniform(own, spec.shape, spec.dtype, -spec.scale, spec.scale)
            case _:
                return jnp.full(spec.shape, spec.scale, spec.dtype)

    return jax.tree_util.tree_map_with_path(draw, specs)


def shapes(specs: Any) -> Any:
    """The tree of ``jax.ShapeDtypeStruct`` of a tree of ``Param``; allocates nothing.

    >>> shapes({"w": Param((2, 3), ("model", "hidden"))})["w"].shape
    (2, 3)
    """
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)), specs)


def names(specs: Any) -> Any:
    """The tree of names of dimensions of a tree of ``Param``, as ``gshard.name`` takes it.

    >>> names({"w": Param((2, 3), ("model", "hidden"))})
    {'w': 'model hidden'}
    """
    return jax.tree.map(lambda spec: " ".join(spec.dims), specs)


def parameter_count(specs: Any) -> int:
    """Number of weights of a tree of ``Param``.

    >>> parameter_count({"w": Param((2, 3), ("model", "hidden")), "b": Param((3,), ("hidden",))})
    9
    """
    return sum(spec.size for spec in jax.tree.leaves(specs))
