"""Analyses the computations of generic reductions: recognises monoids, and skips elements without an identity.

>>> import jax
>>> jaxpr = lambda f: jax.make_jaxpr(f)(1.0, 2.0)
>>> monoid_of(jaxpr(jax.numpy.maximum)), monoid_of(jaxpr(lambda x, y: x + 2 * y))
('max', None)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from gshard.core.jax_adapter import called_jaxpr, closed
from gshard.language.traits import traits_of


def monoid_of(jaxpr: Any) -> str | None:
    """The monoid of a computation of two scalars, if it is a monoid with a known identity; otherwise None."""
    jaxpr = closed(jaxpr)[0]
    if len(jaxpr.invars) != 2 or len(jaxpr.eqns) != 1:
        return None
    (equation,) = jaxpr.eqns
    body = called_jaxpr(equation)
    in_order = list(equation.invars) in (list(jaxpr.invars), list(jaxpr.invars[::-1]))
    if not in_order or list(equation.outvars) != list(jaxpr.outvars):
        return None
    if body is not None:
        return monoid_of(body)
    dtype = jaxpr.invars[0].aval.dtype
    is_complex_order = equation.primitive.name in ("max", "min") and jnp.issubdtype(dtype, np.complexfloating)
    return None if is_complex_order else (traits_of(equation.primitive.name).monoid or None)


def skipping(jaxpr: Any, consts: Sequence[Any] = ()) -> Callable[..., Any]:
    """A computation of ``(flag, *values)`` that ignores values with a False flag.

    It has the identity ``(False, ...)``, also if the original computation has no identity.
    """
    combine = jaxpr_as_fun(jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, list(consts)))

    def with_flags(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
        x_counts, *xs = x
        y_counts, *ys = y
        combined = combine(*xs, *ys)
        values = [
            jnp.where(x_counts, jnp.where(y_counts, both, x_value), y_value)
            for x_value, y_value, both in zip(xs, ys, combined, strict=True)
        ]
        return (x_counts | y_counts, *values)

    return with_flags
