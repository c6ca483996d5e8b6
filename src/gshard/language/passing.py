"""Determines which equations unreduced parts of a sum may pass before they are added (``Rule.linear``).

A part may be far larger than the sum: 3e38 on one device, -3e38 on another. It may also be far smaller: there may be
eight parts of 2e-38, and an eighth of each is zero on most devices. So an operation on parts must not overflow, produce
NaN from infinities, or flush to zero, unless it does so with the sum:

    moves               do not change elements: parts of every monoid and dtype pass
    additions           add the terms of two sums in another order, like any sum over devices. Half precision is
                        excluded, because its sums may be close to the largest number of the dtype
    multiplications     of integers are exact modulo 2^n. Floats are excluded: a factor of 10 turns 3e38 and -3e38 into
                        infinities, 1/8 turns 2e-38 into zero, and 0 turns infinities into NaN. Loops that add values
                        which they have scaled are an exception (``rewrite.scale_in_rounds``)
    wider types         with the same largest number: bfloat16 to float32. An infinite sum of float32 would be finite in
                        float64
    look-ups            give picked values: one device holds the value, the others hold zero bits. Picked values pass
                        equations that map zero to zero. A sum of picked values is a part of a sum

The user may state that no part overflows, underflows or is infinite: for a whole program (``finite=True``), or from an
unreduced mark on (``tracing.permitted``). Parts then also pass equations that are linear in them (``if_finite``):
products and quotients with reduced values, negations, Fourier transforms, solves, additions in half precision, and
conversions to types with a larger range. The sign of a zero in the result may differ.

Negations are excluded without this statement: the sum of 1 and -1 is 0.0 and its negation is -0.0, but the sum of -1
and 1 is 0.0, so 1/x would be another infinity. Subtractions are treated like additions: they differ only if a sum is
subtracted from -0.0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Ways = list[tuple[str, tuple[int, ...]]]


def added(dtype: Any, *positions: int) -> Ways:
    """The value of ``linear`` for a rule whose results are sums of elements of all these operands."""
    return [("add", positions)] if sums_in_range(dtype) else []


def combined(monoid: str, dtype: Any, *positions: int) -> Ways:
    """The value of ``linear`` for a rule that combines elements of these operands by a monoid in another order."""
    if monoid == "mul":  # some factors may be 1e30 and others 1e-30
        return [(monoid, positions)] if is_exact(dtype) else []
    return added(dtype, *positions) if monoid == "add" else [(monoid, positions)]


def if_finite(dtype: Any, *operands: tuple[int, ...]) -> Ways:
    """The value of ``finite`` for a rule that is linear in each of these sets of operands, if they are floats.

    >>> if_finite(jnp.float16, (0,), (1,)), if_finite(jnp.int8, (0,))
    ([('add', (0,)), ('add', (1,))], [])
    """
    return [("add", positions) for positions in operands] if jax.dtypes.issubdtype(dtype, jnp.inexact) else []


def sums_in_range(dtype: Any) -> bool:
    """Whether parts of a sum may be added to other parts: integers, and floats with the range of bfloat16 or more."""
    return is_exact(dtype) or (
        jax.dtypes.issubdtype(dtype, jnp.inexact) and float(jnp.finfo(dtype).max) > 1e38  # bfloat16 and wider
    )


def is_exact(dtype: Any) -> bool:
    """Whether sums and products are exact in every order: for integers, modulo a power of two."""
    return jax.dtypes.issubdtype(dtype, jnp.integer)
