"""Passing: which equations parts of a sum may pass before they are added up (``Rule.linear``).

A part may be far larger than the sum: 3e38 on one device, -3e38 on another. It may be far smaller: eight parts of
2e-38, and an eighth of that is zero on most devices. Therefore an operation on parts must never overflow, make NaN
of infinities, or flush to zero, unless it does so to the sum:

    moves               elements stay what they are: every monoid, every dtype
    additions           the terms of two sums in another order, as in any sum over devices; no half precision, where
                        sums come near the largest number of the dtype
    multiplications     of integers (modulo 2^n all of it is exact), not of floats: 10 makes infinities of 3e38 and
                        -3e38, 1/8 makes zero of 2e-38, and 0 makes NaN of infinities. In loops that add up what they
                        have scaled there is an exception (``rewrite.scale_in_rounds``)
    wider types         that end where the narrower one does: bfloat16 to float32. A sum of float32 that is infinite
                        would be finite in float64
    what was looked up  is picked, not added: one device holds it, the others zero bits. It passes what leaves zero as
                        it is, and by a sum becomes a part of it

The user may state that no part overflows, underflows or is not finite: of a whole program (``finite=True``) or from an
unreduced mark on (``tracing.permitted``). Parts then also pass what is linear in them (``if_finite``): products and
quotients by values that are finished, negations, Fourier transforms, solves, additions in half precision, and wider
types that end later. The result may differ in the sign of a zero.

A negation is none of these: the sum of 1 and -1 is 0.0, and minus that is -0.0, but the sum of -1 and 1 is 0.0 again,
so that 1/x would be another infinity. A subtraction is an addition: it differs where -0.0 is what a sum is taken from.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Ways = list[tuple[str, tuple[int, ...]]]


def added(dtype: Any, *positions: int) -> Ways:
    """``linear`` of a rule whose results are sums of elements of these operands together."""
    return [("add", positions)] if sums_in_range(dtype) else []


def combined(monoid: str, dtype: Any, *positions: int) -> Ways:
    """``linear`` of a rule that combines elements of these operands by a monoid, in another order."""
    if monoid == "mul":  # some of the factors may be 1e30, all others 1e-30
        return [(monoid, positions)] if is_exact(dtype) else []
    return added(dtype, *positions) if monoid == "add" else [(monoid, positions)]


def if_finite(dtype: Any, *operands: tuple[int, ...]) -> Ways:
    """``finite`` of a rule whose results are sums wherever these operands together are sums of floats.

    >>> if_finite(jnp.float16, (0,), (1,)), if_finite(jnp.int8, (0,))
    ([('add', (0,)), ('add', (1,))], [])
    """
    return [("add", own) for own in operands] if jax.dtypes.issubdtype(dtype, jnp.inexact) else []


def sums_in_range(dtype: Any) -> bool:
    """Whether parts of a sum may be added to others: not in floats whose largest number is near."""
    return is_exact(dtype) or (
        jax.dtypes.issubdtype(dtype, jnp.inexact) and float(jnp.finfo(dtype).max) > 1e38  # bfloat16 and wider
    )


def is_exact(dtype: Any) -> bool:
    """Whether sums and products are exact in every order: those of integers, modulo a power of two."""
    return jax.dtypes.issubdtype(dtype, jnp.integer)
