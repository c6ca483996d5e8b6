"""Reductions: sums, maxima and their kin, positions of extremes, running sums."""

from __future__ import annotations

from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.rules.registry import Call, rule

_MONOIDS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}


@rule(*_MONOIDS)
def reduction(call: Call) -> Rule:
    """Reduced dimensions combine by the primitive's monoid; the others are parallel.

    >>> print(reduction(Call("reduce_max", {"axes": (1,)}, ((4, 6),), ((4,),), ("f",))))
    a b -> a; max over b=6
    """
    axes = set(call.params["axes"])
    make = RuleMaker()
    monoid = _MONOIDS[call.name]
    dims = [make.factor(n, REDUCE, monoid) if d in axes else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    return make.rule([dims], [[dim for d, dim in enumerate(dims) if d not in axes]])


@rule("argmax", "argmin")
def arg_reduction(call: Call) -> Rule:
    """The searched dimension is whole, the others are parallel."""
    axes = set(call.params["axes"])
    make = RuleMaker()
    dims = [make.whole(n) if d in axes else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    return make.rule([dims], [[dim for d, dim in enumerate(dims) if d not in axes]])


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(call: Call) -> Rule:
    """The dimension that runs is whole, the others are parallel.

    >>> print(cumulative(Call("cumsum", {"axis": 1, "reverse": False}, ((4, 6),), ((4, 6),), ("f",))))
    a b -> a b; whole b
    """
    make = RuleMaker()
    dims = [make.whole(n) if d == call.params["axis"] else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    return make.rule([dims], [dims])
