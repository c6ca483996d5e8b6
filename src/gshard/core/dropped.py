"""Defines the record of a feature of an equation that gshard does not keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

MESH = "mesh"  # the option of an inner ``gshard.jit`` whose value is the axes of its mesh, as text


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """One feature that gshard does not keep.

    >>> print(Dropped("name of composite", "'my.op'", "train.py:41 (loss)", "It is compiled as its decomposition."))
    train.py:41 (loss): name of composite is 'my.op'. It is compiled as its decomposition.
    """

    what: str  # the parameter and its primitive, such as ``out_layouts of jit``
    value: str  # the value of the parameter, as text
    line: str  # the user's source line of the equation
    why: str  # a sentence that states what gshard does instead
    # the name and the value of an option of an inner ``gshard.jit``. gshard keeps the option if the outer
    # ``gshard.jit`` has the same value.
    option: tuple[str, Hashable] | None = None

    def __str__(self) -> str:
        return f"{f'{self.line}: ' if self.line else ''}{self.what} is {self.value}. {self.why}"
