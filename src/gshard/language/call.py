"""Call: an equation as rules read it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from gshard.core.program import short_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What a rule is computed from: one application of a primitive, shapes known, values not.

    Attributes:
        name: of the primitive.
        params: its parameters, as its equation has them.
        in_shapes, out_shapes: of operands and results.
        in_dtypes: of the operands.
        primitive: itself, where there is one.
        literals: of the operands those that are real numbers written in the program, None for the others.
    """

    name: str
    params: dict[str, Any]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    in_dtypes: tuple[Any, ...]
    primitive: Any = None
    literals: tuple[float | None, ...] = ()

    def literal(self, i: int) -> float | None:
        """Operand ``i`` if it is a number of the program, else None."""
        return self.literals[i] if i < len(self.literals) else None

    def __str__(self) -> str:
        shapes = [f"[{','.join(map(str, s))}]" for s in (*self.in_shapes, *self.out_shapes)]
        at = len(self.in_shapes)
        operands = ", ".join(f"{_dtype_name(t)}{s}" for t, s in zip(self.in_dtypes, shapes))
        return f"equation: {self.name} {operands} -> {', '.join(shapes[at:])}"

    @property
    def on_keys(self) -> bool:
        """Whether the first operand holds PRNG keys, which can be moved but not computed with."""
        return bool(self.in_dtypes) and jax.dtypes.issubdtype(self.in_dtypes[0], jax.dtypes.prng_key)

    @property
    def is_complex(self) -> bool:
        """Whether the first operand is complex: such numbers have no least and no greatest to fill padding with."""
        return bool(self.in_dtypes) and jax.dtypes.issubdtype(self.in_dtypes[0], np.complexfloating)


def _dtype_name(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) else short_dtype(dtype)
