"""Windows cut from, put into, or joined along dimensions: slice, pad, concatenate and their dynamic forms.

A dimension that is taken whole is parallel. One that is cut is ``whole`` on both sides.
"""

from __future__ import annotations

from typing import Any

from gshard.comm.shards import Shards
from gshard.core.rule import Rule, RuleMaker
from gshard.rules.registry import Call, rule


@rule("slice")
def slice_(call: Call) -> Rule:
    """
    >>> params = {"start_indices": (0, 2), "limit_indices": (4, 5), "strides": None}
    >>> print(slice_(Call("slice", params, ((4, 6),), ((4, 3),), ("f",))))
    a b -> a c; whole b c
    """
    strides = call.params["strides"] or (1,) * len(call.in_shapes[0])
    starts = call.params["start_indices"]
    make = RuleMaker()
    operand, result = [], []
    for n, m, stride in zip(call.in_shapes[0], call.out_shapes[0], strides, strict=True):
        same = n == m and stride == 1
        operand.append(make.factor(n) if same else make.whole(n))
        result.append(operand[-1] if same else make.whole(m))

    def local(shards: Shards, x: Any) -> list[Any]:
        limits = [
            n if dim == other else limit
            for n, dim, other, limit in zip(x.shape, operand, result, call.params["limit_indices"], strict=True)
        ]
        return shards.bind(x, start_indices=tuple(starts), limit_indices=tuple(limits))

    return make.rule([operand], [result], local=local)


@rule("pad")
def pad(call: Call) -> Rule:
    """Dimensions without padding are parallel."""
    make = RuleMaker()
    operand, result = [], []
    for n, m, config in zip(call.in_shapes[0], call.out_shapes[0], call.params["padding_config"], strict=True):
        same = tuple(config) == (0, 0, 0)
        operand.append(make.factor(n) if same else make.whole(n))
        result.append(operand[-1] if same else make.whole(m))
    return make.rule([operand, []], [result])


@rule("concatenate")
def concatenate(call: Call) -> Rule:
    """The joined dimension is whole, the others are parallel."""
    axis = call.params["dimension"]
    make = RuleMaker()
    dims = [make.factor(n) if d != axis else () for d, n in enumerate(call.out_shapes[0])]

    def tensor(n: int) -> list[tuple[int, ...]]:
        return [make.whole(n) if d == axis else dim for d, dim in enumerate(dims)]

    return make.rule([tensor(s[axis]) for s in call.in_shapes], [tensor(call.out_shapes[0][axis])])


@rule("dynamic_slice")
def dynamic_slice(call: Call) -> Rule:
    """Dimensions taken whole are parallel: their start is clamped to 0, on shards as in the whole."""
    make = RuleMaker()
    operand, result = [], []
    for n, m in zip(call.in_shapes[0], call.params["slice_sizes"], strict=True):
        operand.append(make.factor(n) if n == m else make.whole(n))
        result.append(operand[-1] if n == m else make.whole(m))

    def local(shards: Shards, x: Any, *starts: Any) -> list[Any]:
        return shards.bind(x, *starts, slice_sizes=shards.out_shape())

    return make.rule([operand, *([[]] * len(operand))], [result], local=local)


@rule("dynamic_update_slice")
def dynamic_update_slice(call: Call) -> Rule:
    """Dimensions that the update covers are parallel: their start is clamped to 0, on shards as in the whole."""
    make = RuleMaker()
    operand, update = [], []
    for n, m in zip(call.in_shapes[0], call.in_shapes[1], strict=True):
        operand.append(make.factor(n) if n == m else make.whole(n))
        update.append(operand[-1] if n == m else make.whole(m))
    return make.rule([operand, update, *([[]] * len(operand))], [operand])
