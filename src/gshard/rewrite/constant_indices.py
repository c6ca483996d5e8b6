"""Evaluates integer and boolean arrays that depend on the program only: iotas, constants, and results of these.

They are the indices of look-ups that do not depend on data (``rewrite.look_up``). Indices may be computed with floats,
for example when an image is enlarged. gshard evaluates floats as long as every result is exact, because such results do
not depend on the rounding of a device.
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

_MOST = 1 << 18  # largest number of elements of an array to evaluate

Array = Value | Constant


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Known values of an integer or boolean array."""

    values: np.ndarray  # all values; 0 for unknown values
    # for each position of the last dimension whether its values are known; () if all are known
    columns: tuple[bool, ...] = ()
    # the arrays that were concatenated along the last dimension, if any, each with its number of columns
    segments: tuple[tuple[Array, int], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all values are known."""
        return all(self.columns)


class KnownValues:
    """The known values of a program during tracing."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._known: dict[Value, Known] = {}
        self.windows: set[Array] = set()  # slices of arrays, copies of scalars, and elementwise results of these

    def of(self, x: Array) -> Known | None:
        """The known values of an array; None if nothing is known."""
        if isinstance(x, Value):
            return self._known.get(x)
        return _read(x.value)

    def note_captured(self, value: Value, array: Any) -> None:
        """Adds the values of a captured array."""
        known = _read(array)
        if known is not None:
            self._known[value] = known

    def note_same(self, value: Value, x: Array) -> None:
        """Adds the values of an array outside of a body for the equal value inside the body."""
        known = self.of(x)
        if known is not None and known.whole:
            self._known[value] = Known(known.values)

    def note(self, e: Equation) -> None:
        """Evaluates an equation with one result, if its operands are known."""
        name, inputs = e.name, e.inputs
        (output,) = e.outputs
        traits = traits_of(name)
        arrays = [x for x in inputs if x.shape]
        is_broadcast_scalar = name == "broadcast_in_dim" and not arrays
        is_elementwise_on_windows = arrays and traits.elementwise and self.windows.issuperset(arrays)
        if name == "slice" or is_broadcast_scalar or is_elementwise_on_windows:
            self.windows.add(output)
        kind = getattr(output.dtype, "kind", "")
        if (kind not in ("i", "u", "b") and output.dtype != np.float32) or math.prod(output.shape) > self._most:
            return
        operands = [_number(x) or self.of(x) for x in inputs]
        if name == "concatenate" and e.params["dimension"] == len(output.shape) - 1:
            result = _concatenated(inputs, operands, output)
        elif (traits.values or index_of(e)) and all(x is not None and x.whole for x in operands):
            values = _evaluated(e, [x.values for x in operands if x is not None])
            result = None if values is None else Known(values)
        else:
            return
        if result is not None and result.values.shape == output.shape:
            self._known[output] = result


def _number(x: Array) -> Known | None:
    """The value of a float literal of the program; None for other arrays."""
    if isinstance(x, Constant) and not x.shape and x.dtype.kind == "f":
        return Known(np.asarray(x.value, np.float64))
    return None


def _evaluated(e: Equation, arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """The result of an equation; None if it may depend on the rounding of a device."""
    dtype = e.outputs[0].dtype
    index = index_of(e)
    evaluate = traits_of(e.name).values
    has_floats = any(x.dtype.kind == "f" for x in arrays)
    with np.errstate(all="ignore"):
        wide = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in arrays]
        exact: Any = None
        if index is not None:
            exact = elements(index[0], wide)
        elif evaluate is not None:
            exact = evaluate(e.params, *wide)
        if exact is None:
            return None
        values = np.asarray(exact)
        if has_floats and np.dtype(dtype).kind in "iu":
            values = np.trunc(values)
        result = values.astype(dtype, copy=False)
        if (has_floats or result.dtype.kind == "f") and not np.array_equal(result.astype(np.float64), values):
            return None
    return result


def _read(array: Any) -> Known | None:
    """The values of a concrete integer or boolean array that is not large; None for other arrays."""
    if isinstance(array, jax.core.Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return None
    dtype = getattr(array, "dtype", None) or np.asarray(array).dtype
    if getattr(dtype, "kind", "V") not in "iub" or np.size(array) > _MOST:
        return None  # this includes random keys
    return Known(np.asarray(array))


def _concatenated(inputs: Sequence[Array], known_operands: Sequence[Known | None], output: Value) -> Known | None:
    parts, columns = [], []
    for x, known in zip(inputs, known_operands, strict=True):
        width = x.shape[-1]
        parts.append(np.zeros(x.shape, output.dtype) if known is None else known.values)
        columns += [False] * width if known is None else list(known.columns or [True] * width)
    if not any(columns):
        return None
    segments = tuple((x, x.shape[-1]) for x in inputs)
    return Known(np.concatenate(parts, -1), tuple(columns) if not all(columns) else (), segments)


def makes_indices(e: Equation) -> bool:
    """Whether an equation may have computed indices that a look-up no longer needs."""
    return traits_of(e.name).values is not None or index_of(e) is not None
