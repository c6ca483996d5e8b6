"""Defines the record of an inspection of an array's sharding, which is not a part of the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Look:
    """One call of ``jax.debug.inspect_array_sharding`` in a function.

    Attributes:
        callback: the user's function, which gshard calls with a sharding.
        shape: the shape of the array.
        line: the user's source line.
        manual: whether the call is inside a ``shard_map``, where an array is one device's part.
        values: the inspected values of the program, one for each call of the function that contains the inspection.
    """

    callback: Callable[[Any], Any]
    shape: tuple[int, ...]
    line: str
    manual: bool = False
    values: tuple[Any, ...] = ()
