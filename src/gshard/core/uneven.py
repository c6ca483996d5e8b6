"""UnevenArray: an array whose dimensions need not divide, kept split between two calls.

JAX has no arrays whose parts are unequal, so ``gshard.jit`` makes such a dimension whole where it meets the outside
world. A training state that goes from one call straight into the next need not: with ``uneven="keep"`` those results
come back as they are, each device's part padded to the same size, and are taken so by the next call.

    step = gshard.jit(train_step, mesh=8, uneven="keep")
    state = step(state, batch)      # leaves of 32,003 rows over 8 devices stay there
    jnp.asarray(state["table"])     # whole when somebody asks; so do np.asarray and .whole()
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class UnevenArray:
    """An array held in padded parts.

    Attributes:
        padded: the parts side by side, each dimension rounded up to equal parts; what the padding holds is undefined.
        shape: without padding.
        partitioning: how it is cut.
        mesh: the devices.
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
        """The sharding of the padded array, as JAX's."""
        return self.padded.sharding

    def whole(self) -> Any:
        """The array without padding, as an ordinary JAX array: it is gathered."""
        return self.padded[tuple(slice(0, n) for n in self.shape)]

    def block_until_ready(self) -> UnevenArray:
        """Waits until it is computed."""
        self.padded.block_until_ready()
        return self

    def __jax_array__(self) -> Any:
        return self.whole()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.whole(), dtype)

    def __repr__(self) -> str:
        return f"UnevenArray({self.partitioning.format(self.mesh, self.shape, str(self.dtype))} on {self.mesh})"


def cut_evenly(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Sharding:
    """The sharding as far as it cuts into equal parts.

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
