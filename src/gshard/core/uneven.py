"""Defines ``UnevenArray``: an array with uneven shards that stays split between two calls.

With ``uneven="keep"`` results with parts of different sizes stay split, each part padded to the same size, and the next
call takes them so. ``jnp.asarray``, ``.whole()`` and operations of ``jax.Array`` use the whole array.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.jax_adapter import no_mesh_set
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding

# Attributes of jax.Array that concern elements, and those that concern memory.
_OF_ELEMENTS = frozenset(
    """
    T all any argmax argmin argpartition argsort astype at byteswap choose clip compress conj conjugate copy cumprod
    cumsum diagonal dot flat flatten imag item itemsize mT max mean min nonzero prod ptp ravel real repeat reshape round
    searchsorted sort squeeze std sum swapaxes take to_device tobytes tolist trace transpose var view
    """.split()
)
_OF_MEMORY = frozenset(("committed", "delete", "devices", "is_deleted", "is_fully_addressable", "weak_type"))


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(self: UnevenArray, *more: Any) -> Any:
        return function(self.whole(), *more)

    return computed


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[UnevenArray, Any], Any]:
    def computed(self: UnevenArray, other: Any) -> Any:
        return function(self.whole(), other.whole() if isinstance(other, UnevenArray) else other)

    return computed


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[UnevenArray, Any], Any]:
    return lambda self, other: function(other, self.whole())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class UnevenArray:
    """An array in padded parts.

    It behaves like a ``jax.Array``: operators, indices and methods such as ``sum`` or ``astype`` first gather the whole
    array (``whole``) and then work on it. Like a ``jax.Array``, it compares elements with ``==`` and has no hash. Put
    computations that run often into a function of ``gshard.jit``, which uses the parts without gathering them.

    Attributes:
        padded: the concatenated parts, with each dimension rounded up to equal parts. The padding is undefined.
        shape: the shape without padding.
        partitioning: the sharding of the array.
        mesh: the mesh of the sharding.
    """

    padded: Any
    shape: tuple[int, ...]
    partitioning: Sharding
    mesh: Mesh

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.padded.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def sharding(self) -> Any:
        """The JAX sharding of the padded array."""
        return self.padded.sharding

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without padding."""
        return self.size * int(self.dtype.itemsize)

    def whole(self) -> Any:
        """The gathered array without padding, as an ordinary JAX array on the same devices."""
        with no_mesh_set():  # JAX may refuse to mix types of the user's current mesh with types of this mesh
            replicated = NamedSharding(self.padded.sharding.mesh, PartitionSpec())
            return jax.device_put(self.padded, replicated)[tuple(slice(0, n) for n in self.shape)]

    def block_until_ready(self) -> UnevenArray:
        """Waits until the array is computed, and returns it."""
        self.padded.block_until_ready()
        return self

    def __jax_array__(self) -> Any:
        return self.whole()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # Gather on the host if possible, so that no device needs memory for the whole array.
        local = self.padded if self.padded.is_fully_addressable else jax.device_get(self.whole())
        return np.asarray(np.asarray(local)[tuple(slice(0, n) for n in self.shape)], dtype)

    # NumPy arrays leave binary operators to this class.
    __array_priority__ = 100

    __hash__ = None  # type: ignore[assignment]
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)  # type: ignore[assignment]
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __divmod__, __rdivmod__ = _binary(divmod), _reflected(divmod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)
    __neg__, __pos__, __abs__ = _unary(operator.neg), _unary(operator.pos), _unary(abs)
    __invert__, __round__ = _unary(operator.invert), _unary(round)
    __bool__ = _unary(bool)
    __getitem__, __contains__ = _binary(operator.getitem), _binary(operator.contains)
    __reversed__ = _unary(reversed)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.whole())

    def __copy__(self) -> UnevenArray:
        return dataclasses.replace(self, padded=self.padded.copy())

    def __deepcopy__(self, memo: Any) -> UnevenArray:
        return copy.copy(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Devices cannot be pickled. A jax.Array comes back without its sharding too.
        return jax.numpy.asarray, (np.asarray(self),)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ELEMENTS:
            return getattr(self.whole(), name)
        if name in _OF_MEMORY:
            return getattr(self.padded, name)
        raise AttributeError(f"'UnevenArray' object has no attribute {name!r}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"UnevenArray({self.partitioning.format(self.mesh, self.shape, str(self.dtype))} on {self.mesh})"


def cut_evenly(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Sharding:
    """The sharding reduced to the leading atoms of each dimension that split it into equal parts.

    >>> cut_evenly(Sharding((("x", "y"), ("z",))), (6, 5), Mesh.abstract(x=2, y=2, z=2)).dims
    (('x',), ())
    """
    dims = []
    for n, atoms in zip(shape, sharding.dims, strict=True):
        while n % mesh.count(atoms):
            atoms = atoms[:-1]
        dims.append(atoms)
    return Sharding(tuple(dims))


def padded_shape(sharding: Sharding, mesh: Mesh, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array with every dimension rounded up to equal parts.

    >>> padded_shape(Sharding((("x",), ())), Mesh.abstract(x=2), (5, 3))
    (6, 3)
    """
    parts = zip(sharding.local_shape(mesh, shape), sharding.dims, strict=True)
    return tuple(n * mesh.count(atoms) for n, atoms in parts)
