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

from gshard.language.kernel_loops import Loops, LoopTable

Dims = list[Loops]

# Equations whose result has the numbers of the operand.
PASSES = frozenset(
    """broadcast_in_dim convert_element_type copy copy_p expand_dims gshard_mark pvary reshape reshard
    sharding_constraint squeeze stop_gradient transpose""".split()
)
_COMPARES = frozenset("eq ne lt le gt ge".split())
_LINEAR = frozenset("add sub neg max min clamp select_n".split())


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """What is known of the numbers of a value.

    They are functions of a ``device``; its ``offset``, the device times the size of a loop; the ``position`` along
    loops, or an ``index``, a given position; a ``place``, such a position less an offset, or one that is moved by 1;
    ``derived`` from positions, or counts; ``negative``, whether one of these is less than 0, which is false;
    ``wrapped``: one of these plus a size, for the case that it is negative; or a ``literal``.
    """

    kind: str
    loops: tuple[int, ...] = ()  # the loops on whose sizes they depend
    value: Any = None  # of a literal, and where it is: its equation and the number of the operand
    site: tuple[int, int] = (0, 0)


class Numbers:
    """The loops of programs, and what is known of their numbers."""

    def __init__(self) -> None:
        self.table = LoopTable()  # the loops
        # The loops whose size a literal is, less a number, by its equation and operand; and literals that stay.
        self.literals: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self.fixed: set[tuple[int, int]] = set()

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
        """The loops of these numbers stay whole, and these literals stay."""
        for x in numbers:
            if x is not None:
                self.table.keep_whole(x.loops)
                self.fixed |= {x.site} if x.kind == "literal" else set()

    def are_positions(self, x: Number, n: int) -> bool:
        """Whether numbers are positions among ``n`` elements; the first use of an index determines its range."""
        if x.kind == "index" and self.count(x.loops) == 0:
            self.table.sizes[x.loops[0]] = n
        return x.kind in ("index", "place", "position") and self.count(x.loops) == n

    def _is_size(self, literal: Number, loops: tuple[int, ...]) -> bool:
        """Whether a literal is the size of loops, or next to it. Then it changes with the size."""
        delta = int(literal.value) - self.count(loops)
        if literal.value < 2 or abs(delta) > 1:
            return False
        before, of_before = self.literals.setdefault(literal.site, (loops, delta))
        if of_before != delta:
            return False
        self.join([list(before)], [list(loops)])
        return True

    def moved(self, x: Number | None) -> list[Number | None]:
        """What is known of some elements of an array."""
        if x is None or x.kind in ("index", "place", "derived"):
            return [x]
        self.settle([x])
        return []

    def looked_up(self, eqn: Any, operands: list[Dims], numbers: list[Number | None]) -> int | None:
        """The dimension of the operand along which indices are positions, for a look-up of single elements."""
        given: Any = eqn.params.get("dimension_numbers")
        dims: Sequence[int] = getattr(given, "start_index_map", getattr(given, "scatter_dims_to_operand_dims", ()))
        single = getattr(given, "collapsed_slice_dims", getattr(given, "inserted_window_dims", ()))
        if len(dims) != 1 or not set(dims) <= set(single) or (indices := numbers[1]) is None:
            return None
        dim = operands[0][dims[0]]
        if not self.are_positions(indices, self.count(dim)):
            return None
        self.join([dim], [list(indices.loops)])
        numbers[1] = None
        return int(dims[0])

    def elementwise(self, eqn: Any, numbers: Sequence[Number | None]) -> Number | None:
        """What is known of the result of an elementwise equation. Loops stay whole if numbers are used otherwise."""
        name, reals, real = eqn.primitive.name, [is_real(v) for v in eqn.invars], is_real(eqn.outvars[0])
        known = [x for x in numbers if x is not None and x.kind != "literal"]
        literals = [x for x in numbers if x is not None and x.kind == "literal"]
        if name in PASSES and real == reals[0] and eqn.outvars[0].aval.dtype.itemsize >= 4:
            return numbers[0]  # a narrower type may not have all of them
        found = self._understood(name, numbers, known, literals, any(reals), real) if known else None
        if found is None:
            self.settle((*known, *literals))
        return found if found is None or found.kind else None

    def _understood(
        self, name: str, numbers: Sequence[Number | None], known: list[Number], literals: list[Number], reals: bool,
        real: bool,
    ) -> Number | None:  # fmt: skip
        """The numbers of the result; of no kind if they do not matter; None if the equation is not understood."""
        kinds, loops = {x.kind for x in known}, tuple(loop for x in known for loop in x.loops)
        anything, of_data, (x, *_) = Number(""), len(known) + len(literals) < len(numbers), known
        if real:
            if kinds <= {"position", "derived"}:
                return anything if of_data else Number("derived", loops)
            return None
        if name in PASSES or reals:
            return None
        if name == "select_n" and numbers[0] is not None and numbers[0].kind == "negative":
            return numbers[1]
        if len(numbers) == 2 and literals:
            first, c = numbers[1] is literals[0], int(literals[0].value)
            if (name, c) in (("add", 0), ("mul", 1)) or (first and (name, c) == ("sub", 0)):
                return x
            if first and (name, c) == ("lt", 0) and kinds <= {"device", "offset", "position", "index"}:
                return Number("negative")
            if name == "add" and c > 1 and kinds <= {"offset", "position", "index"}:
                self.are_positions(x, c)
                return Number("wrapped", loops)
            if name == "mul" and c > 1 and kinds <= {"device", "offset"}:
                self.settle(known)
                size, delta = self.literals.setdefault(literals[0].site, ((self.table.new(c),), 0))
                return None if delta else Number("offset", size)
        if name in ("add", "sub") and len(known) == len(numbers) == 2 and "offset" in kinds:
            x, offset = known[::-1] if name == "add" and x.kind == "offset" else known
            n, part = self.count(x.loops), self.count(offset.loops)
            if name == "add" and x.kind == "position" and n == part:
                self.join([list(x.loops)], [list(offset.loops)])
                return Number("position", loops)
            if (
                name == "sub"
                and x.kind in ("index", "position")
                and offset.kind == "offset"
                and n > part > n % part == 0
            ):
                self.join([list(x.loops)], [[*self.whole([n // part])[0], *offset.loops]])
                return Number("place", offset.loops)
        if kinds == {"device"} or (kinds == {"device", "offset"} and not of_data):
            self.settle(known)
            return anything if of_data else Number("device")
        if (of_data and not (name == "select_n" and numbers[0] is None and len(known) + len(literals) == 2)) or (
            name not in _COMPARES | _LINEAR
        ):
            return None
        if kinds <= {"position", "derived"} and all(abs(c.value) <= 1 for c in literals):
            return anything if name in _COMPARES else Number("derived", loops)
        if kinds <= {"index", "place", "position"}:
            n = max(self.count(y.loops) for y in known)
            for y in known:
                if y.loops != x.loops and not (n and self.are_positions(x, n) and self.are_positions(y, n)):
                    return None
                self.join([list(x.loops)], [list(y.loops)]) if y.loops != x.loops else None
            if all(abs(c.value) <= 1 or (name not in ("add", "sub") and self._is_size(c, x.loops)) for c in literals):
                same = kinds == {"index"} and name in ("max", "min")
                return anything if name in _COMPARES else Number("index" if same else "place", x.loops)
        return None


def is_real(v: Any) -> bool:
    """Whether a variable has real or complex numbers."""
    return bool(jax.dtypes.issubdtype(v.aval.dtype, np.inexact))


def is_integer(v: Any) -> bool:
    """Whether a variable has integers."""
    return bool(jax.dtypes.issubdtype(v.aval.dtype, np.integer))


def literal(eqn: Any, i: int) -> Number | None:
    """The number of an operand that is a literal."""
    value = eqn.invars[i].val
    return None if np.ndim(value) else Number("literal", (), value, (id(eqn), i))
