"""A primitive that gshard has never heard of: rows are reversed and added up from the left."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir


def _meaning(x: Any) -> Any:
    return jnp.cumsum(x[::-1], axis=0)


invented_p = Primitive("invented")
invented_p.def_impl(_meaning)
invented_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(invented_p, mlir.lower_fun(_meaning, multiple_results=False))


def invented(x: Any) -> Any:
    """Applies the primitive."""
    return invented_p.bind(x)
