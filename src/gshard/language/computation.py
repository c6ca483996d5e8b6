"""The computations that generic reductions carry: which monoid one is, and how to pass over elements with one that has
no identity.

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
    """The monoid of a computation of two scalars, if it is one whose identity is known."""
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
    ordered_by_parts = equation.primitive.name in ("max", "min") and jnp.issubdtype(dtype, np.complexfloating)
    return None if ordered_by_parts else (traits_of(equation.primitive.name).monoid or None)


def skipping(jaxpr: Any, consts: Sequence[Any] = ()) -> Callable[..., Any]:
    """A computation as one of ``(flag, *values)``, in which values whose flag is False do not count.

    It is what an identity would be for: ``(False, ...)`` is one.
    """
    combine = jaxpr_as_fun(jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, list(consts)))

    def with_flags(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
        (here, *a), (there, *b) = x, y
        both = combine(*a, *b)
        values = [jnp.where(here, jnp.where(there, c, u), v) for u, v, c in zip(a, b, both, strict=True)]
        return (here | there, *values)

    return with_flags
