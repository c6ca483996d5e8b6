"""Defines the view of an equation from which a rule is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from gshard.core.program import short_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One application of a primitive: its parameters and shapes, without values. Rules are computed from it."""

    name: str  # the name of the primitive
    params: dict[str, Any]  # the parameters of the equation
    in_shapes: tuple[tuple[int, ...], ...]  # in_shapes, out_shapes: the shapes of the operands and the results
    out_shapes: tuple[tuple[int, ...], ...]
    in_dtypes: tuple[Any, ...]  # the dtypes of the operands
    primitive: Any = None  # the primitive, if there is one
    # for each operand its value if it is a real number in the program; otherwise None
    literals: tuple[float | None, ...] = ()

    def literal(self, i: int) -> float | None:
        """The value of operand ``i`` if it is a number in the program; otherwise None."""
        return self.literals[i] if i < len(self.literals) else None

    def __str__(self) -> str:
        shapes = [f"[{','.join(map(str, s))}]" for s in (*self.in_shapes, *self.out_shapes)]
        count = len(self.in_shapes)
        dtypes = (t if isinstance(t, str) else short_dtype(t) for t in self.in_dtypes)
        operands = ", ".join(f"{t}{s}" for t, s in zip(dtypes, shapes))
        return f"equation: {self.name} {operands} -> {', '.join(shapes[count:])}"

    @property
    def on_keys(self) -> bool:
        """Whether the first operand contains PRNG keys, which can be moved but not computed with."""
        return bool(self.in_dtypes) and jax.dtypes.issubdtype(self.in_dtypes[0], jax.dtypes.prng_key)

    @property
    def is_complex(self) -> bool:
        """Whether the first operand is complex. Complex numbers have no minimum or maximum to fill padding with."""
        return bool(self.in_dtypes) and jax.dtypes.issubdtype(self.in_dtypes[0], np.complexfloating)
