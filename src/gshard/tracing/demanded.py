"""Splits an operation with ``out_sharding=`` into the operation and a mark on its result.

    jnp.einsum("ab,bc->ac", x, w, out_sharding=P("data"))    ->  gshard.shard(jnp.einsum("ab,bc->ac", x, w), P("data"))

JAX allows ``out_sharding=`` if the axes of the mesh are of type Explicit.
"""

from __future__ import annotations

from typing import Any

import jax

from gshard.core.jax_adapter import bind, shapes_of
from gshard.language.ledger import RESULT_SHARDINGS
from gshard.language.mark_primitive import mark_p
from gshard.tracing.expand import mark_of_equation, mark_of_type


def demanded(eqn: Any) -> Any | None:
    """The closed jaxpr that replaces an equation with a sharding of its (last) result; None for other equations."""
    sharding = next((eqn.params[k] for k in RESULT_SHARDINGS if eqn.params.get(k) is not None), None)
    spec = getattr(sharding, "spec", None)
    if spec is None or eqn.effects or getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None  # the type of the result also states unreduced and reduced axes (expand.marks_of_parts)
    shape = eqn.outvars[-1].aval.shape
    mark = mark_of_type(sharding, len(shape))
    if mark is None or mark_of_equation(eqn.primitive.name, eqn.params, shape) is not None:
        return None
    params = {k: None if k in RESULT_SHARDINGS else v for k, v in eqn.params.items()}

    def marked(*arrays: Any) -> list[Any]:
        *others, last = bind(eqn.primitive, params, arrays)
        return [*others, mark_p.bind(last, mark=mark)]

    return jax.make_jaxpr(marked)(*shapes_of([v.aval for v in eqn.invars]))
