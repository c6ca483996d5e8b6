"""Opens a primitive without a rule: the equations of its lowering function take its place.

Most primitives of other packages exist for the sake of a derivative or a ``vmap`` rule of their own. What they compute
is a function of JAX's, which JAX traces when it lowers them (``mlir.lower_fun``). Traced on the equation's shapes that
function gives equations with rules, so that they are split like any others:

    bcoo_dot_general   ->  gather, mul, scatter-add
    unvmap_any         ->  reduce_or

A primitive is lowered to just this program, so its numbers are kept. One with a lowering of its own (a kernel) is never
opened, nor one with effects, nor one that a rule is known for. Where its function cannot be traced, or makes results of
other types than the equation says, it stays unchanged.
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
    """Whether an equation may stand for others: no rule is known for it, and it is no loop or branch."""
    return primitive.name not in REGIONS and not has_rule(primitive.name, params)


def opened(primitive: Any, params: dict[str, Any], in_avals: Sequence[Any], out_avals: Sequence[Any]) -> Any | None:
    """The jaxpr that an equation of a primitive that ``may_be_opened`` stands for; None if it stands for itself."""
    function = function_of(primitive)
    if function is None:
        return None

    def typed(*arrays: Any) -> list[Any]:
        return [retyped(x, aval) for x, aval in zip(function(*arrays, **params), out_avals, strict=True)]

    try:
        made = jax.make_jaxpr(typed)(*shapes_of(in_avals))
    except Exception:  # it cannot be traced here: it runs unchanged
        return None
    return None if made.effects or _is_inside(made, primitive, params, in_avals) else made


def _is_inside(jaxpr: Any, primitive: Any, params: dict[str, Any], avals: Sequence[Any]) -> bool:
    """Whether just this equation is somewhere in a jaxpr, such as in what was made by applying the primitive.

    On other arrays it may be there: a solver that solves something smaller by the same primitive.
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
