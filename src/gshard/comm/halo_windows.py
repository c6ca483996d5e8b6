"""Determines the windows and the bytes of halo exchanges along several dimensions of an array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from gshard.comm.halo import Window
from gshard.core.mesh import Mesh
from gshard.core.program import itemsize
from gshard.core.split import Split, place


@dataclasses.dataclass(frozen=True, slots=True)
class HaloWindows:
    """The windows of one operand of an equation."""

    dims: Sequence[tuple[int, ...]]  # the factors of the dimensions of the operand
    moved: Sequence[bool]  # for each dimension whether the operator reads a window along it
    # ``window(d, parts)`` returns the windows that the parts of the result read along dimension ``d``
    window: Callable[[int, int], Window]

    def split_over(self, mesh: Mesh, split: Split) -> dict[int, Window]:
        """The windows along dimensions that are split, by dimension."""
        windows = {}
        for d, dim in enumerate(self.dims):
            parts = mesh.count(split.get(dim[0], ())) if self.moved[d] else 1
            if parts > 1:
                windows[d] = self.window(d, parts)
        return windows

    def sent_bytes(
        self, shape: Sequence[int], dtype: Any, mesh: Mesh, split: Split, length: Callable[[int, Window], int]
    ) -> int:
        """The bytes that each device sends if devices fetch the windows of one dimension after the other.

        A fetched window changes the size of the part whose windows are fetched next.
        """
        sizes = [-(-n // mesh.count(atoms)) for n, atoms in zip(shape, place(tuple(self.dims), split), strict=True)]
        total = 0
        for d, window in self.split_over(mesh, split).items():
            others = math.prod(n for e, n in enumerate(sizes) if e != d)
            total += window.bytes(sizes[d], others * itemsize(dtype))
            sizes[d] = length(d, window)
        return total
