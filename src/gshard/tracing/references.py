"""Turns a function of mutable arrays (``jax.new_ref``) into a function of arrays.

    r[...] += 1                 r' = r + 1
    scan over a body that       the value of the reference is carried from round to round
    writes to a reference

References that a function makes are values from then on, and planned like any others. Of those that it is given, or
closes over, the final values are further results.
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
    """A closed jaxpr of arrays that stands for one of references.

    Args:
        whole: the jaxpr; references among its constants become its last arguments.
        name: the function's.

    Returns:
        the jaxpr, and which of its arguments were references: their final values are its last results, in this order.

    Raises:
        TraceError: a reference is given to an operation that cannot take one, or a reference from outside is frozen.
    """
    if is_discharged(whole):
        return whole, ()
    whole = with_references_as_arguments(whole)
    references = tuple(i for i, a in enumerate(whole.in_avals) if is_reference_type(a))
    try:
        made = discharged(whole)
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
    if len(made.out_avals) != len(whole.out_avals) + len(references):
        raise TraceError(
            f"{name} freezes a reference that it was given.",
            _line_of(whole, "freeze"),
            hint="Read it with ref[...], and call jax.freeze outside of the function.",
        )
    return made, references


def _line_of(jaxpr: Any, primitive: str) -> str:
    """The user's line of the first equation of a primitive."""
    for e in closed(jaxpr)[0].eqns:
        if e.primitive.name == primitive:
            return user_line(e.source_info)
        for body in sub_jaxprs(e.params):
            if line := _line_of(body, primitive):
                return line
    return ""
