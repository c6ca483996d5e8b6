"""Enables JAX's 64-bit types while gshard traces a program that contains 64-bit values.

    def f(x):
        with jax.enable_x64(True):
            return jnp.cumsum(x.astype(jnp.float64)).astype(jnp.float32)

JAX traces the body of the ``with`` statement with 64-bit types. gshard traces the per-device program later, outside of
this statement, where JAX would convert these values to 32 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from gshard.core.jax_adapter import closed, sub_jaxprs

_WIDE = frozenset(("float64", "int64", "uint64", "complex128"))


@contextlib.contextmanager
def wide_enough_for(dtypes: Iterable[Any]) -> Iterator[None]:
    """Enables 64-bit types inside if any of these dtypes has 64 bits."""
    wide = any(getattr(dtype, "itemsize", 0) >= 8 and str(dtype) in _WIDE for dtype in dtypes)
    if not wide or jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        yield
        return
    with jax.enable_x64(True):
        yield


def dtypes_in(jaxpr: Any) -> Iterator[Any]:
    """The dtypes of all results of equations in a (closed) jaxpr and its bodies."""
    body, _ = closed(jaxpr)
    for e in body.eqns:
        yield from (getattr(v.aval, "dtype", None) for v in e.outvars)
        for inner in sub_jaxprs(e.params):
            yield from dtypes_in(inner)
