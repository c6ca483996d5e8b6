"""Defines the primitive of an inspection in a jaxpr: an identity on the inspected array.

The primitive keeps its operand when a body is traced again, such as the body of a ``shard_map`` with automatic axes.
The builder of the program records the value, and creates no equation.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

look_at_p = Primitive("gshard_look_at")


@look_at_p.def_impl
@look_at_p.def_abstract_eval
def _same(x: Any, *, number: int) -> Any:
    return x


mlir.register_lowering(look_at_p, lambda ctx, x, *, number: [x])
