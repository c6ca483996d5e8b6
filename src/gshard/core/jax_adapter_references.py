"""The part of the JAX adapter about references: mutable arrays (``jax.new_ref``).

A function of references is made one of arrays before it is planned, by JAX's own rules (``discharge_state``), as
``jax.jit`` does when it lowers. The final value of a reference that came from outside is a further result, which the
call writes into it.
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
    """Whether it is a reference: an array that can be written to, or a tracer of one."""
    return isinstance(x, _core.Ref)


def is_reference_type(aval: Any) -> bool:
    """Whether a type of JAX's is that of a reference."""
    return isinstance(aval, _AbstractRef)


def type_of_reference(x: Any) -> Any:
    """The type of a reference, or of a ``jax.ShapeDtypeStruct`` that stands for one; None for anything else.

    As for arrays, it has a sharding only where its mesh has explicit axes.
    """
    if not is_reference(x) and not (isinstance(x, jax.ShapeDtypeStruct) and x.is_ref):
        return None
    aval = _core.shaped_abstractify(x) if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    inner = aval.inner_aval
    if inner.sharding.mesh.empty or not inner.sharding.mesh.explicit_axes:
        inner = inner.update(sharding=None)
    return aval.update(inner_aval=inner)


def array_type_of(aval: Any) -> Any:
    """The type of the array that a reference holds; other types as they are."""
    return aval.inner_aval if isinstance(aval, _AbstractRef) else aval


def array_of(reference: Any) -> Any:
    """The array that a reference holds now. It is no copy: who writes to the reference deletes it."""
    array = reference._refs._buf
    vars(array).pop("addressable_shards", None)  # JAX keeps those of before the array was overwritten
    return array


def write(reference: Any, array: Any) -> None:
    """Makes a reference hold another array of the same type and sharding, whose memory has no other owner."""
    reference._refs._buf._replace_with(array)


def is_discharged(jaxpr: Any) -> bool:
    """Whether a closed jaxpr neither makes nor takes references."""
    avals = (v.aval for v in (*closed(jaxpr)[0].constvars, *closed(jaxpr)[0].invars))
    return not any(map(_is_of_references, jaxpr.effects)) and not any(map(is_reference_type, avals))


def _is_of_references(effect: Any) -> bool:
    return isinstance(effect, (_RefEffect, _core.InternalMutableArrayEffect))


def effects_of_call(jaxpr: Any) -> set[Any]:
    """The effects of an equation that calls a closed jaxpr: without those of references that it makes itself."""
    effects = _core.positional_effects(closed(jaxpr)[0])
    return {e for e in effects if not isinstance(e, _core.InternalMutableArrayEffect)}


def references_in(jaxpr: Any) -> list[Any]:
    """The references that a closed jaxpr has among its constants: those that a function closes over."""
    return [x for x in closed(jaxpr)[1] if is_reference(x)]


def with_references_as_arguments(jaxpr: Any) -> Any:
    """A closed jaxpr whose constants that are references are its last arguments."""
    body, consts = closed(jaxpr)
    own = [is_reference(x) for x in consts]
    if not any(own):
        return jaxpr
    constvars = [v for v, moved in zip(body.constvars, own, strict=True) if not moved]
    invars = [*body.invars, *(v for v, moved in zip(body.constvars, own, strict=True) if moved)]
    effects = _partial_eval.make_jaxpr_effects(constvars, invars, body.outvars, body.eqns)
    kept = tuple(x for x, moved in zip(consts, own, strict=True) if not moved)
    changed = {"constvars": constvars, "invars": invars, "effects": effects}
    changed["debug_info"] = body.debug_info.with_unknown_names()
    if body is jaxpr:
        return body.replace(**changed, consts=kept)
    return type(jaxpr)(body.replace(**changed), kept)


def discharged(jaxpr: Any) -> Any:
    """A closed jaxpr of arrays: references among its arguments are arrays, their final values its last results.

    Raises:
        NotImplementedError: JAX has no rule for a primitive that is given a reference.
    """
    return _discharge.discharge_state(jaxpr)


_RULES_HAVE_A_CONTEXT = hasattr(_discharge, "DischargeContext")  # newer JAX


def discharged_by(primitive: Any, bind: Callable[..., list[Any]]) -> None:
    """How a primitive that holds a closed jaxpr is discharged: ``bind(operands, discharged jaxpr, parameters)``."""

    def rule(*given: Any, jaxpr: Any, **parameters: Any) -> tuple[list[Any], list[Any]]:
        in_avals = given[0].in_avals if _RULES_HAVE_A_CONTEXT else given[0]
        operands: Sequence[Any] = given[1:] if _RULES_HAVE_A_CONTEXT else given[2:]
        every = bind(operands, discharged(jaxpr), parameters)
        count = len(jaxpr.out_avals)
        written = iter(every[count:])
        return [next(written) if is_reference_type(a) else None for a in in_avals], list(every[:count])

    _discharge.register_discharge_rule(primitive)(rule)


def shape_of_reference(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """What a function is traced with where it gets a reference."""
    inner = aval.inner_aval
    return jax.ShapeDtypeStruct(inner.shape, inner.dtype, sharding=sharding, weak_type=inner.weak_type, is_ref=True)
