"""Opens a primitive without a rule: replaces it by the equations of its lowering function.

Most primitives of other packages exist to have their own derivative or ``vmap`` rule. JAX lowers them by tracing a
Python function (``mlir.lower_fun``). gshard traces this function with the shapes of the equation. The resulting
equations have rules, so they can be split:

    bcoo_dot_general   ->  gather, mul, scatter-add
    unvmap_any         ->  reduce_or

JAX lowers the primitive to the same program, so results do not change. gshard never opens a primitive with another
lowering (a kernel), with effects, or with a rule. The equation also stays if the function cannot be traced, or if its
results have other types than the results of the equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from gshard.core.jax_adapter import closed, function_of, retyped, shapes_of, sub_jaxprs
from gshard.language.batch import same
from gshard.language.region import REGIONS
from gshard.language.registry import has_rule


def may_be_opened(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an equation has no rule and is neither a loop nor a branch."""
    return primitive.name not in REGIONS and not has_rule(primitive.name, params)


def opened(primitive: Any, params: dict[str, Any], in_avals: Sequence[Any], out_avals: Sequence[Any]) -> Any | None:
    """The jaxpr that replaces an equation for which ``may_be_opened`` is true; None if the equation stays."""
    function = function_of(primitive)
    if function is None:
        return None

    def typed(*arrays: Any) -> list[Any]:
        return [retyped(x, aval) for x, aval in zip(function(*arrays, **params), out_avals, strict=True)]

    try:
        jaxpr = jax.make_jaxpr(typed)(*shapes_of(in_avals))
    except Exception:  # the function cannot be traced here, so the equation stays
        return None
    return None if jaxpr.effects or _is_inside(jaxpr, primitive, params, in_avals) else jaxpr


def _is_inside(jaxpr: Any, primitive: Any, params: dict[str, Any], avals: Sequence[Any]) -> bool:
    """Whether a jaxpr contains the same equation again, for example because the function applies the primitive.

    The primitive may occur with other shapes: a solver may solve a smaller system with the same primitive.
    """
    shapes = [(a.shape, a.dtype) for a in avals]
    return any(
        (
            e.primitive is primitive
            and [(v.aval.shape, v.aval.dtype) for v in e.invars] == shapes
            and same(params, e.params)
        )
        or any(_is_inside(inner, primitive, params, avals) for inner in sub_jaxprs(e.params))
        for e in closed(jaxpr)[0].eqns
    )
