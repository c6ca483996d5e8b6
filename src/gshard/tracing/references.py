"""Converts a function of mutable arrays (``jax.new_ref``) to a function of arrays.

    r[...] += 1                 r' = r + 1
    scan over a body that       the loop carries the value of the reference
    writes to a reference

References that the function creates become values, which gshard plans like others. The final values of references that
the function receives or closes over become additional results.
"""

from __future__ import annotations

import re
from typing import Any

from gshard.core.errors import TraceError
from gshard.core.jax_adapter import closed, sub_jaxprs, user_line
from gshard.core.jax_adapter_references import (
    discharged,
    is_discharged,
    is_reference_type,
    with_references_as_arguments,
)


def without_references(whole: Any, name: str) -> tuple[Any, tuple[int, ...]]:
    """The closed jaxpr of arrays for a closed jaxpr of references."""
    if is_discharged(whole):
        return whole, ()
    whole = with_references_as_arguments(whole)
    references = tuple(i for i, a in enumerate(whole.in_avals) if is_reference_type(a))
    try:
        converted = discharged(whole)
    except NotImplementedError as error:
        primitive = re.search(r"primitive: (\w+)", str(error))
        line = _line_of(whole, primitive[1]) if primitive else ""
        raise TraceError.like(
            error,
            f"{name} uses a reference (jax.new_ref) where JAX cannot replace it by arrays.",
            line,
            f"JAX: {error}",
            "Read the reference before, give the operation the array, and write its result back after.",
        ) from error
    if len(converted.out_avals) != len(whole.out_avals) + len(references):
        raise TraceError(
            f"{name} freezes a reference that it was given.",
            _line_of(whole, "freeze"),
            hint="Read it with ref[...], and call jax.freeze outside of the function.",
        )
    return converted, references


def _line_of(jaxpr: Any, primitive: str) -> str:
    """The user's line of the first equation of a primitive."""
    for e in closed(jaxpr)[0].eqns:
        if e.primitive.name == primitive:
            return user_line(e.source_info)
        for body in sub_jaxprs(e.params):
            if line := _line_of(body, primitive):
                return line
    return ""
