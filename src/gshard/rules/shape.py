"""Primitives that only change the shape: broadcast, transpose, reshape, squeeze and so on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax

from gshard.comm.halo import Window
from gshard.comm.shards import Shards
from gshard.core.mesh import Mesh
from gshard.core.program import Equation, itemsize
from gshard.core.rule import Rule, RuleMaker, moves
from gshard.core.split import Split, place
from gshard.language.merged_dims import Fine, Maker, emit, flat
from gshard.language.registry import Call, rule
from gshard.language.traits import Part, Places
from gshard.rules.movement import at_places


def _broadcast_values(params: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    spread = [1] * len(shape)
    for d, n in zip(dims, x.shape, strict=True):
        spread[d] = n
    return np.broadcast_to(x.reshape(spread), shape)


def _broadcast_merged(a: Maker, e: Equation) -> bool:
    own, dims, shape = a.either(e.inputs[0]), e.params["broadcast_dimensions"], e.params["shape"]
    groups: list[tuple[int, ...]] = [(n,) for n in shape]
    for d, group in zip(dims, own.groups, strict=True):
        if math.prod(group) == shape[d]:
            groups[d] = group
        elif len(group) > 1:
            return False
    made = Fine(e.outputs[0], tuple(groups), frozenset())
    sizes = {"shape": flat(made.groups), "broadcast_dimensions": made.all_dims(dims)}
    return emit(a, e, (own.array,), made.groups, **sizes)


def _broadcast_at(part: Part, e: Equation, at: Places) -> Any:
    (x,), dims = e.inputs[:1], e.params["broadcast_dimensions"]
    shape = [n if i is None else i.shape[0] for n, i in zip(e.outputs[0].shape, at, strict=True)]
    own = tuple(None if n == 1 else at[d] for n, d in zip(x.shape, dims, strict=True))
    return lax.broadcast_in_dim(part.of(x, own), shape, dims)


@rule(
    "broadcast_in_dim", free=True, shared=False, shape_in="shape",
    values=_broadcast_values, merged=_broadcast_merged, placed=_broadcast_at,
)  # fmt: skip
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

    return make.rule([operand], [result], local=local, linear=moves(0))


def _transpose_merged(a: Maker, e: Equation) -> bool:
    own, order = a.either(e.inputs[0]), e.params["permutation"]
    return emit(a, e, (own.array,), tuple(own.groups[d] for d in order), permutation=own.all_dims(order))


def _transpose_at(part: Part, e: Equation, at: Places) -> Any:
    order = e.params["permutation"]
    own: list[Any] = [None] * len(order)
    for d, source in enumerate(order):
        own[source] = at[d]
    return lax.transpose(part.of(e.inputs[0], tuple(own)), order)


@rule(
    "transpose", values=lambda params, x: x.transpose(params["permutation"]),
    merged=_transpose_merged, placed=_transpose_at,
)  # fmt: skip
def transpose(call: Call) -> Rule:
    """
    >>> print(transpose(Call("transpose", {"permutation": (2, 0, 1)}, ((4, 5, 6),), ((6, 4, 5),), ("f",))))
    a b c -> c a b
    """
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    return make.rule([dims], [[dims[d] for d in call.params["permutation"]]], linear=moves(0))


def _squeeze_merged(a: Maker, e: Equation) -> bool:
    own, dims = a.either(e.inputs[0]), {d % len(e.inputs[0].shape) for d in e.params["dimensions"]}
    groups = tuple(g for d, g in enumerate(own.groups) if d not in dims)
    return emit(a, e, (own.array,), groups, dimensions=own.all_dims(sorted(dims)))


def _squeeze_at(part: Part, e: Equation, at: Places) -> Any:
    (x,), dropped = e.inputs, {d % len(e.inputs[0].shape) for d in e.params["dimensions"]}
    rest = iter(at)
    own = tuple(None if d in dropped else next(rest) for d in range(len(x.shape)))
    return lax.squeeze(part.of(x, own), tuple(dropped))


@rule(
    "squeeze", free=True, handed_on=True, values=lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    merged=_squeeze_merged, placed=_squeeze_at,
)  # fmt: skip
def squeeze(call: Call) -> Rule:
    """Dropped dimensions have no factor, the others are parallel."""
    dropped = {d % len(call.in_shapes[0]) for d in call.params["dimensions"]}
    make = RuleMaker()
    dims = [() if d in dropped else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    return make.rule([dims], [[dim for d, dim in enumerate(dims) if d not in dropped]], linear=moves(0))


def _reshape_values(params: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    return (x if params["dimensions"] is None else x.transpose(params["dimensions"])).reshape(params["new_sizes"])


def _reshape_at(part: Part, e: Equation, at: Places) -> Any:
    (x,), target = e.inputs[:1], e.outputs[0].shape
    if e.params["dimensions"] is not None:
        return at_places(lax.reshape(part.of(x, (None,) * len(x.shape)), target, e.params["dimensions"]), at)
    same = {(math.prod(x.shape[:d]), n): d for d, n in enumerate(x.shape)}
    own: list[Any] = [None] * len(x.shape)
    left, shape = list(at), list(target)
    for d, (n, i) in enumerate(zip(target, at, strict=True)):
        source = same.get((math.prod(target[:d]), n))
        if i is not None and n > 1 and source is not None:
            own[source], left[d], shape[d] = i, None, i.shape[0]
    return at_places(lax.reshape(part.of(x, tuple(own)), shape), tuple(left))


@rule(
    "reshape", free=True, handed_on=True, shape_in="new_sizes",
    values=_reshape_values, placed=_reshape_at,
)  # fmt: skip
def reshape(call: Call) -> Rule:
    """Dimensions that are regrouped share factors; of runs that do not line up the major dimensions communicate.

    >>> def show(*shapes): print(reshape(Call("reshape", {"dimensions": None}, shapes[:1], shapes[1:], ("f",))))
    >>> show((6, 4), (24,))
    a b -> (a b)
    >>> show((6, 4), (4, 6))
    (a b) c -> (a d) e; replicate b c d e
    >>> show((8, 1, 3), (2, 4, 3))
    (a b) 1 c -> a b c
    >>> show((4, 9), (9, 4))
    a b -> a c; communicate a; replicate b c
    """
    make = RuleMaker()
    order = call.params.get("dimensions") or range(len(call.in_shapes[0]))
    source, target = tuple(call.in_shapes[0][d] for d in order), call.out_shapes[0]
    if 0 in source:
        return make.rule(
            [[make.replicate(n) for n in source]], [[make.replicate(n) for n in target]], local=_local_reshape
        )
    lined, result, misaligned = _line_up(make, source, target, may_communicate=not call.on_keys)
    operand = [lined[list(order).index(d)] for d in range(len(source))]

    def local(shards: Shards, x: Any) -> list[Any]:
        x = x if call.params.get("dimensions") is None else lax.transpose(x, tuple(order))
        for run in misaligned:
            if atoms := shards.atoms(run.factor):
                # Dimensions of size 1 keep the place of those laid end to end: later ones count from them.
                flat = (math.prod(x.shape[run.begin : run.end]), *[1] * (run.end - run.begin - 1))
                x = x.reshape(*x.shape[: run.begin], *flat, *x.shape[run.end :])
                x = shards.window(x, run.begin, atoms, run.window(shards.mesh.count(atoms)), 0)
        return shards.bind(x, new_sizes=shards.out_shape(), dimensions=None)

    def sends(mesh: Mesh, split: Split) -> int:
        total = 0
        sizes = [-(-n // mesh.count(a)) for n, a in zip(source, place(tuple(lined), split), strict=True)]
        for run in misaligned:
            parts = mesh.count(split.get(run.factor, ()))
            if parts > 1:
                each = math.prod(sizes[: run.begin]) * math.prod(sizes[run.end :]) * itemsize(call.in_dtypes[0])
                total += run.window(parts).bytes(math.prod(sizes[run.begin : run.end]), each)
        return total

    return make.rule([operand], [result], local=local, sends=sends if misaligned else None, linear=moves(0))


def _local_reshape(shards: Shards, x: Any) -> list[Any]:
    return shards.bind(x, new_sizes=shards.out_shape())


@dataclasses.dataclass(frozen=True, slots=True)
class _OutOfStep:
    """Dimensions that hold the same elements and have no factor in common.

    Part ``i`` of the major dimension of either side is a stretch of these elements, laid end to end.

    Attributes:
        factor: of the major dimension, on both sides.
        begin, end: the dimensions of the operand.
        n, m: sizes of the major dimension of operand and result.
        total: elements.
    """

    factor: int
    begin: int
    end: int
    n: int
    m: int
    total: int

    def window(self, parts: int) -> Window:
        """The stretch of the operand's elements that makes each part of the result."""
        stretch = -(-self.m // parts) * (self.total // self.m)
        return Window(self.total, 0, stretch, parts, stretch, inside=True)


def _line_up(
    make: RuleMaker, source: tuple[int, ...], target: tuple[int, ...], *, may_communicate: bool
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[_OutOfStep]]:
    """Walks both shapes from the major side and gives what they have in common a shared factor.

    The part of each side not yet given out always has the same number of elements, so the greatest common divisor
    of the two current dimensions is a factor of both. When it is 1 the two sides are out of step: each takes a whole
    factor of its own until their products agree again, except for two entire dimensions that begin it.
    """
    operand: list[tuple[int, ...]] = [() for _ in source]
    result: list[tuple[int, ...]] = [() for _ in target]
    misaligned: list[_OutOfStep] = []
    i = j = 0
    left, right = 1, 1  # what remains of the current dimensions
    while True:
        while left == 1 and i < len(source):
            left, i = source[i], i + 1
        while right == 1 and j < len(target):
            right, j = target[j], j + 1
        if left == right == 1:
            return operand, result, misaligned
        common = math.gcd(left, right)
        if common > 1:
            shared = make.factor(common)
            operand[i - 1] += shared
            result[j - 1] += shared
            left, right = left // common, right // common
            continue
        # Out of step: take factors on both sides until their products agree.
        begin, n, m = i - 1, left, right
        entire = may_communicate and not operand[i - 1] and not result[j - 1]
        if entire:
            operand[i - 1] = result[j - 1] = make.communicate(max(left, right))
        else:
            operand[i - 1] += make.replicate(left)
            result[j - 1] += make.replicate(right)
        a, b = left, right
        while a != b:
            if a < b:
                a *= source[i]
                operand[i] += make.replicate(source[i]) if source[i] > 1 else ()
                i += 1
            else:
                b *= target[j]
                result[j] += make.replicate(target[j]) if target[j] > 1 else ()
                j += 1
        if entire:
            misaligned.append(_OutOfStep(operand[begin][0], begin, i, n, m, a))
        left = right = 1


@rule("stack")
def stack(call: Call) -> Rule:
    """The new dimension is replicated, the others are parallel."""
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    result = list(dims)
    result.insert(call.params["axis"], make.replicate(len(call.in_shapes)))
    return make.rule([dims for _ in call.in_shapes], [result], linear=moves(*range(len(call.in_shapes))))


@rule("unstack")
def unstack(call: Call) -> Rule:
    """The dimension that is taken apart is replicated, the others are parallel."""
    make = RuleMaker()
    axis = call.params["axis"]
    operand = [make.replicate(n) if d == axis else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    result = [dim for d, dim in enumerate(operand) if d != axis]
    return make.rule([operand], [result for _ in call.out_shapes], linear=moves(0))


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

    result = [c + d for c, d in zip(copies, operand, strict=True)]
    return make.rule([operand], [result], local=local, linear=moves(0))


@rule("bitcast_convert_type")
def bitcast_convert_type(call: Call) -> Rule:
    """Elements are re-read in place; a dimension that appears or vanishes at the end (other width) is replicated."""
    make = RuleMaker()
    operand, result = call.in_shapes[0], call.out_shapes[0]
    dims = make.parallel(operand if len(operand) <= len(result) else result)
    return make.rule(
        [[*dims, *(make.replicate(n) for n in operand[len(dims) :])]],
        [[*dims, *(make.replicate(n) for n in result[len(dims) :])]],
        linear=[("pick", (0,))],
    )
