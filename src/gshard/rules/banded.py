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
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gshard.comm.collectives import sent_bytes
from gshard.comm.halo import Window
from gshard.comm.shards import Shards, along, mask, rest_bytes
from gshard.comm.steps import ALL_REDUCE
from gshard.core.context import NO_CONTEXT
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Mesh
from gshard.core.rule import Rule, RuleMaker
from gshard.core.split import Split
from gshard.core.xla_workarounds import taken
from gshard.language.registry import Call, rule

MOST = 64  # elements that a result reads; a matrix unit multiplies 128 at a time, and takes no longer for zeros

banded_p = Primitive("banded")


@dataclasses.dataclass(frozen=True, eq=False)
class Band:
    """What is not zero of a table.

    Attributes:
        n: how many elements results are made of.
        starts: for each result the first element that it reads, before 0 and from ``n`` on where weights are zero.
        weights: for each result, those of the elements from there on.
    """

    n: int
    starts: np.ndarray
    weights: np.ndarray

    @property
    def m(self) -> int:
        """How many results there are."""
        return self.starts.shape[0]

    @property
    def width(self) -> int:
        """How many elements a result reads."""
        return int(self.weights.shape[1])

    def window(self, parts: int) -> Window:
        """The elements that each part of the results reads."""
        size = -(-self.m // parts)
        firsts = self.starts[::size]
        used = len(firsts)
        step = round((int(firsts[-1]) - int(firsts[0])) / (used - 1)) if used > 1 else 0
        own = self.starts - step * (np.arange(self.m) // size)
        first = int(own.min())
        return Window(self.n, first, step, parts, int(own.max()) + self.width - first, taking=used)

    def sent(self, parts: int) -> int:
        """How many elements along the dimension each device sends, the count of those that are not finite included."""
        return sum(self.window(parts).messages(-(-self.n // parts))) + 2

    def within(self, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """For each part, where in its window its results begin to read; and its weights, zero where there are none."""
        size, window = -(-self.m // parts), self.window(parts)
        at, weights = _rows(self.starts, size * parts), _rows(self.weights, size * parts)
        weights[self.m :] = 0
        at = at.reshape(parts, size) - window.position(np.arange(parts))[:, None]
        at = np.clip(at, 0, window.extent - self.width)
        at.reshape(-1)[self.m :] = np.broadcast_to(at[0], at.shape).reshape(-1)[self.m :]
        return at, weights.reshape(parts, size, self.width)


def _rows(x: np.ndarray, m: int) -> np.ndarray:
    """The rows of an array, the last one repeated until there are ``m``."""
    return np.concatenate([x, np.repeat(x[-1:], m - x.shape[0], 0)])


def _pattern(at: np.ndarray, width: int) -> tuple[int, int] | None:
    """In how many phases results are read, and the stride of one, if they are read in one pattern."""
    for p in (p for p in range(1, MOST // width + 1) if at.size % p == 0):
        strides = set((at[p:] - at[:-p]).tolist())
        if len(strides) <= 1 and min(strides, default=1) > 0:
            return p, min(strides, default=1)
    return None


def _product(x: Any, count: Any, at: Any, weights: Any, dim: int, dtype: Any) -> Any:
    """The results of a window.

    Args:
        x: the window.
        count: how many elements of the whole array are not finite; None if that is not needed.
        at: int [m], where in the window each result begins to read; known before the program runs, or not.
        weights: [m, k].
        dim: along which dimension.
        dtype: of the results.
    """
    m, width = weights.shape
    pattern = _pattern(at, width) if isinstance(at, np.ndarray) else None
    phases, stride = pattern or (1, 1)
    wide = dtype if jnp.issubdtype(dtype, jnp.integer) else jnp.promote_types(dtype, jnp.float32)
    weights = weights.astype(wide).reshape(m // phases, phases, width)

    def read(r: int, k: int) -> Any:
        """What is read of the window for the results of a phase."""
        if not pattern:
            return taken(x, jnp.asarray(at, jnp.int32) + k, dim)
        first = int(at[r]) + k
        return lax.slice_in_dim(x, first, first + (m // phases - 1) * stride + 1, stride, dim)

    def phase(r: int) -> Any:
        products, more = [], count
        for k in range(width):
            element, weight = read(r, k), along(weights[:, r, k], dim, x.ndim)
            products.append(element.astype(wide) * weight)
            if more is not None:
                more = more - (~jnp.isfinite(element)).astype(more.dtype)
        total = functools.reduce(operator.add, products)
        return total if more is None else jnp.where(more > 0, jnp.asarray(np.nan, wide), total)

    found = [phase(r) for r in range(phases)]
    if phases > 1:
        return jnp.stack(found, dim + 1).reshape(*x.shape[:dim], m, *x.shape[dim + 1 :]).astype(dtype)
    return found[0].astype(dtype)


def _count_dtype(width: int, parts: int) -> Any:
    """A dtype that counts to ``width + 1`` on each device: more than that is as good as infinitely many."""
    return np.dtype(np.uint8 if (width + 1) * parts < 256 else np.int32)


def _counted(x: Any, dim: int, width: int, parts: int) -> Any:
    """How many elements along a dimension are not finite, up to one more than a result reads."""
    found = jnp.sum(~jnp.isfinite(x), dim, keepdims=True, dtype=jnp.int32)
    return jnp.minimum(found, width + 1).astype(_count_dtype(width, parts))


def _has_infinities(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


@banded_p.def_impl
def _run(x: Any, *, band: Band, dim: int, dtype: Any) -> Any:
    window = band.window(1)
    (at,), (weights,) = band.within(1)
    count = _counted(x, dim, band.width, 1) if _has_infinities(x.dtype) else None
    room = (-window.first, window.first + window.extent - band.n)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(*room, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)])
    return _product(x, count, at, jnp.asarray(weights), dim, dtype)


@banded_p.def_abstract_eval
def _shape(x: Any, *, band: Band, dim: int, dtype: Any) -> Any:
    return jax.core.ShapedArray((*x.shape[:dim], band.m, *x.shape[dim + 1 :]), dtype)


mlir.register_lowering(banded_p, mlir.lower_fun(_run, multiple_results=False))


@rule("banded")
def banded(call: Call) -> Rule:
    """The dimension exchanges a halo, the others are parallel.

    >>> band = Band(4, np.arange(8) // 2, np.ones((8, 1), np.float32))
    >>> print(banded(Call("banded", {"band": band, "dim": 1, "dtype": np.float32}, ((3, 4),), ((3, 8),), ("f4",))))
    a b -> a b; communicate b
    """
    band, dim, dtype = call.params["band"], call.params["dim"], call.params["dtype"]
    make = RuleMaker()
    shape = call.out_shapes[0]
    dims = [make.communicate(max(band.n, band.m)) if d == dim else make.factor(n) for d, n in enumerate(shape)]
    counts = bool(call.in_dtypes) and _has_infinities(call.in_dtypes[0])

    def local(shards: Shards, x: Any) -> list[Any]:
        if not (atoms := shards.atoms(dims[dim][0])):
            return shards.bind(x)
        parts, count = shards.mesh.count(atoms), None
        if counts:
            own = mask(x, dim, band.n, atoms, 0) if band.n % parts else x
            count = _counted(own, dim, band.width, parts)
            if shards.note is not None:
                shards.note(ALL_REDUCE, atoms, sent_bytes(ALL_REDUCE, count.size * count.dtype.itemsize, parts), count)
            with in_context(NO_CONTEXT):
                count = lax.psum(count, atoms)
        x = shards.window(x, dim, atoms, band.window(parts), 0)
        at, weights = band.within(parts)
        me = lax.axis_index(atoms)
        alike = bool((at == at[0]).all())
        where = at[0] if alike else lax.dynamic_index_in_dim(jnp.asarray(at, jnp.int32), me, 0, keepdims=False)
        own_weights = lax.dynamic_index_in_dim(jnp.asarray(weights), me, 0, keepdims=False)
        return [_product(x, count, where, own_weights, dim, dtype)]

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(dims[dim][0], ()))
        if parts == 1:
            return 0
        each = rest_bytes(call.in_shapes[0], call.in_dtypes[0], dim, dims, split, mesh)
        sent = band.window(parts).bytes(-(-band.n // parts), each)
        if counts:
            of_count = rest_bytes(call.in_shapes[0], _count_dtype(band.width, parts), dim, dims, split, mesh)
            sent += sent_bytes(ALL_REDUCE, of_count, parts)
        return sent

    flops = 2 * band.width * math.prod(call.out_shapes[0])
    return make.rule([dims], [dims], local=local, flops=flops, sends=sends)
