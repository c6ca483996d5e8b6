"""Defines ``UnevenArray``: an array with uneven shards that stays split between two calls.

With ``uneven="keep"`` results with parts of different sizes stay split, each part padded to the same size, and the next
call takes them so. ``jnp.asarray``, ``.whole()`` and operations of ``jax.Array`` use the whole array.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.jax_adapter import no_mesh_set
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding

# Attributes of ``jax.Array`` that concern memory; all others concern elements.
_OF_MEMORY = frozenset(("committed", "delete", "devices", "is_deleted", "is_fully_addressable", "weak_type"))
# Python reads these from a class, and not by ``__getattr__``.
_OPERATORS = """
eq ne lt le gt ge add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod
pow rpow and rand or ror xor rxor lshift rlshift rshift rrshift neg pos abs invert round bool getitem contains reversed
"""


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

    __array_priority__ = 100  # NumPy arrays leave binary operators to this class
    __hash__ = None  # type: ignore[assignment]

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
        if name in _OF_MEMORY:
            return getattr(self.padded, name)
        if hasattr(jax.Array, name) and not name.startswith("_"):
            return getattr(self.whole(), name)
        raise AttributeError(f"'UnevenArray' object has no attribute {name!r}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"UnevenArray({self.partitioning.format(self.mesh, self.shape, str(self.dtype))} on {self.mesh})"


def _of_whole(name: str) -> Any:
    def computed(self: UnevenArray, *others: Any) -> Any:
        return getattr(self.whole(), name)(*(x.whole() if isinstance(x, UnevenArray) else x for x in others))

    return computed


for _name in _OPERATORS.split():
    setattr(UnevenArray, f"__{_name}__", _of_whole(f"__{_name}__"))


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
