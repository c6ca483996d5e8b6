"""Helps rules of operators that work along one dimension of an array, while all other dimensions are parallel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from gshard.comm.route import Route
from gshard.comm.shards import Shards, mask
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import itemsize
from gshard.core.rule import RuleMaker, Split, place

Dim = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AlongAxis:
    """An array, and the dimension along which an operator works."""

    shape: tuple[int, ...]  # the shape of the array
    axis: int  # the number of the dimension
    dims: list[Dim]  # the factors of all dimensions

    @staticmethod
    def of(make: RuleMaker, shape: Sequence[int], axis: int, create: Callable[[int], Dim] | None = None) -> AlongAxis:
        """An array with new factors; ``create(size)`` creates the factor of the axis (by default it communicates)."""
        create = create or make.communicate
        dims = [create(n) if d == axis else make.factor(n) for d, n in enumerate(shape)]
        return AlongAxis(tuple(shape), axis, dims)

    @property
    def dim(self) -> Dim:
        """The factor of the dimension."""
        return self.dims[self.axis]

    @property
    def other_dims(self) -> list[Dim]:
        """The factors of all other dimensions."""
        return [dim for d, dim in enumerate(self.dims) if d != self.axis]

    def replaced(self, dim: Dim) -> list[Dim]:
        """The factors with another factor in place of the dimension's."""
        return [dim if d == self.axis else other for d, other in enumerate(self.dims)]

    def atoms(self, shards: Shards) -> Atoms:
        """The atoms over which the dimension is split."""
        return shards.atoms(self.dim[0])

    def route_bytes(self, dtype: Any, route: Callable[[int], Route]) -> Callable[[Mesh, Split], int]:
        """The value of ``sends`` for a rule that sends chunks along the dimension; ``route(parts)`` is their route."""

        def sends(mesh: Mesh, split: Split) -> int:
            parts = [mesh.count(atoms) for atoms in place(tuple(self.dims), split)]
            if parts[self.axis] == 1:
                return 0
            others = math.prod(-(-n // p) for d, (n, p) in enumerate(zip(self.shape, parts)) if d != self.axis)
            return others * itemsize(dtype) * sum(route(parts[self.axis]).messages)

        return sends

    def fill_padding(self, shards: Shards, x: Any, fill: Any) -> Any:
        """One device's part with ``fill`` in place of its padding."""
        size, atoms = self.shape[self.axis], self.atoms(shards)
        return mask(x, self.axis, size, atoms, fill) if size % shards.mesh.count(atoms) else x
