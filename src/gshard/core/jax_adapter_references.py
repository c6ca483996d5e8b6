"""Adapts gshard to references: mutable arrays (``jax.new_ref``).

JAX's own rules (``discharge_state``) convert a function of references to one of arrays. The final value of a reference
from outside becomes an additional result, which the call writes into the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.state import discharge as _discharge
from jax._src.state.types import AbstractRef as _AbstractRef
from jax._src.state.types import RefEffect as _RefEffect

from gshard.core.jax_adapter import closed


def is_reference(x: Any) -> bool:
    """Whether a value is a reference (a mutable array) or a tracer of a reference."""
    return isinstance(x, jax.Ref)


def is_reference_type(aval: Any) -> bool:
    """Whether a JAX type is the type of a reference."""
    return isinstance(aval, _AbstractRef)


def type_of_reference(x: Any) -> Any:
    """The type of a reference, or of a ``jax.ShapeDtypeStruct`` of a reference; None for other values.

    The type has a sharding only if its mesh has explicit axes, like the types of arrays.
    """
    if not is_reference(x) and not (isinstance(x, jax.ShapeDtypeStruct) and x.is_ref):
        return None
    aval = _core.shaped_abstractify(x) if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    inner = aval.inner_aval
    if inner.sharding.mesh.empty or not inner.sharding.mesh.explicit_axes:
        inner = inner.update(sharding=None)
    return aval.update(inner_aval=inner)


def array_type_of(aval: Any) -> Any:
    """The type of the array in a reference. Other types are returned unchanged."""
    return aval.inner_aval if isinstance(aval, _AbstractRef) else aval


def array_of(reference: Any) -> Any:
    """The current array of a reference. It is not a copy: writing to the reference deletes the array."""
    array = reference._refs._buf
    vars(array).pop("addressable_shards", None)  # JAX does not update this cached property when it writes
    return array


def write(reference: Any, array: Any) -> None:
    """Replaces the array of a reference by one of the same type and sharding, whose memory has no other owner."""
    reference._refs._buf._replace_with(array)


def is_discharged(jaxpr: Any) -> bool:
    """Whether a closed jaxpr neither creates nor takes references."""
    avals = (v.aval for v in (*closed(jaxpr)[0].constvars, *closed(jaxpr)[0].invars))
    effects = (_RefEffect, _core.InternalMutableArrayEffect)
    return not any(isinstance(e, effects) for e in jaxpr.effects) and not any(map(is_reference_type, avals))


def effects_of_call(jaxpr: Any) -> set[Any]:
    """The effects of an equation that calls a closed jaxpr, without the effects of references that it creates."""
    effects = _core.positional_effects(closed(jaxpr)[0])
    return {e for e in effects if not isinstance(e, _core.InternalMutableArrayEffect)}


def references_in(jaxpr: Any) -> list[Any]:
    """The references among the constants of a closed jaxpr, which the traced function closes over."""
    return [x for x in closed(jaxpr)[1] if is_reference(x)]


def with_references_as_arguments(jaxpr: Any) -> Any:
    """A closed jaxpr with the references among its constants as its last arguments."""
    body, consts = closed(jaxpr)
    are_references = [is_reference(x) for x in consts]
    if not any(are_references):
        return jaxpr
    constvars = [v for v, moved in zip(body.constvars, are_references, strict=True) if not moved]
    invars = [*body.invars, *(v for v, moved in zip(body.constvars, are_references, strict=True) if moved)]
    effects = _partial_eval.make_jaxpr_effects(constvars, invars, body.outvars, body.eqns)
    other_consts = tuple(x for x, moved in zip(consts, are_references, strict=True) if not moved)
    changes = {"constvars": constvars, "invars": invars, "effects": effects}
    changes["debug_info"] = body.debug_info.with_unknown_names()
    if body is jaxpr:
        return body.replace(**changes, consts=other_consts)
    return type(jaxpr)(body.replace(**changes), other_consts)


def discharged(jaxpr: Any) -> Any:
    """A closed jaxpr of arrays: references among its arguments become arrays, their final values the last results."""
    return _discharge.discharge_state(jaxpr)


_RULES_HAVE_A_CONTEXT = hasattr(_discharge, "DischargeContext")  # newer JAX


def discharged_by(primitive: Any, bind: Callable[..., list[Any]]) -> None:
    """Registers how JAX discharges a primitive that holds a closed jaxpr."""

    def rule(*arguments: Any, jaxpr: Any, **parameters: Any) -> tuple[list[Any], list[Any]]:
        in_avals = arguments[0].in_avals if _RULES_HAVE_A_CONTEXT else arguments[0]
        operands: Sequence[Any] = arguments[1:] if _RULES_HAVE_A_CONTEXT else arguments[2:]
        results_and_final_values = bind(operands, discharged(jaxpr), parameters)
        count = len(jaxpr.out_avals)
        final_values = iter(results_and_final_values[count:])
        written = [next(final_values) if is_reference_type(a) else None for a in in_avals]
        return written, list(results_and_final_values[:count])

    _discharge.register_discharge_rule(primitive)(rule)


def shape_of_reference(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The abstract argument with which gshard traces a function of a reference."""
    inner = aval.inner_aval
    return jax.ShapeDtypeStruct(inner.shape, inner.dtype, sharding=sharding, weak_type=inner.weak_type, is_ref=True)
