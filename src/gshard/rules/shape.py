"""Primitives that only change the shape or move elements: broadcasts, transpositions, reshapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from gshard.comm.route import Route
from gshard.comm.shards import Shards, mask
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Equation, itemsize
from gshard.core.rule import Index, Rule, RuleMaker, Span, Split, moves, place
from gshard.language.registry import Call, rule
from gshard.language.traits import Fine, Maker, emit, flat

Dim = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AlongAxis:
    """An array, and the dimension along which an operator works."""

    shape: tuple[int, ...]  # the shape of the array
    axis: int  # the number of the dimension
    dims: list[Dim]  # the factors of all dimensions

    @staticmethod
    def of(make: RuleMaker, shape: Sequence[int], axis: int, create: Callable[[int], Dim] | None = None) -> AlongAxis:
        """An array with new factors; ``create(size)`` creates the factor of the axis (by default it communicates)."""
        create = create or make.communicate
        dims = [create(n) if d == axis else make.factor(n) for d, n in enumerate(shape)]
        return AlongAxis(tuple(shape), axis, dims)

    @property
    def dim(self) -> Dim:
        """The factor of the dimension."""
        return self.dims[self.axis]

    @property
    def other_dims(self) -> list[Dim]:
        """The factors of all other dimensions."""
        return [dim for d, dim in enumerate(self.dims) if d != self.axis]

    def replaced(self, dim: Dim) -> list[Dim]:
        """The factors with another factor in place of the dimension's."""
        return [dim if d == self.axis else other for d, other in enumerate(self.dims)]

    def atoms(self, shards: Shards) -> Atoms:
        """The atoms over which the dimension is split."""
        return shards.atoms(self.dim[0])

    def route_bytes(self, dtype: Any, route: Callable[[int], Route]) -> Callable[[Mesh, Split], int]:
        """The value of ``sends`` for a rule that sends chunks along the dimension; ``route(parts)`` is their route."""

        def sends(mesh: Mesh, split: Split) -> int:
            parts = [mesh.count(atoms) for atoms in place(tuple(self.dims), split)]
            if parts[self.axis] == 1:
                return 0
            others = math.prod(-(-n // p) for d, (n, p) in enumerate(zip(self.shape, parts)) if d != self.axis)
            return others * itemsize(dtype) * sum(route(parts[self.axis]).messages)

        return sends

    def fill_padding(self, shards: Shards, x: Any, fill: Any) -> Any:
        """One device's part with ``fill`` in place of its padding."""
        size, atoms = self.shape[self.axis], self.atoms(shards)
        return mask(x, self.axis, size, atoms, fill) if size % shards.mesh.count(atoms) else x


# Moves elements as the index of a rule describes (``Rule.index``), on NumPy arrays.


def index_of(e: Equation) -> tuple[Index, ...] | None:
    """For each result the spans of the operands that it consists of; None if elements do not just move in order."""
    return None if e.rule is None else e.rule.index


def one_array(e: Equation) -> list[list[Span]]:
    """For each result of an equation that only cuts its operand, and for each dimension, the span that is kept."""
    shape = e.inputs[0].shape
    return [
        [spans[0] if spans else Span(0, 0, n) for spans, n in zip(index, shape, strict=True)]
        for index in index_of(e) or ()
    ]


def elements(index: Index, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The result that consists of these elements of the operands.

    >>> elements(((Span(1, 0, 1), Span(0, 0, 3)),), [np.arange(4), np.array(9)])
    array([9, 0, 1, 2])
    """
    first = next((i for i, x in enumerate(arrays) if x.ndim), 0)
    result = arrays[first]
    for d, spans in enumerate(index):
        parts = []
        for span in spans:
            x = result if span.operand == first else arrays[span.operand]
            if x.ndim:
                positions = span.start + span.step * np.arange(span.count)
                parts.append(np.take(x, positions, d))
            else:
                shape = [span.count if i == d else n for i, n in enumerate(result.shape)]
                parts.append(np.full(shape, x, result.dtype))
        result = np.concatenate(parts, d) if parts else result
    return result


def _broadcast_values(params: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    spread = [1] * len(shape)
    for d, n in zip(dims, x.shape, strict=True):
        spread[d] = n
    return np.broadcast_to(x.reshape(spread), shape)


def _broadcast_merged(a: Maker, e: Equation) -> bool:
    fine, dims, shape = a.either(e.inputs[0]), e.params["broadcast_dimensions"], e.params["shape"]
    groups: list[tuple[int, ...]] = [(n,) for n in shape]
    for d, group in zip(dims, fine.groups, strict=True):
        if math.prod(group) == shape[d]:
            groups[d] = group
        elif len(group) > 1:
            return False
    result = Fine(e.outputs[0], tuple(groups), frozenset())
    sizes = {"shape": flat(result.groups), "broadcast_dimensions": result.all_dims(dims)}
    return emit(a, e, (fine.array,), result.groups, **sizes)


@rule("broadcast_in_dim", shared=False, values=_broadcast_values, merged=_broadcast_merged)
def broadcast_in_dim(call: Call) -> Rule:
    """Operand dimensions keep their factors. New dimensions, and those broadcast from size 1, get new factors.

    >>> params = {"shape": (4, 3, 6), "broadcast_dimensions": (0, 2)}
    >>> print(broadcast_in_dim(Call("broadcast_in_dim", params, ((4, 1),), ((4, 3, 6),), ("f",))))
    a 1 -> a b c
    """
    make = RuleMaker()
    result = make.parallel(call.out_shapes[0])
    operand: list[tuple[int, ...]] = []
    for n, d in zip(call.in_shapes[0], call.params["broadcast_dimensions"], strict=True):
        operand.append(result[d] if n == call.out_shapes[0][d] else ())
    return make.rule(
        [operand], [result], local=lambda shards, x: shards.bind(x, shape=shards.out_shape()), linear=moves(0)
    )


def _transpose_merged(a: Maker, e: Equation) -> bool:
    fine, order = a.either(e.inputs[0]), e.params["permutation"]
    return emit(a, e, (fine.array,), tuple(fine.groups[d] for d in order), permutation=fine.all_dims(order))


@rule(
    "transpose", values=lambda params, x: x.transpose(params["permutation"]),
    merged=_transpose_merged,
)  # fmt: skip
def transpose(call: Call) -> Rule:
    """The dimensions of the operand in another order.

    >>> print(transpose(Call("transpose", {"permutation": (2, 0, 1)}, ((4, 5, 6),), ((6, 4, 5),), ("f",))))
    a b c -> c a b
    """
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    return make.rule([dims], [[dims[d] for d in call.params["permutation"]]], linear=moves(0))


def _squeeze_merged(a: Maker, e: Equation) -> bool:
    fine = a.either(e.inputs[0])
    dropped = _squeezed(e.inputs[0].shape, e.params)
    groups = tuple(group for d, group in enumerate(fine.groups) if d not in dropped)
    return emit(a, e, (fine.array,), groups, dimensions=fine.all_dims(sorted(dropped)))


def _squeezed(shape: tuple[int, ...], params: Mapping[str, Any]) -> set[int]:
    """The dropped dimensions; the parameter may count them from the end."""
    return {d % len(shape) for d in params["dimensions"]}


@rule(
    "squeeze", handed_on=True, values=lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    merged=_squeeze_merged,
)  # fmt: skip
def squeeze(call: Call) -> Rule:
    """Dropped dimensions have no factor. The others are parallel."""
    dropped = _squeezed(call.in_shapes[0], call.params)
    make = RuleMaker()
    dims = [() if d in dropped else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    return make.rule([dims], [[dim for d, dim in enumerate(dims) if d not in dropped]], linear=moves(0))


def _reshape_values(params: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    return (x if params["dimensions"] is None else x.transpose(params["dimensions"])).reshape(params["new_sizes"])


@rule("reshape", handed_on=True, values=_reshape_values)
def reshape(call: Call) -> Rule:
    """Merged and split dimensions share factors. Dimensions that do not align cannot be split.

    >>> def show(*shapes): print(reshape(Call("reshape", {"dimensions": None}, shapes[:1], shapes[1:], ("f",))))
    >>> show((6, 4), (24,))
    a b -> (a b)
    >>> show((6, 4), (4, 6))
    (a b) c -> (a d) e; replicate b c d e
    >>> show((8, 1, 3), (2, 4, 3))
    (a b) 1 c -> a b c
    >>> show((4, 9), (9, 4))
    a b -> c d; replicate a b c d
    """
    make = RuleMaker()
    order = call.params.get("dimensions") or range(len(call.in_shapes[0]))
    source, target = tuple(call.in_shapes[0][d] for d in order), call.out_shapes[0]
    if 0 in source:
        return make.rule(
            [[make.replicate(n) for n in source]],
            [[make.replicate(n) for n in target]],
            local=lambda shards, x: shards.bind(x, new_sizes=shards.out_shape()),
        )
    in_order, result = _align(make, source, target)
    operand = [in_order[list(order).index(d)] for d in range(len(source))]

    def local(shards: Shards, x: Any) -> list[Any]:
        x = x if call.params.get("dimensions") is None else lax.transpose(x, tuple(order))
        return shards.bind(x, new_sizes=shards.out_shape(), dimensions=None)

    return make.rule([operand], [result], local=local, linear=moves(0))


def _align(
    make: RuleMaker, source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Creates the factors of a reshape: walks both shapes from the major side, and shares common factors.

    The remaining parts of both shapes always have the same number of elements. So the greatest common divisor of the
    two current dimensions is a factor of both. If it is 1, the shapes do not align: both sides get factors that cannot
    be split until their products are equal again.
    """
    operand: list[tuple[int, ...]] = [() for _ in source]
    result: list[tuple[int, ...]] = [() for _ in target]
    i = j = 0
    left, right = 1, 1  # the remaining factors of the current dimensions, source[i - 1] and target[j - 1]
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
        operand[i - 1] += make.replicate(left)
        result[j - 1] += make.replicate(right)
        while left != right:
            if left < right:
                left *= source[i]
                operand[i] += make.replicate(source[i]) if source[i] > 1 else ()
                i += 1
            else:
                right *= target[j]
                result[j] += make.replicate(target[j]) if target[j] > 1 else ()
                j += 1
        left = right = 1


@rule("stack")
def stack(call: Call) -> Rule:
    """The new dimension cannot be split. The others are parallel."""
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    result = list(dims)
    result.insert(call.params["axis"], make.replicate(len(call.in_shapes)))
    return make.rule([dims for _ in call.in_shapes], [result], linear=moves(*range(len(call.in_shapes))))


@rule("unstack")
def unstack(call: Call) -> Rule:
    """The removed dimension cannot be split. The others are parallel."""
    make = RuleMaker()
    operand = AlongAxis.of(make, call.in_shapes[0], call.params["axis"], make.replicate)
    return make.rule([operand.dims], [operand.other_dims for _ in call.out_shapes], linear=moves(0))


@rule("tile")
def tile(call: Call) -> Rule:
    """Each dimension of the result is the product of the number of copies and the operand's dimension.

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


@rule("bitcast_convert_type", "random_wrap", "random_unwrap")
def reinterpreted(call: Call) -> Rule:
    """Elements stay in place. The last dimensions, the words of an element, cannot be split if only one array has them.

    >>> print(reinterpreted(Call("random_wrap", {}, ((4, 2),), ((4,),), ("u4",))))
    a b -> a; replicate b
    """
    make = RuleMaker()
    shapes = (call.in_shapes[0], call.out_shapes[0])
    dims = make.parallel(min(shapes, key=len))
    operand, result = ([*dims, *(make.replicate(n) for n in shape[len(dims) :])] for shape in shapes)
    linear = [("pick", (0,))] if call.name == "bitcast_convert_type" else []
    return make.rule([operand], [result], linear=linear)
