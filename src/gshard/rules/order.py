"""Sorting and the largest elements: the ordered dimension is whole, the others are parallel."""

from __future__ import annotations

from gshard.core.rule import Rule, RuleMaker
from gshard.rules.registry import Call, rule


@rule("sort")
def sort(call: Call) -> Rule:
    """
    >>> print(sort(Call("sort", {"dimension": 1}, ((4, 6), (4, 6)), ((4, 6), (4, 6)), ("f", "i"))))
    a b, a b -> a b, a b; whole b
    """
    make = RuleMaker()
    dims = [make.whole(n) if d == call.params["dimension"] else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    return make.rule([dims for _ in call.in_shapes], [dims for _ in call.out_shapes])


@rule("top_k")
def top_k(call: Call) -> Rule:
    """The searched dimension is whole on both sides."""
    axis = call.params.get("axis", -1) % len(call.in_shapes[0])
    make = RuleMaker()
    operand = [make.whole(n) if d == axis else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    found = make.whole(call.out_shapes[0][axis])
    result = [found if d == axis else dim for d, dim in enumerate(operand)]
    return make.rule([operand], [result for _ in call.out_shapes])
