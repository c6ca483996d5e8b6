"""Known: arrays of integers and truth values whose values follow from the program alone: iotas, constants, and what is
computed from these. They tell what a look-up is that only looks as if it followed data (``rewrite.look_up``).

Indices may be computed with floats on their way, as where an image is made larger. Those are followed as long as every
result is exact: it is the same then whatever the device rounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gshard.core.program import Constant, Equation, Value
from gshard.language.traits import traits_of
from gshard.rules.movement import elements, index_of

_MOST = 1 << 18  # elements of an array that is followed

Array = Value | Constant


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Values of an array of integers or truth values.

    Attributes:
        values: all of them, 0 where they are not known.
        columns: for each position of the last dimension, whether they are known there; () if all are known.
        segments: what the last dimension was put together from, if it was: arrays and how many columns each has.
    """

    values: np.ndarray
    columns: tuple[bool, ...] = ()
    segments: tuple[tuple[Array, int], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all values are known."""
        return all(self.columns)


class KnownValues:
    """The known values of a program that is traced.

    Args:
        most: elements of an array that is followed.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._known: dict[Value, Known] = {}
        self.windows: set[Array] = set()  # numbers, what is cut out of arrays, and what is computed of both

    def of(self, x: Array) -> Known | None:
        """What is known of an array, if anything."""
        if isinstance(x, Value):
            return self._known.get(x)
        return _read(x.value)

    def note_captured(self, value: Value, array: Any) -> None:
        """Reads an array that the program closed over."""
        if (known := _read(array)) is not None:
            self._known[value] = known

    def note_same(self, value: Value, x: Array) -> None:
        """Notes that a value inside a body is an array outside of it."""
        known = self.of(x)
        if known is not None and known.whole:
            self._known[value] = Known(known.values)

    def note(self, e: Equation) -> None:
        """Follows one equation with one result."""
        name, inputs, (output,), traits = e.name, e.inputs, e.outputs, traits_of(e.name)
        arrays = [x for x in inputs if x.shape]
        of_a_number = name == "broadcast_in_dim" and not arrays
        if name == "slice" or of_a_number or (arrays and traits.elementwise and self.windows.issuperset(arrays)):
            self.windows.add(output)
        kind = getattr(output.dtype, "kind", "")
        if (kind not in ("i", "u", "b") and output.dtype != np.float32) or math.prod(output.shape) > self._most:
            return
        given = [_number(x) or self.of(x) for x in inputs]
        if name == "concatenate" and e.params["dimension"] == len(output.shape) - 1:
            found = _concatenated(inputs, given, output)
        elif (traits.values or index_of(e)) and all(x is not None and x.whole for x in given):
            values = _followed(e, [x.values for x in given if x is not None])
            found = None if values is None else Known(values)
        else:
            return
        if found is not None and found.values.shape == output.shape:
            self._known[output] = found


def _number(x: Array) -> Known | None:
    """A float that is written in the program."""
    if isinstance(x, Constant) and not x.shape and x.dtype.kind == "f":
        return Known(np.asarray(x.value, np.float64))
    return None


def _followed(e: Equation, arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """The result of an equation; None if it may depend on how a device rounds."""
    dtype, index, follow = e.outputs[0].dtype, index_of(e), traits_of(e.name).values
    floats = any(x.dtype.kind == "f" for x in arrays)
    with np.errstate(all="ignore"):
        wide = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in arrays]
        made = elements(index[0], wide) if index is not None else None if follow is None else follow(e.params, *wide)
        if made is None:
            return None
        values = np.asarray(made)
        if floats and np.dtype(dtype).kind in "iu":
            values = np.trunc(values)
        found = values.astype(dtype, copy=False)
        if (floats or found.dtype.kind == "f") and not np.array_equal(found.astype(np.float64), values):
            return None
    return found


def _read(array: Any) -> Known | None:
    """The values of a concrete array, if it may be one of indices."""
    if isinstance(array, jax.core.Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return None
    dtype = getattr(array, "dtype", None) or np.asarray(array).dtype
    if getattr(dtype, "kind", "V") not in "iub" or np.size(array) > _MOST:
        return None  # nor keys of random numbers
    return Known(np.asarray(array))


def _concatenated(inputs: Sequence[Array], given: Sequence[Known | None], output: Value) -> Known | None:
    parts, columns = [], []
    for x, known in zip(inputs, given, strict=True):
        width = x.shape[-1]
        parts.append(np.zeros(x.shape, output.dtype) if known is None else known.values)
        columns += [False] * width if known is None else list(known.columns or [True] * width)
    if not any(columns):
        return None
    segments = tuple((x, x.shape[-1]) for x in inputs)
    return Known(np.concatenate(parts, -1), tuple(columns) if not all(columns) else (), segments)


def makes_indices(e: Equation) -> bool:
    """Whether an equation may have made indices for a look-up that needs them no more."""
    return traits_of(e.name).values is not None or index_of(e) is not None
