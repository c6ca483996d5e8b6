"""OneObject: objects that a copy returns unchanged and that cannot be pickled, like functions of ``jax.jit``."""

from __future__ import annotations

from typing import Any

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line


class OneObject:
    """The base of what holds compiled programs: a copy would not find them, and another process has other devices."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises an ``ArgumentError`` (also a ``TypeError``): it holds devices and compiled programs."""
        raise ArgumentError.like(
            TypeError(),
            f"{self!r} cannot be pickled: it holds devices and compiled programs of this process.",
            user_line(),
            hint="Pickle the function itself, and call gshard.jit where it is loaded. To save a compiled program, use "
            "jax.experimental.serialize_executable; to save a program that other processes compile, use jax.export.",
        )
