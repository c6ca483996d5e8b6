"""Dropped: a feature of an equation that gshard does not keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """One thing that is not kept.

    Attributes:
        what: the parameter and its primitive, such as ``out_layouts of jit``.
        value: what it is, as text.
        line: the user's source line of the equation.
        why: what gshard does instead.
        option: the name and the value of an option of an inner ``gshard.jit``. It is kept if the outer one has the
            same.

    >>> print(Dropped("name of composite", "'my.op'", "train.py:41 (loss)", "It is compiled as its decomposition."))
    train.py:41 (loss): name of composite is 'my.op'. It is compiled as its decomposition.
    """

    what: str
    value: str
    line: str
    why: str
    option: tuple[str, Hashable] | None = None

    def __str__(self) -> str:
        return f"{f'{self.line}: ' if self.line else ''}{self.what} is {self.value}. {self.why}"
