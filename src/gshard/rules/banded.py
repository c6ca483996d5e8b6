"""Multiplies an array by a banded table, a matrix whose rows have few nonzero numbers in neighboring columns.

Resizing an image, for example, multiplies its rows by a table with two nonzero numbers in each row. If the rows of the
image are split, a device needs only the elements that its own results read, a halo, and not the whole image:

    y[j] = sum over k of weights[j, k] * x[starts[j] + k]       1/4 x[3] + 3/4 x[4], 3/4 x[4] + 1/4 x[5], ...

``rewrite.banded_product`` finds such products. If the results follow one pattern (``p`` results for every ``q``
elements), the rule sums slices with stride ``q`` and interleaves them; otherwise it looks the elements up.

The original product multiplies every element by a number, possibly zero, and zero times infinity is NaN. The rule
therefore counts the elements that are not finite on all devices: a result is NaN if there are more of them than the
result reads. It multiplies the elements that it reads as the product does, also by zero. Integers need no count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.shards import Shards, along
from gshard.core.rule import Rule, RuleMaker
from gshard.core.xla_workarounds import taken
from gshard.language.function_primitive import function_primitive
from gshard.language.registry import Call, rule
from gshard.rules.along_axis import AlongAxis

# The largest number of elements that a result may read. A matrix unit multiplies 128 elements at a time, and takes no
# longer if most of them are zero.
MOST = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Band:
    """The nonzero weights of a table."""

    n: int  # the number of elements that are multiplied
    # int [m]; the first element that each result reads. It may be outside of 0 to ``n``, where weights are zero.
    starts: np.ndarray
    weights: np.ndarray  # [m, k]; the weights of the ``k`` elements that each result reads

    @property
    def m(self) -> int:
        """The number of results."""
        return self.starts.shape[0]

    @property
    def width(self) -> int:
        """The number of elements that a result reads."""
        return int(self.weights.shape[1])

    def window(self, parts: int) -> Window:
        """The window of elements that each part of the results reads."""
        size = -(-self.m // parts)
        firsts = self.starts[::size]
        used = len(firsts)
        step = round((int(firsts[-1]) - int(firsts[0])) / (used - 1)) if used > 1 else 0
        relative = self.starts - step * (np.arange(self.m) // size)
        first = int(relative.min())
        return Window(self.n, first, step, parts, int(relative.max()) + self.width - first, taking=used)

    def sent(self, parts: int) -> int:
        """The elements along the dimension that each device sends, with two for the count of nonfinite elements."""
        return sum(self.window(parts).messages(-(-self.n // parts))) + 2

    def within(self, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """The starts and weights of each part's results."""
        size, window = -(-self.m // parts), self.window(parts)
        starts, weights = _padded_rows(self.starts, size * parts), _padded_rows(self.weights, size * parts)
        weights[self.m :] = 0
        starts = starts.reshape(parts, size) - window.position(np.arange(parts))[:, None]
        starts = np.clip(starts, 0, window.extent - self.width)
        starts.reshape(-1)[self.m :] = np.broadcast_to(starts[0], starts.shape).reshape(-1)[self.m :]
        return starts, weights.reshape(parts, size, self.width)


def _padded_rows(x: np.ndarray, m: int) -> np.ndarray:
    """The rows of an array, with copies of the last row up to ``m`` rows."""
    return np.concatenate([x, np.repeat(x[-1:], m - x.shape[0], 0)])


def _pattern(starts: np.ndarray, width: int) -> tuple[int, int] | None:
    """The number of phases and the stride of a phase, if starts repeat in a pattern."""
    for phases in range(1, MOST // width + 1):
        if starts.size % phases:
            continue
        strides = set((starts[phases:] - starts[:-phases]).tolist())
        if len(strides) <= 1 and min(strides, default=1) > 0:
            return phases, min(strides, default=1)
    return None


def _product(x: Any, nonfinite: Any, starts: Any, weights: Any, dim: int, dtype: Any) -> Any:
    """The results that read a window along a dimension, each with its start and its weights [m, k].

    ``nonfinite`` is the number of elements of the whole array that are not finite; None for dtypes without them.
    """
    m, width = weights.shape
    pattern = _pattern(starts, width) if isinstance(starts, np.ndarray) else None
    phases, stride = pattern or (1, 1)
    wide = dtype if jnp.issubdtype(dtype, jnp.integer) else jnp.promote_types(dtype, jnp.float32)
    weights = weights.astype(wide).reshape(m // phases, phases, width)

    def elements_read(phase: int, k: int) -> Any:
        """Element ``k`` of each result of a phase."""
        if not pattern:
            return taken(x, jnp.asarray(starts, jnp.int32) + k, dim)
        first = int(starts[phase]) + k
        return lax.slice_in_dim(x, first, first + (m // phases - 1) * stride + 1, stride, dim)

    def results_of(phase: int) -> Any:
        products = []
        unread = nonfinite  # the nonfinite elements that a result does not read
        for k in range(width):
            element = elements_read(phase, k)
            products.append(element.astype(wide) * along(weights[:, phase, k], dim, x.ndim))
            if unread is not None:
                unread = unread - (~jnp.isfinite(element)).astype(unread.dtype)
        total = functools.reduce(operator.add, products)
        return total if unread is None else jnp.where(unread > 0, jnp.asarray(np.nan, wide), total)

    results = [results_of(phase) for phase in range(phases)]
    if phases > 1:
        return jnp.stack(results, dim + 1).reshape(*x.shape[:dim], m, *x.shape[dim + 1 :]).astype(dtype)
    return results[0].astype(dtype)


def _count_dtype(width: int, parts: int) -> Any:
    """A dtype for sums over ``parts`` devices of counts up to ``width + 1``."""
    return np.dtype(np.uint8 if (width + 1) * parts < 256 else np.int32)


def _count_nonfinite(x: Any, dim: int, width: int, parts: int) -> Any:
    """The number of elements along a dimension that are not finite, at most one more than a result reads."""
    count = jnp.sum(~jnp.isfinite(x), dim, keepdims=True, dtype=jnp.int32)
    return jnp.minimum(count, width + 1).astype(_count_dtype(width, parts))


def _has_infinities(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _run(x: Any, *, band: Band, dim: int, dtype: Any) -> Any:
    window = band.window(1)
    (starts,), (weights,) = band.within(1)
    nonfinite = _count_nonfinite(x, dim, band.width, 1) if _has_infinities(x.dtype) else None
    room = (-window.first, window.first + window.extent - band.n)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(*room, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)])
    return _product(x, nonfinite, starts, jnp.asarray(weights), dim, dtype)


def _shape(x: Any, *, band: Band, dim: int, dtype: Any) -> Any:
    return jax.core.ShapedArray((*x.shape[:dim], band.m, *x.shape[dim + 1 :]), dtype)


banded_p = function_primitive("banded", _run, _shape, dimension="dim")


@rule("banded")
def banded(call: Call) -> Rule:
    """Shards exchange a halo along the dimension of the table. The other dimensions are parallel.

    >>> band = Band(4, np.arange(8) // 2, np.ones((8, 1), np.float32))
    >>> print(banded(Call("banded", {"band": band, "dim": 1, "dtype": np.float32}, ((3, 4),), ((3, 8),), ("f4",))))
    a b -> a b; communicate b
    """
    band, dim, dtype = call.params["band"], call.params["dim"], call.params["dtype"]
    make = RuleMaker()
    array = AlongAxis.of(make, call.in_shapes[0], dim, lambda n: make.communicate(max(n, band.m)))
    counts = bool(call.in_dtypes) and _has_infinities(call.in_dtypes[0])

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = array.atoms(shards)
        if not atoms:
            return shards.bind(x)
        parts = shards.mesh.count(atoms)
        nonfinite = None
        if counts:
            count = _count_nonfinite(array.fill_padding(shards, x, 0), dim, band.width, parts)
            nonfinite = shards.all_reduce(count, atoms, "add")
        x = shards.window(x, dim, atoms, band.window(parts), 0)
        starts, weights = band.within(parts)
        part = lax.axis_index(atoms)
        if (starts == starts[0]).all():
            starts_here: Any = starts[0]
        else:
            starts_here = lax.dynamic_index_in_dim(jnp.asarray(starts, jnp.int32), part, 0, keepdims=False)
        weights_here = lax.dynamic_index_in_dim(jnp.asarray(weights), part, 0, keepdims=False)
        return [_product(x, nonfinite, starts_here, weights_here, dim, dtype)]

    flops = 2 * band.width * math.prod(call.out_shapes[0])
    return make.rule([array.dims], [array.dims], local=local, flops=flops)
