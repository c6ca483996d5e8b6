"""Finds names for the classes of dimensions of a program, also for those that the user has not named."""

from __future__ import annotations

from collections import Counter

from gshard.core.program import Program
from gshard.naming.array_names import ArrayNames
from gshard.naming.dimension_classes import DimensionClass, Dimensions, dimensions_of, of_equal_layers
from gshard.naming.short_names import path_of_name


class DimensionNames:
    """The dimensions of a program with names. The corresponding dimensions of equal layers are one dimension."""

    def __init__(self, program: Program) -> None:
        first = len(program.captured)
        names, inputs = ArrayNames(program), program.block.inputs[first:]
        paths = [path_of_name(name) for name in program.names[first:]]
        self.dimensions: Dimensions = of_equal_layers(dimensions_of(program, paths))
        pairs = list(zip(paths, inputs, strict=True))
        self._called = {path: names.arguments[v] for path, v in pairs}
        self._alike = Counter(called.alike for called in self._called.values())
        self._bytes = {path: v.bytes for path, v in pairs}
        self._weights = {path for path, v in pairs if v in names.read and len(v.shape) > 1}

    def of(self, c: DimensionClass) -> str:
        """The user's name with the size, such as ``embed (1024)``; without a name, the largest array that has it."""
        if c.names:
            return f"{c.names[0]} ({c.size})"
        weights = [(path, d) for path, d in c.arguments if path in self._weights]
        path, d = max(weights or c.arguments, key=lambda place: self._bytes[place[0]])
        called = self._called[path]
        alike = sum(self._called[other].alike == called.alike and e == d for other, e in c.arguments)
        return f"dimension {d} of {called.alike if alike == self._alike[called.alike] else called.text} ({c.size})"
