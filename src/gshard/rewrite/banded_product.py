"""Replaces a product with a banded table by one that exchanges halos. The table follows from positions alone.

    y = resize(x, (2 * n, ...), "linear")       a product with a table [n, 2 * n], two numbers in each column

Where the dimension that is summed over is split, ``rules.banded`` fetches a halo instead. To find its zeros, the table
is computed once, as the program would.

Results read in one pattern as far as sizes say so: of ``n`` elements and ``m`` results with the greatest common divisor
``g``, each group of ``m / g`` results reads as the group before does, ``n / g`` elements further on. Where that would
make the band wider than it is, each result has a beginning of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Constant, Equation, Program, Value
from gshard.language.interpret import Interpreter, value_of
from gshard.language.region import REGIONS
from gshard.rewrite.dce import is_removable
from gshard.rewrite.driver import Split, where_split
from gshard.rewrite.equation_graph import Others, written
from gshard.rules.banded import MOST, Band, banded_p

_LARGEST = 1 << 26  # elements of a table that is computed once: what takes a moment;
_READ = 1 << 20  # of an array that the program closed over, which may be a model's weights, and comes from a device


@tabulated(1)
def _found() -> dict[Equation, Band | None]:
    """Of each product, what was found: planned again, as in a search, its table is not computed again."""
    return {}


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A product with a table that follows from positions.

    Attributes:
        equation: the ``dot_general``.
        operand: which of its operands is the array.
        dim: the dimension of the array that is summed over.
        table: computes it.
    """

    equation: Equation
    operand: int
    dim: int
    table: Callable[[], Any]

    @property
    def array(self) -> Value:
        """What is multiplied by the table."""
        x = self.equation.inputs[self.operand]
        assert isinstance(x, Value)
        return x

    def in_parts(self, parts: int) -> Callable[[Any], Any] | None:
        """The product as one that exchanges halos; None if that sends no less than a whole part."""
        e = self.equation
        found = _found()
        band = found[e] if e in found else found.setdefault(e, self._band())
        if band is None or band.sent(parts) >= -(-band.n // parts):
            return None
        at = len(self.array.shape) - 1 if self.operand == 0 else 0  # where the product has the results

        def made(x: Any) -> Any:
            return jnp.moveaxis(banded_p.bind(x, band=band, dim=self.dim, dtype=e.outputs[0].dtype), self.dim, at)

        return made

    def _band(self) -> Band | None:
        (summed,) = self.equation.params["dimension_numbers"][0][1 - self.operand]
        compute = jax.jit(self.table).lower().compile()  # as one program: each equation by itself takes far longer
        with jax.ensure_compile_time_eval():  # also while JAX traces
            table = np.asarray(compute())
        return band_of(table if summed else table.T)


def _products(program: Program) -> list[Product]:
    """The products of a program, also inside of loops, whose table follows from positions."""
    captured = zip(program.block.inputs, program.captured, strict=False)
    known = _Known({v: x for v, x in captured if _is_here(x)})
    found: list[Product] = []
    known.read(program.block, found)
    return found


@where_split(_products)
def banded_product(product: Product, split: Split) -> Iterator[Others]:
    """A product over a split dimension becomes one that exchanges halos."""
    e, parts = product.equation, split.parts(product.array, product.dim)
    if parts > 1 and (function := product.in_parts(parts)) is not None:
        yield {e: written(split.writer, function, (product.array,), e.outputs, e)}


def band_of(table: np.ndarray) -> Band | None:
    """The band of a table [results, elements]; None if it is not narrow, or of numbers that are not finite."""
    m, n = table.shape
    there = table != 0
    if not np.isfinite(table).all() or not there.any():
        return None
    low = np.where(there.any(1), there.argmax(1), n)
    high = np.where(there.any(1), n - 1 - there[:, ::-1].argmax(1), -1)
    g = math.gcd(n, m)
    ways = [_in_groups(low, high, m // g, n // g), _by_themselves(low, high)]
    starts, width = min(ways, key=lambda way: way[1])
    if width > MOST:
        return None
    at = starts[:, None] + np.arange(width)
    weights = np.take_along_axis(table, np.clip(at, 0, n - 1), 1)
    return Band(n, starts, np.where((at >= 0) & (at < n), weights, np.zeros((), table.dtype)))


def _in_groups(low: np.ndarray, high: np.ndarray, p: int, q: int) -> tuple[np.ndarray, int]:
    """Where results begin to read that do as those do that are ``p`` before, ``q`` elements further on; how far."""
    turn = q * np.arange(low.size // p)[:, None]
    there = (low <= high).reshape(-1, p)
    largest = np.iinfo(np.int64).max
    first = np.where(there, low.reshape(-1, p) - turn, largest).min(0)
    last = np.where(there, high.reshape(-1, p) - turn, -largest).max(0)
    width = int((last - first)[there.any(0)].max()) + 1
    return (turn + np.where(there.any(0), first, first.min())).reshape(-1), width


def _by_themselves(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, int]:
    """The same where each result begins where its numbers do; one without any, where its neighbour does."""
    there = low <= high
    nearest = np.maximum.accumulate(np.where(there, np.arange(low.size), -1))
    starts = low[np.where(nearest < 0, there.argmax(), nearest)]
    return starts, int((high - low)[there].max()) + 1


class _Known:
    """What is known of the values of a program before it runs, and how it is made."""

    def __init__(self, captured: Mapping[Value, Any]):
        self.captured = captured
        self.makers: dict[Value, Equation] = {}  # of what is known
        self.same: dict[Value, Value | Constant] = {}  # what a value inside of a body is outside
        self.order: dict[Equation, int] = {}

    def read(self, block: Block, found: list[Product]) -> None:
        """Notes what is known in a block, and its products."""
        for e in block.equations:
            if (product := self._product(e)) is not None:
                found.append(product)
            for body, at in zip(e.blocks, REGIONS[e.name].same(e.params) if e.blocks else (), strict=False):
                self.same.update(zip(body.inputs, (e.inputs[i] for i in at), strict=False))
            for body in e.blocks:
                self.read(body, found)
            if not e.blocks and is_removable(e) and all(map(self._is_known, e.inputs)):
                self.makers.update(dict.fromkeys(e.outputs, e))
                self.order[e] = len(self.order)

    def _is_known(self, x: Value | Constant) -> bool:
        x = self._outside(x)
        return isinstance(x, Constant) or x in self.makers or x in self.captured

    def _outside(self, x: Value | Constant) -> Value | Constant:
        while isinstance(x, Value) and x in self.same:
            x = self.same[x]
        return x

    def _product(self, e: Equation) -> Product | None:
        if e.name != "dot_general" or not _is_exact(e):
            return None
        sums, batch = e.params["dimension_numbers"]
        if any(batch) or len(sums[0]) != 1 or 0 in e.outputs[0].shape:
            return None
        for operand in (0, 1):
            x, table = e.inputs[operand], e.inputs[1 - operand]
            (dim,) = sums[operand]
            if len(table.shape) == 2 and 0 < math.prod(table.shape) <= _LARGEST and self._is_known(table):
                if isinstance(x, Value):
                    return Product(e, operand, dim, functools.partial(self._array, table, self._made(table)))
        return None

    def _made(self, x: Value | Constant) -> tuple[Equation, ...]:
        """The equations that make an array, in order."""
        found: set[Equation] = set()
        left = [x]
        while left:
            e = self.makers.get(self._outside(left.pop()))  # type: ignore[arg-type]
            if e is not None and e not in found:
                found.add(e)
                left += e.inputs
        return tuple(sorted(found, key=self.order.__getitem__))

    def _array(self, x: Value | Constant, made: Sequence[Equation]) -> Any:
        env: dict[Any, Any] = dict(self.captured)
        for e in made:
            env.update((y, value_of(self._outside(y), env)) for y in e.inputs if isinstance(y, Value))
            Interpreter().evaluate([e], env)
        return jnp.asarray(value_of(self._outside(x), env))


def _is_here(x: Any) -> bool:
    """Whether an array's elements can be read, and soon are."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return False
    return bool(np.size(x) <= _READ)


def _is_exact(e: Equation) -> bool:
    """Whether sums in float32 or wider, or of integers, are at least as exact as those of a product."""
    if isinstance(e.params.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return False
    dtypes = [np.dtype(x.dtype) for x in (*e.inputs, *e.outputs)]
    floats = all(jnp.issubdtype(d, jnp.floating) and d.itemsize > 1 for d in dtypes)
    return floats or all(jnp.issubdtype(d, jnp.integer) for d in dtypes)
