"""Replaces a product with a constant banded table by a product that reads a halo.

    y = resize(x, (2 * n, ...), "linear")       a product with a table [n, 2 * n], two numbers in each column

The table depends on positions only. If the summed dimension is split, ``rules.banded`` reads a halo of the array
instead of a gathered array. gshard computes the table once, as the program would, to find its zeros.

The first elements that results read usually form a pattern: for ``n`` elements and ``m`` results with the greatest
common divisor ``g``, each group of ``m / g`` results reads ``n / g`` elements further on than the previous group. If
this pattern makes the band wider than necessary, each result has its own first element.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.core.planning_tables import tabulated
from gshard.core.program import Constant, Equation, Program, Value
from gshard.language.region import Interpreter, value_of
from gshard.rewrite.driver import Split, where_split
from gshard.rewrite.equation_graph import Others, is_removable, without_dead_code, written
from gshard.rules.banded import MOST, Band, banded_p

_LARGEST = 1 << 26  # largest number of elements of a table to compute
_READ = 1 << 20  # largest number of elements of a captured array to read: it may be weights on a device


@tabulated(1)
def _known_bands() -> dict[Equation, Band | None]:
    """The band of each product that was computed before, so that a search computes each table once."""
    return {}


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A product of an array with a table that depends on positions only."""

    equation: Equation  # the ``dot_general``
    operand: int  # the number of the operand that is the array
    dim: int  # the summed dimension of the array
    table: Callable[[], Any]  # computes the table

    @property
    def array(self) -> Value:
        """The array that is multiplied by the table."""
        x = self.equation.inputs[self.operand]
        assert isinstance(x, Value)
        return x

    def in_parts(self, parts: int) -> Callable[[Any], Any] | None:
        """The product as a function that reads halos; None if that sends no less than a whole part."""
        e = self.equation
        bands = _known_bands()
        if e not in bands:
            bands[e] = self._band()
        band = bands[e]
        if band is None or band.sent(parts) >= -(-band.n // parts):
            return None
        result_dim = len(self.array.shape) - 1 if self.operand == 0 else 0  # in the result of the product

        def product(x: Any) -> Any:
            result = banded_p.bind(x, band=band, dim=self.dim, dtype=e.outputs[0].dtype)
            return jnp.moveaxis(result, self.dim, result_dim)

        return product

    def _band(self) -> Band | None:
        (summed,) = self.equation.params["dimension_numbers"][0][1 - self.operand]
        compute = jax.jit(self.table).lower().compile()  # one program is much faster than single equations
        with jax.ensure_compile_time_eval():  # also while JAX traces
            table = np.asarray(compute())
        return band_of(table if summed else table.T)


def _products(program: Program) -> list[Product]:
    """The products of a program, also inside of loops, whose tables depend on positions and captured arrays only."""
    captured = {v: x for v, x in zip(program.block.inputs, program.captured, strict=False) if _is_here(x)}
    found: list[Product] = []
    for block in program.block.blocks():
        known: set[Any] = {*captured}  # values that can be computed before the program runs
        equations: list[Equation] = []  # those that compute them
        for e in block.equations:
            found += _product(e, known, functools.partial(_table, equations, captured))
            if not e.blocks and is_removable(e) and all(isinstance(x, Constant) or x in known for x in e.inputs):
                known.update(e.outputs)
                equations.append(e)
    return found


def _product(e: Equation, known: Set[Any], table_of: Callable[[Any], Any]) -> Iterator[Product]:
    """The product that an equation is, if it is one of an array with a known table."""
    if e.name != "dot_general" or not _is_exact(e):
        return
    sums, batch = e.params["dimension_numbers"]
    if any(batch) or len(sums[0]) != 1 or 0 in e.outputs[0].shape:
        return
    for operand in (0, 1):
        x, table = e.inputs[operand], e.inputs[1 - operand]
        is_known = isinstance(table, Constant) or table in known
        if len(table.shape) == 2 and 0 < math.prod(table.shape) <= _LARGEST and is_known and isinstance(x, Value):
            yield Product(e, operand, sums[operand][0], functools.partial(table_of, table))
            return


def _table(equations: Sequence[Equation], captured: Mapping[Value, Any], x: Value | Constant) -> Any:
    env: dict[Any, Any] = dict(captured)
    Interpreter().evaluate(without_dead_code(equations, [x], lambda e: True), env)
    return jnp.asarray(value_of(x, env))


@where_split(_products)
def banded_product(product: Product, split: Split) -> Iterator[Others]:
    """Replaces a product over a split dimension by one that reads a halo."""
    e, parts = product.equation, split.parts(product.array, product.dim)
    if parts > 1 and (function := product.in_parts(parts)) is not None:
        yield {e: written(split.writer, function, (product.array,), e.outputs, e)}


def band_of(table: np.ndarray) -> Band | None:
    """The band of a table [results, elements]; None if it is wide, or if the table has infinite numbers or NaN."""
    m, n = table.shape
    nonzero = table != 0
    if not np.isfinite(table).all() or not nonzero.any():
        return None
    low = np.where(nonzero.any(1), nonzero.argmax(1), n)
    high = np.where(nonzero.any(1), n - 1 - nonzero[:, ::-1].argmax(1), -1)
    g = math.gcd(n, m)
    candidates = [_starts_in_groups(low, high, m // g, n // g), _separate_starts(low, high)]
    starts, width = min(candidates, key=lambda candidate: candidate[1])
    if width > MOST:
        return None
    elements = starts[:, None] + np.arange(width)
    weights = np.take_along_axis(table, np.clip(elements, 0, n - 1), 1)
    return Band(n, starts, np.where((elements >= 0) & (elements < n), weights, np.zeros((), table.dtype)))


def _starts_in_groups(low: np.ndarray, high: np.ndarray, p: int, q: int) -> tuple[np.ndarray, int]:
    """The first element that each result reads, and the width of the band, for a pattern that repeats."""
    shift = q * np.arange(low.size // p)[:, None]
    has_elements = (low <= high).reshape(-1, p)
    largest = np.iinfo(np.int64).max
    first = np.where(has_elements, low.reshape(-1, p) - shift, largest).min(0)
    last = np.where(has_elements, high.reshape(-1, p) - shift, -largest).max(0)
    width = int((last - first)[has_elements.any(0)].max()) + 1
    return (shift + np.where(has_elements.any(0), first, first.min())).reshape(-1), width


def _separate_starts(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, int]:
    """The same without a pattern. A result without nonzero elements has the start of its neighbour."""
    has_elements = low <= high
    nearest = np.maximum.accumulate(np.where(has_elements, np.arange(low.size), -1))
    starts = low[np.where(nearest < 0, has_elements.argmax(), nearest)]
    return starts, int((high - low)[has_elements].max()) + 1


def _is_here(x: Any) -> bool:
    """Whether the elements of an array can be read quickly."""
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
