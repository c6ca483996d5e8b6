"""Splits an operation with ``out_sharding=`` into the operation and a mark on its result.

    jnp.einsum("ab,bc->ac", x, w, out_sharding=P("data"))    ->  gshard.shard(jnp.einsum("ab,bc->ac", x, w), P("data"))

JAX allows it where the axes of the mesh are of type Explicit.
"""

from __future__ import annotations

from typing import Any

import jax

from gshard.core.jax_adapter import bind, shapes_of
from gshard.language.ledger import RESULT_SHARDINGS
from gshard.language.mark_primitive import mark_p
from gshard.tracing.expand import mark_of_equation, mark_of_type


def demanded(eqn: Any) -> Any | None:
    """The closed jaxpr of an equation that says how its (last) result is sharded, else None."""
    said = next((eqn.params[k] for k in RESULT_SHARDINGS if eqn.params.get(k) is not None), None)
    spec = getattr(said, "spec", None)
    if spec is None or eqn.effects or getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None  # what is said of parts of a sum is in the type of the result (expand.marks_of_parts)
    shape = eqn.outvars[-1].aval.shape
    mark = mark_of_type(said, len(shape))
    if mark is None or mark_of_equation(eqn.primitive.name, eqn.params, shape) is not None:
        return None
    params = {k: None if k in RESULT_SHARDINGS else v for k, v in eqn.params.items()}

    def marked(*arrays: Any) -> list[Any]:
        *others, last = bind(eqn.primitive, params, arrays)
        return [*others, mark_p.bind(last, mark=mark)]

    return jax.make_jaxpr(marked)(*shapes_of([v.aval for v in eqn.invars]))
