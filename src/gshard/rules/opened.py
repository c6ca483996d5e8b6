"""Opened: a primitive without a rule that is made of others is those others.

Most primitives of other packages exist for the sake of a derivative or a ``vmap`` rule of their own. What they compute
is a function of JAX's, which JAX traces when it lowers them (``mlir.lower_fun``). Traced on the equation's shapes that
function gives equations with rules, so that they are split like any others:

    bcoo_dot_general   ->  gather, mul, scatter-add
    unvmap_any         ->  reduce_or

A primitive is lowered to just this program, so its numbers are kept. One with a lowering of its own (a kernel) is never
opened, nor one with effects, nor one that a rule is known for. Where its function cannot be traced, or makes results of
other types than the equation says, it stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from gshard.core.jax_adapter import closed, function_of, retyped, shapes_of, sub_jaxprs
from gshard.rules.region import REGIONS
from gshard.rules.registry import has_rule


def opened(primitive: Any, params: dict[str, Any], in_avals: Sequence[Any], out_avals: Sequence[Any]) -> Any | None:
    """The jaxpr that an equation of a primitive without a rule stands for; None if it stands for itself."""
    if primitive.name in REGIONS or has_rule(primitive.name, params):
        return None
    function = function_of(primitive)
    if function is None:
        return None

    def typed(*arrays: Any) -> list[Any]:
        return [retyped(x, aval) for x, aval in zip(function(*arrays, **params), out_avals, strict=True)]

    try:
        made = jax.make_jaxpr(typed)(*shapes_of(in_avals))
    except Exception:  # whatever it says to being traced here: it runs as it is
        return None
    return None if made.effects or _contains(made, primitive) else made


def _contains(jaxpr: Any, primitive: Any) -> bool:
    """Whether a primitive stands anywhere in a jaxpr, such as in what was made by applying just itself."""
    eqns = closed(jaxpr)[0].eqns
    return any(e.primitive is primitive or any(_contains(x, primitive) for x in sub_jaxprs(e.params)) for e in eqns)
