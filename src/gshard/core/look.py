"""Look: the inspection of an array's sharding, which is not a part of the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Look:
    """One ``jax.debug.inspect_array_sharding`` of a function.

    Attributes:
        callback: the user's; it is called with a sharding.
        shape: of the array.
        line: the user's source line.
        manual: whether it stands inside of a ``shard_map``, where an array is one device's part.
        values: the values of the program that the array is, one for each call of the function that the look is in.
    """

    callback: Callable[[Any], Any]
    shape: tuple[int, ...]
    line: str
    manual: bool = False
    values: tuple[Any, ...] = ()
