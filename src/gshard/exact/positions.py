"""What the integers of a program depend on: positions in arrays, and devices.

Smaller sizes of loops (``exact.shrunk``) change positions along them. A comparison of two positions means the same for
all sizes, that of a position with the number 100 does not. The offset of a device's part, ``axis_index * size``, is
right only if the literal changes with the size of the part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from gshard.language.kernel_loops import Loops, LoopTable

Dims = list[Loops]

# Equations whose result has the numbers of the operand.
PASSES = frozenset(
    """broadcast_in_dim convert_element_type copy copy_p expand_dims gshard_mark pvary reshape reshard
    sharding_constraint squeeze stop_gradient transpose""".split()
)
_COMPARES = frozenset("eq ne lt le gt ge".split())
_LINEAR = frozenset("add sub neg max min".split())


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """What is known of the numbers of a value.

    They are functions of a ``device``; its ``offset``, the device times the size of a loop; the ``position`` along
    loops; ``derived`` from positions, or counts; ``negative``, whether one of these is less than 0, which is false;
    or ``wrapped``: one of these plus a size, for the case that it is negative.
    """

    kind: str
    loops: tuple[int, ...] = ()  # the loops on whose sizes they depend


class Numbers:
    """The loops of programs, and what is known of their numbers."""

    def __init__(self) -> None:
        self.table = LoopTable()  # the loops
        self.literals: dict[tuple[int, int], int] = {}  # the loop whose size a literal is, by equation and operand

    def whole(self, shape: Iterable[int]) -> Dims:
        """New dimensions that stay whole."""
        dims = [[self.table.new(n)] for n in shape]
        self.keep_whole(dims)
        return dims

    def keep_whole(self, dims: Iterable[Loops]) -> None:
        """These dimensions stay whole."""
        self.table.keep_whole(loop for dim in dims for loop in dim)

    def join(self, some: Sequence[Loops], others: Sequence[Loops]) -> None:
        """These dimensions are the same."""
        for a, b in zip(some, others, strict=True):
            if self.count(a) == self.count(b) != 0:
                self.table.join(a, b)
            else:
                self.keep_whole((a, b))

    def count(self, dim: Sequence[int]) -> int:
        """The size of a dimension."""
        return math.prod(self.table.sizes[loop] for loop in dim)

    def settle(self, numbers: Iterable[Number | None]) -> None:
        """The loops of these numbers stay whole."""
        self.keep_whole(x.loops for x in numbers if x is not None)  # type: ignore[misc]

    def elementwise(self, eqn: Any, numbers: Sequence[Number | None]) -> Number | None:
        """What is known of the result of an elementwise equation. Loops stay whole if numbers are used otherwise."""
        name, known = eqn.primitive.name, [x for x in numbers if x is not None]
        if not known:
            return None
        kinds, loops = {x.kind for x in known}, tuple(loop for x in known for loop in x.loops)
        reals, real = [is_real(v) for v in eqn.invars], is_real(eqn.outvars[0])
        literals = [v.val for v in eqn.invars if isinstance(v, Literal)]
        with_data = len(known) + len(literals) < len(numbers)
        if name in PASSES and (real or not any(reals)):
            return known[0]
        if name == "select_n" and numbers[0] is not None and numbers[0].kind == "negative":
            return numbers[1]
        if len(numbers) == 2 and literals and not real and not any(reals):
            first, c = numbers[0] is not None, int(literals[0])
            if (name, c) in (("add", 0), ("mul", 1)) or (first and (name, c) == ("sub", 0)):
                return known[0]
            if first and (name, c) == ("lt", 0) and kinds <= {"device", "offset", "position"}:
                return Number("negative")
            if name == "add" and c > 1 and kinds <= {"offset", "position"}:
                return Number("wrapped", loops)
            if name == "mul" and c > 1 and kinds <= {"device", "offset"}:
                self.settle(known)
                return Number("offset", (self.literals.setdefault((id(eqn), int(first)), self.table.new(c)),))
        if name == "add" and [x.kind for x in known] in (["position", "offset"], ["offset", "position"]):
            if self.count(known[0].loops) == self.count(known[1].loops):
                self.join([list(known[0].loops)], [list(known[1].loops)])
                return Number("position", loops)
        if kinds == {"device"} or (kinds == {"device", "offset"} and not with_data):
            self.settle(known)
            return None if with_data else Number("device")
        if kinds <= {"position", "derived"} and real:
            return None if with_data else Number("derived", loops)
        understood = kinds <= {"position", "derived"} and not with_data and not any(reals)
        if understood and name in _COMPARES | _LINEAR and all(abs(c) <= 1 for c in literals):
            return None if name in _COMPARES else Number("derived", loops)
        self.settle(known)
        return None


def is_real(v: Any) -> bool:
    """Whether a variable has real or complex numbers."""
    return bool(jax.dtypes.issubdtype(v.aval.dtype, np.inexact))


def is_integer(v: Any) -> bool:
    """Whether a variable has integers."""
    return bool(jax.dtypes.issubdtype(v.aval.dtype, np.integer))
