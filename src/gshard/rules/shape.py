"""Primitives that only change the shape: broadcast, transpose, reshape, squeeze and so on."""

from __future__ import annotations

import math
from typing import Any

from gshard.comm.shards import Shards
from gshard.core.rule import Rule, RuleMaker
from gshard.rules.registry import Call, rule


@rule("broadcast_in_dim")
def broadcast_in_dim(call: Call) -> Rule:
    """Operand dimensions keep their factor; new ones, and those stretched from size 1, get one of their own.

    >>> params = {"shape": (4, 3, 6), "broadcast_dimensions": (0, 2)}
    >>> print(broadcast_in_dim(Call("broadcast_in_dim", params, ((4, 1),), ((4, 3, 6),), ("f",))))
    a 1 -> a b c
    """
    make = RuleMaker()
    result = make.parallel(call.out_shapes[0])
    operand: list[tuple[int, ...]] = []
    for n, d in zip(call.in_shapes[0], call.params["broadcast_dimensions"], strict=True):
        operand.append(result[d] if n == call.out_shapes[0][d] else ())

    def local(shards: Shards, x: Any) -> list[Any]:
        return shards.bind(x, shape=shards.out_shape())

    return make.rule([operand], [result], local=local)


@rule("transpose")
def transpose(call: Call) -> Rule:
    """
    >>> print(transpose(Call("transpose", {"permutation": (2, 0, 1)}, ((4, 5, 6),), ((6, 4, 5),), ("f",))))
    a b c -> c a b
    """
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    return make.rule([dims], [[dims[d] for d in call.params["permutation"]]])


@rule("squeeze")
def squeeze(call: Call) -> Rule:
    """Dropped dimensions have no factor, the others are parallel."""
    dropped = {d % len(call.in_shapes[0]) for d in call.params["dimensions"]}
    make = RuleMaker()
    dims = [() if d in dropped else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    return make.rule([dims], [[dim for d, dim in enumerate(dims) if d not in dropped]])


@rule("reshape")
def reshape(call: Call) -> Rule:
    """Dimensions that are regrouped share factors; pieces that do not line up are whole.

    >>> def show(*shapes): print(reshape(Call("reshape", {"dimensions": None}, shapes[:1], shapes[1:], ("f",))))
    >>> show((6, 4), (24,))
    a b -> (a b)
    >>> show((6, 4), (4, 6))
    (a b) c -> (a d) e; whole b c d e
    >>> show((8, 1, 3), (2, 4, 3))
    (a b) 1 c -> a b c
    """
    make = RuleMaker()
    source, target = call.in_shapes[0], call.out_shapes[0]
    if call.params.get("dimensions") is not None or 0 in source:
        return make.rule([[make.whole(n) for n in source]], [[make.whole(n) for n in target]], local=_local_reshape)
    operand, result = _line_up(make, source, target)
    return make.rule([operand], [result], local=_local_reshape)


def _local_reshape(shards: Shards, x: Any) -> list[Any]:
    return shards.bind(x, new_sizes=shards.out_shape())


def _line_up(
    make: RuleMaker, source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Walks both shapes from the major side and gives what they have in common a shared factor.

    The part of each side not yet given out always has the same number of elements, so the greatest common divisor
    of the two current dimensions is a factor of both. When it is 1 the two sides are out of step: each takes a whole
    factor of its own until their products agree again.
    """
    operand: list[tuple[int, ...]] = [() for _ in source]
    result: list[tuple[int, ...]] = [() for _ in target]
    i = j = 0
    left, right = 1, 1  # what remains of the current dimensions
    while True:
        while left == 1 and i < len(source):
            left, i = source[i], i + 1
        while right == 1 and j < len(target):
            right, j = target[j], j + 1
        if left == right == 1:
            return operand, result
        common = math.gcd(left, right)
        if common > 1:
            shared = make.factor(common)
            operand[i - 1] += shared
            result[j - 1] += shared
            left, right = left // common, right // common
            continue
        # Out of step: take whole factors on both sides until their products agree.
        operand[i - 1] += make.whole(left)
        result[j - 1] += make.whole(right)
        a, b = left, right
        while a != b:
            if a < b:
                a *= source[i]
                operand[i] += make.whole(source[i]) if source[i] > 1 else ()
                i += 1
            else:
                b *= target[j]
                result[j] += make.whole(target[j]) if target[j] > 1 else ()
                j += 1
        left = right = 1


@rule("split")
def split(call: Call) -> Rule:
    """The dimension that is cut apart is whole, the others are parallel."""
    make = RuleMaker()
    axis = call.params["axis"]
    operand = [make.whole(n) if d == axis else make.factor(n) for d, n in enumerate(call.in_shapes[0])]

    def piece(n: int) -> list[tuple[int, ...]]:
        return [make.whole(n) if d == axis else dim for d, dim in enumerate(operand)]

    return make.rule([operand], [piece(shape[axis]) for shape in call.out_shapes])


@rule("stack")
def stack(call: Call) -> Rule:
    """The new dimension is whole, the others are parallel."""
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    result = list(dims)
    result.insert(call.params["axis"], make.whole(len(call.in_shapes)))
    return make.rule([dims for _ in call.in_shapes], [result])


@rule("unstack")
def unstack(call: Call) -> Rule:
    """The dimension that is taken apart is whole, the others are parallel."""
    make = RuleMaker()
    axis = call.params["axis"]
    operand = [make.whole(n) if d == axis else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    result = [dim for d, dim in enumerate(operand) if d != axis]
    return make.rule([operand], [result for _ in call.out_shapes])


@rule("tile")
def tile(call: Call) -> Rule:
    """Each result dimension is the number of copies times the operand's dimension.

    >>> print(tile(Call("tile", {"reps": (3, 1)}, ((4, 5),), ((12, 5),), ("f",))))
    a b -> (c a) b
    """
    make = RuleMaker()
    operand = make.parallel(call.in_shapes[0])
    copies = [make.factor(n) if n > 1 else () for n in call.params["reps"]]

    def local(shards: Shards, x: Any) -> list[Any]:
        return shards.bind(x, reps=tuple(shards.size(c[0]) if c else 1 for c in copies))

    return make.rule([operand], [[c + d for c, d in zip(copies, operand, strict=True)]], local=local)


@rule("bitcast_convert_type")
def bitcast_convert_type(call: Call) -> Rule:
    """Elements are re-read in place; a dimension that appears or vanishes at the end (other width) is whole."""
    make = RuleMaker()
    operand, result = call.in_shapes[0], call.out_shapes[0]
    dims = make.parallel(operand if len(operand) <= len(result) else result)
    return make.rule(
        [[*dims, *(make.whole(n) for n in operand[len(dims) :])]],
        [[*dims, *(make.whole(n) for n in result[len(dims) :])]],
    )
