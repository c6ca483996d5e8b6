"""Mark: what the user wrote about one value, before any mesh is known."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """One ``replicate``, ``split`` or ``shard`` of the user's, or a sharding from JAX's own words.

    Attributes:
        kind: ``replicate``, ``split`` (``dim``, ``partitions``), ``assignment`` (``ids``, ``ids_shape``)
            or ``spec`` (``spec``: the entries of a ``PartitionSpec``).
        dim: the dimension that ``split`` cuts, counted without the dimensions that vmap added.
        partitions: a number of parts, or the name(s) of mesh axes.
        ids: device ids in row-major order.
        ids_shape: number of parts along each dimension.
        spec: for each dimension None, an axis name, a tuple of names, or ``PartitionSpec.UNCONSTRAINED``.
        batch_dims: dimensions that vmap added, in the order they were added; they stay open.
        cotangent: whether the mark was made by differentiating the user's.
    """

    kind: str
    dim: int = 0
    partitions: int | str | tuple[str, ...] = 1
    ids: tuple[int, ...] = ()
    ids_shape: tuple[int, ...] = ()
    spec: tuple[Any, ...] = ()
    batch_dims: tuple[int, ...] = ()
    cotangent: bool = False

    def with_batch_dimension(self, dim: int) -> Mark:
        """The same mark on an array that has one more dimension, at ``dim``."""
        return dataclasses.replace(self, batch_dims=(*self.batch_dims, dim))

    def place(self, dims: list[Any], open_dim: Any) -> list[Any]:
        """Puts ``open_dim`` where vmap added dimensions into a list that has one entry for each other dimension."""
        dims = list(dims)
        for position in self.batch_dims:
            dims.insert(position, open_dim)
        return dims

    def __str__(self) -> str:
        match self.kind:
            case "replicate":
                return "replicate(x)"
            case "split":
                return f"split(x, {self.dim}, {self.partitions!r})"
            case "assignment":
                return f"shard(x, ids of shape {self.ids_shape})"
            case _:
                return f"shard(x, P{self.spec})" if len(self.spec) != 1 else f"shard(x, P({self.spec[0]!r}))"
