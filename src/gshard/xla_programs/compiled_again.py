"""Compiled again: what compiles an explained function once more, with other shardings or constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

from gshard.xla_programs.constraint_candidates import Planned
from gshard.xla_programs.tried_shardings import Specs

Found = TypeVar("Found")
# What JAX and XLA raise for a program with a sharding that they do not support, or that jax.jit was given otherwise.
_REFUSED = (jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError)


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledAgain(Generic[Found]):
    """What compiles an explained function once more.

    Attributes:
        leaves: for each argument of the program the array that the user gives, as ``jax.ShapeDtypeStruct`` with its
            sharding; None if it is not known.
        lower: traces and lowers the function, with other shardings of some arguments.
        read: compiles and explains what is lowered.
        planned: the shardings that gshard plans for values of the function, by the path of the file, the line, and the
            shape. It takes the seconds after which it gives up.
    """

    leaves: tuple[Any, ...]
    lower: Callable[[Specs], Any]
    read: Callable[[Any], Found]
    planned: Callable[[float], Planned]

    def compiled(self, specs: Specs) -> Found | None:
        """Compiles the function, and explains the program; None if JAX or XLA refuses it.

        Args:
            specs: other shardings, by the number of the argument.
        """
        try:
            return self.read(self.lower(specs))
        except _REFUSED:
            return None
