"""Wide: traces programs of 64-bit numbers with JAX's x64 types.

    def f(x):
        with jax.enable_x64(True):
            return jnp.cumsum(x.astype(jnp.float64)).astype(jnp.float32)

Such a function is traced with 64 bits where it says so. What gshard makes of it is traced later, when the setting is
gone: JAX would then make 32-bit numbers of what belongs to it.
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
    """What is traced inside may have 64 bits, if any of these types has."""
    wide = any(getattr(dtype, "itemsize", 0) >= 8 and str(dtype) in _WIDE for dtype in dtypes)
    if not wide or jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        yield
        return
    with jax.enable_x64(True):
        yield


def dtypes_in(jaxpr: Any) -> Iterator[Any]:
    """The types of all that a (closed) jaxpr makes."""
    body, _ = closed(jaxpr)
    for e in body.eqns:
        yield from (getattr(v.aval, "dtype", None) for v in e.outvars)
        for inner in sub_jaxprs(e.params):
            yield from dtypes_in(inner)
