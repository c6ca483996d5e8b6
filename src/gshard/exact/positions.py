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

    They are functions of a ``device``; an ``offset``, a multiple of the size of loops; a ``position`` along loops, or a
    count along them; an ``index``, a position that is given, less an offset or moved by 1; or a ``literal``.
    """

    kind: str
    loops: tuple[int, ...] = ()  # the loops on whose sizes they depend
    value: Any = None  # of a literal, and where it is: its equation and the number of the operand
    site: tuple[int, int] = (0, 0)


_ANY = Number("")  # numbers that depend on no size


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
        return x.kind in ("index", "position") and self.count(x.loops) == n

    def _scales(self, literal: Number, x: Number) -> bool:
        """Whether a literal is the size of loops, or next to it. Then it changes with the size."""
        c, loops = int(literal.value), list(x.loops)
        if x.kind == "offset" and c > 1 and c % self.count(loops) == 0:
            loops = [*self.whole([c // self.count(loops)])[0], *loops]
        delta = 0 if x.kind == "index" and self.are_positions(x, c) else c - self.count(loops)
        if c < 2 or abs(delta) > (x.kind != "offset"):
            return c == 0 or (abs(c) == 1 and x.kind != "offset")
        before, of_before = self.literals.setdefault(literal.site, (tuple(loops), delta))
        self.join([list(before)], [loops])
        return of_before == delta

    def passing(self, numbers: Sequence[Number | None], *kinds: str) -> list[Number | None]:
        """Numbers of these kinds pass; the others are settled."""
        found = [x if x is not None and x.kind in kinds else None for x in numbers]
        self.settle(x for x, y in zip(numbers, found, strict=True) if y is None)
        return found

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
        same_type = has_type(eqn.invars[0], np.inexact) == has_type(eqn.outvars[0], np.inexact)
        if eqn.primitive.name in PASSES and same_type and eqn.outvars[0].aval.dtype.itemsize >= 4:
            return numbers[0]  # a narrower type may not have all of them
        known = [x for x in numbers if x is not None and x.kind != "literal"]
        found = self._understood(eqn, numbers, known) if known else None
        if found is None:
            self.settle(numbers)
        return None if found == _ANY else found

    def _understood(self, eqn: Any, numbers: Sequence[Number | None], known: list[Number]) -> Number | None:
        """What is known of the numbers of the result; None if the equation is not understood."""
        name, x, y = eqn.primitive.name, known[0], known[-1]
        literals = [c for c in numbers if c is not None and c.kind == "literal"]
        kinds, loops = {x.kind for x in known}, tuple(loop for x in known for loop in x.loops)
        of_data, compares = len(known) + len(literals) < len(numbers), name in _COMPARES
        if has_type(eqn.outvars[0], np.inexact):
            return None if kinds != {"position"} else _ANY if of_data else Number("position", loops)
        if name in PASSES or any(has_type(v, np.inexact) for v in eqn.invars):
            return None
        if name == "mul" and kinds <= {"device", "offset"} and len(literals) == 1 and (c := literals[0]).value > 0:
            self.settle(known)
            size, delta = self.literals.setdefault(c.site, ((self.table.new(int(c.value)),), 0))
            return None if delta else x if c.value == 1 else Number("offset", size)
        if "device" in kinds and kinds <= {"device", "offset"}:
            self.settle(known)
            return _ANY if of_data else Number("device")
        if name == "add" and x.kind == "offset":
            x, y = y, x
        if name in ("add", "sub") and len(known) == 2 and y.kind == "offset" != x.kind:
            n, part = self.count(x.loops), self.count(y.loops)
            if name == "add" and x.kind == "position" and n == part:
                self.join([list(x.loops)], [list(y.loops)])
                return Number("position", loops)
            if name == "add" or x.kind not in ("index", "position") or not n > part > n % part == 0:
                return None
            self.join([list(x.loops)], [[*self.whole([n // part])[0], *y.loops]])
            return Number("index", y.loops)
        is_choice = name == "select_n" and numbers[0] is None and len(known) + len(literals) == 2
        if (of_data and not is_choice) or name not in _COMPARES | _LINEAR:
            return None
        if kinds == {"position"} and all(abs(c.value) <= 1 for c in literals):
            return _ANY if compares else Number("position", loops)
        if kinds != {"offset"} and not kinds <= {"index", "position"}:
            return None
        n = max(self.count(y.loops) for y in known)
        for y in known:
            if y.loops != x.loops:
                if not (n and (kinds == {"offset"} or (self.are_positions(x, n) and self.are_positions(y, n)))):
                    return None
                self.join([list(x.loops)], [list(y.loops)])
        if not all([self._scales(c, x) for c in literals]):
            return None
        return _ANY if compares else Number("offset" if kinds == {"offset"} else "index", x.loops)


def has_type(v: Any, kind: Any) -> bool:
    """Whether a variable has numbers of a kind, such as ``np.integer``."""
    return bool(jax.dtypes.issubdtype(v.aval.dtype, kind))
