"""Replaces look-ups with known indices by slices, pads and strides, and evaluates the indices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.core.program import Constant, Equation, Value
from gshard.language.traits import traits_of
from gshard.rules.indexing import combination
from gshard.rules.shape import elements, index_of

# Evaluates integer and boolean arrays that depend on the program only: iotas, constants, and results of these.

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

    def __init__(self) -> None:
        self._known: dict[Value, Known] = {}

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
        kind = getattr(output.dtype, "kind", "")
        if (kind not in ("i", "u", "b") and output.dtype != np.float32) or math.prod(output.shape) > _MOST:
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


_KEYS = jax.dtypes.extended
_RUNS = 32  # largest number of slices that replace a look-up
_WRITTEN = 0.75  # smallest written fraction of a dimension: then updates and array have the same parts, up to a halo


def simpler(
    known_values: KnownValues, primitive: Any, params: Mapping[str, Any], inputs: Sequence[Array]
) -> tuple[Any, Sequence[Array]] | None:
    """The closed jaxpr that replaces a look-up with partly known indices, and its operands; None if it stays."""
    name = primitive.name
    if not (name == "gather" or combination(name, params)) or jax.dtypes.issubdtype(inputs[0].dtype, _KEYS):
        return None
    indices = known_values.of(inputs[1])
    if indices is None or not all(math.prod(x.shape) for x in inputs):
        return None
    looked_up = _LookUp.of(name, params, inputs)
    operands = [*inputs[:1], *inputs[2:]]
    function: Callable[..., Any] | None = None
    if (shared := _shared(looked_up, indices)) is not None:
        kept, numbers = shared
        operands = [inputs[0], *kept, *inputs[2:]]
        changed = {**params, "dimension_numbers": numbers, "indices_are_sorted": False}

        def function(x: Any, *others: Any) -> Any:
            columns, updates = others[: len(kept)], others[len(kept) :]
            return primitive.bind(x, jnp.concatenate(columns, -1), *updates, **changed)

    elif indices.whole:
        function = _one_window(looked_up, indices.values) or _along_one(looked_up, indices.values)
    return None if function is None else _traced(function, operands)


def _traced(function: Callable[..., Any], operands: Sequence[Array]) -> tuple[Any, Sequence[Array]]:
    weak = [isinstance(x, Value) and x.weak for x in operands]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=w) for x, w in zip(operands, weak, strict=True)]
    return jax.make_jaxpr(function)(*shapes), operands


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _LookUp:
    """The parameters of a gather or a scatter, in common terms."""

    name: str  # the name of the primitive
    combine: Callable[[Any, Any], Any] | None  # combines an element and its update, for a scatter; None for a gather
    numbers: Any  # the dimension numbers of the primitive
    shape: tuple[int, ...]  # the shape of the operand
    sizes: tuple[int, ...]  # the size of the window in each dimension of the operand
    # the dimensions of the operand, of size 1 in the window, that the result or the updates do not have
    dropped: tuple[int, ...]
    columns: tuple[int, ...]  # for each column of the indices the dimension of the operand in which it moves the window
    batching: tuple[tuple[int, int], ...]  # pairs of batching dimensions of operand and indices
    window_dims: tuple[int, ...]  # the dimensions of the result or the updates that belong to the window
    rank: int  # the number of dimensions of the result or the updates

    @staticmethod
    def of(name: str, params: Mapping[str, Any], inputs: Sequence[Array]) -> _LookUp:
        """The parameters of an equation."""
        numbers, shape = params["dimension_numbers"], inputs[0].shape
        window, dropped, columns, of_operand, of_indices = (tuple(getattr(numbers, f)) for f in _fields(name))
        if name == "gather":
            sizes = tuple(params["slice_sizes"])
            rank = len(window) + len(inputs[1].shape) - 1
        else:
            window_sizes = iter(inputs[2].shape[d] for d in window)
            sizes = tuple(1 if d in (*dropped, *of_operand) else next(window_sizes) for d in range(len(shape)))
            rank = len(inputs[2].shape)
        combine = combination(name, params)
        batching = tuple(zip(of_operand, of_indices))
        return _LookUp(name, combine, numbers, shape, sizes, dropped, columns, batching, window, rank)

    def replaces(self, count: int) -> bool:
        """Whether this number of written elements replaces the whole array. Then the scatter stays.

        The array of such a scatter still determines the sharding of the result.
        """
        return self.name == "scatter" and count == math.prod(self.shape)

    def with_batching(self, more: Sequence[tuple[int, int]]) -> Any:
        """The dimension numbers with additional batching dimensions instead of columns of indices."""
        pairs = sorted((*self.batching, *more))
        new_dims = {d for d, _ in more}
        of_operand, of_indices = tuple(d for d, _ in pairs), tuple(b for _, b in pairs)
        dropped = tuple(d for d in self.dropped if d not in new_dims)
        columns = tuple(d for d in self.columns if d not in new_dims)
        values = (dropped, columns, of_operand, of_indices)
        return self.numbers._replace(**dict(zip(_fields(self.name)[1:], values, strict=True)))


def _fields(name: str) -> tuple[str, str, str, str, str]:
    """The fields of the dimension numbers of a gather or a scatter, in a common order."""
    if name == "gather":
        return ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
                "start_indices_batching_dims")  # fmt: skip
    return ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims", "operand_batching_dims",
            "scatter_indices_batching_dims")  # fmt: skip


def _shared(looked_up: _LookUp, indices: Known) -> tuple[list[Array], Any] | None:
    """The columns of indices that remain if others become batching dimensions, and the new dimension numbers.

    A column becomes a batching dimension if it counts one of the dimensions of the indices. None if there is none.
    """
    values, shape = indices.values, looked_up.shape
    taken = {b for _, b in looked_up.batching}
    new_pairs: list[tuple[int, int]] = []
    kept: list[Array] = []
    position = 0
    for segment, width in indices.segments:
        d = looked_up.columns[position]
        is_known = width == 1 and (not indices.columns or indices.columns[position])
        at = values[..., position]
        counted = (
            b
            for b in range(at.ndim if is_known and d in looked_up.dropped else 0)
            if b not in taken and at.shape[b] == shape[d] > 1
            and (np.moveaxis(at, b, -1) == np.arange(shape[d])).all()
        )  # fmt: skip
        b = next(counted, None)
        if b is None:
            kept.append(segment)
        else:
            taken.add(b)
            new_pairs.append((d, b))
        position += width
    if len(new_pairs) > len(kept) == 0:  # one column must remain
        new_pairs.pop()
        kept.append(indices.segments[-1][0])
    if not new_pairs:
        return None
    return kept, looked_up.with_batching(new_pairs)


def _one_window(looked_up: _LookUp, indices: np.ndarray) -> Callable[..., Any] | None:
    """Replaces the look-up of one window at a known position inside of the operand."""
    shape, sizes = looked_up.shape, looked_up.sizes
    if indices.ndim != 1 or looked_up.batching:
        return None
    start = [0] * len(shape)
    for d, at in zip(looked_up.columns, indices.tolist(), strict=True):
        start[d] = at
    if any(not 0 <= at <= n - size for at, n, size in zip(start, shape, sizes, strict=True)):
        return None
    if looked_up.name == "gather":
        end = [at + size for at, size in zip(start, sizes, strict=True)]
        return lambda x: lax.squeeze(lax.slice(x, start, end), looked_up.dropped)
    if any(size < _WRITTEN * n for size, n in zip(sizes, shape, strict=True)) or looked_up.replaces(math.prod(sizes)):
        return None
    last = [at + size - 1 for at, size in zip(start, sizes, strict=True)]
    return lambda x, updates: _put(looked_up.combine, x, updates.reshape(sizes), start, last, [1] * len(shape))


def _along_one(looked_up: _LookUp, indices: np.ndarray) -> Callable[..., Any] | None:
    """Replaces a look-up of positions along one dimension, with all elements of the other dimensions."""
    shape, sizes = looked_up.shape, looked_up.sizes
    if indices.ndim != 2 or len(looked_up.columns) != 1 or looked_up.batching:
        return None
    (d,) = looked_up.columns
    n, at = shape[d], indices[:, 0].astype(np.int64)
    others = all(size == m for i, (m, size) in enumerate(zip(shape, sizes, strict=True)) if i != d)
    if looked_up.dropped != (d,) or not others or not at.size or at.min() < 0 or at.max() >= n:
        return None
    (p,) = set(range(looked_up.rank)) - set(looked_up.window_dims)
    if looked_up.name == "gather":
        taken = _taken(at, n, d)
        return None if taken is None else lambda x: jnp.moveaxis(taken(x), d, p)
    if looked_up.replaces(np.unique(at).size * math.prod(shape) // n):
        return None
    step = _step(at)
    if step is not None and step > 0 and at[-1] - at[0] + 1 >= _WRITTEN * n:
        ones = [1] * len(shape)
        low, high = [0] * len(shape), [m - 1 for m in shape]
        low[d], high[d], ones[d] = int(at[0]), int(at[-1]), step
        return lambda x, updates: _put(looked_up.combine, x, jnp.moveaxis(updates, p, d), low, high, ones)
    times = at.size // n
    if looked_up.name == "scatter-add" and times > 1 and np.array_equal(at, np.repeat(np.arange(n), times)):

        def added(x: Any, updates: Any) -> Any:
            moved = jnp.moveaxis(updates, p, d)
            return x + lax.reduce_sum(moved.reshape(*shape[: d + 1], times, *shape[d + 1 :]), axes=(d + 1,))

        return added
    return None


def _step(at: np.ndarray) -> int | None:
    """The constant distance between consecutive positions; None if it is not constant."""
    if at.size == 1:
        return 1
    steps = np.diff(at)
    return int(steps[0]) if steps[0] and (steps == steps[0]).all() else None


def _taken(at: np.ndarray, n: int, d: int) -> Callable[[Any], Any] | None:
    """A function that selects elements along a dimension of size ``n`` without a look-up; None if there is none."""
    step = _step(at)
    if step is not None:
        first, last = int(min(at[0], at[-1])), int(max(at[0], at[-1]))

        def strided(x: Any) -> Any:
            selected = lax.slice_in_dim(x, first, last + 1, abs(step), axis=d)
            return selected if step > 0 else lax.rev(selected, (d,))

        return strided
    times = at.size // n
    if times > 1 and np.array_equal(at, np.repeat(np.arange(n), times)):

        def repeated(x: Any) -> Any:
            wide = lax.broadcast_in_dim(
                x, (*x.shape[: d + 1], times, *x.shape[d + 1 :]), [i + (i > d) for i in range(x.ndim)]
            )
            return wide.reshape(*x.shape[:d], n * times, *x.shape[d + 1 :])

        return repeated
    cuts = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), at.size]
    if len(cuts) > _RUNS + 1 or 2 * at.size < n:
        return None  # for few elements a look-up in the split array is better
    runs = [(int(at[a]), int(at[b - 1]) + 1) for a, b in itertools.pairwise(cuts)]
    return lambda x: lax.concatenate([lax.slice_in_dim(x, a, b, axis=d) for a, b in runs], d)


def _put(
    combine: Callable[[Any, Any], Any] | None,
    x: Any,
    updates: Any,
    first: Sequence[int],
    last: Sequence[int],
    steps: Sequence[int],
) -> Any:
    """Writes updates from ``first`` to ``last`` in each dimension, to every ``steps``-th element."""
    assert combine is not None
    shape, inside = x.shape, None
    padding = [(a, n - 1 - b, s - 1) for a, b, n, s in zip(first, last, shape, steps, strict=True)]
    for d, (a, b, n, s) in enumerate(zip(first, last, shape, steps, strict=True)):
        if (a, b, s) != (0, n - 1, 1):
            at = lax.iota(jnp.int32, n)
            selected = (at >= a) & (at <= b)
            selected = selected if s == 1 else selected & (lax.rem(at - a, jnp.int32(s)) == 0)
            selected = lax.broadcast_in_dim(selected, shape, (d,))
            inside = selected if inside is None else inside & selected
    spread = lax.pad(updates, jnp.zeros((), updates.dtype), padding)
    written = combine(x, spread)
    return written if inside is None else jnp.where(inside, written, x)
