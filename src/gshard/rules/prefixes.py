"""Computes ``lax.associative_scan`` in one equation, so that each device scans its own part.

JAX writes an associative scan as a recursion, whose levels have other parts. As one equation
(``rewrite.match_associative_scan``) each device scans its part, then combines the last elements of the parts before its
own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards
from gshard.core.program import Equation, Value
from gshard.core.rule import Rule, RuleMaker
from gshard.language.function_primitive import function_primitive
from gshard.language.region import Interpreter, value_of
from gshard.language.registry import Call, rule
from gshard.rules.along_axis import AlongAxis

_FEW = 16  # the largest number of parts that are combined one after the other


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class Combination:
    """An associative function of two elements. An element consists of one number of each of several arrays."""

    equations: tuple[Equation, ...]  # elementwise equations, on arrays of any shape and on scalars
    left: tuple[Value, ...]  # left, right: the values of the two elements, one for each array
    right: tuple[Value, ...]
    results: tuple[Value, ...]  # the values of the result

    def __repr__(self) -> str:
        return f"Combination({' '.join(e.name for e in self.equations)})"

    def __call__(self, left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        """Combines two lists of arrays, all of the same shape."""
        env: dict[Any, Any] = dict(zip((*self.left, *self.right), (*left, *right), strict=True))
        _InShape(left[0].shape).evaluate(self.equations, env)
        return [value_of(x, env) for x in self.results]


@dataclasses.dataclass(frozen=True)
class _InShape(Interpreter):
    """Runs elementwise equations on arrays of another shape than they were traced with."""

    shape: tuple[int, ...]

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs one equation. Scalars are broadcast to the shape."""
        if e.name == "broadcast_in_dim":
            return [jnp.broadcast_to(jnp.asarray(inputs[0], e.outputs[0].dtype), self.shape)]
        return super().equation(e, inputs)


def _run(*xs: Any, combination: Combination, axis: int) -> Any:
    return lax.associative_scan(combination, list(xs), axis=axis)


def _shapes(*xs: Any, combination: Combination, axis: int) -> Any:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in xs]


associative_scan_p = function_primitive("associative_scan", _run, _shapes, multiple_results=True, dimension="axis")


def _before(ends: Sequence[Any], part: Any, axis: int, combine: Combination, shards: Shards) -> list[Any]:
    """The combination of the last elements of all parts before one part; undefined for the first part.

    Few parts are combined one after the other: a compiler makes one kernel of this, but many kernels of the recursion.
    """
    parts = ends[0].shape[axis]
    if parts > _FEW:
        return [lax.dynamic_slice_in_dim(x, jnp.maximum(part - 1, 0), 1, axis) for x in shards.bind(*ends)]
    total, *others = ([lax.slice_in_dim(x, i, i + 1, axis=axis) for x in ends] for i in range(max(1, parts - 1)))
    for i, end in enumerate(others, 1):
        total = [jnp.where(i < part, with_end, x) for with_end, x in zip(combine(total, end), total, strict=True)]
    return total


@rule("associative_scan")
def associative_scan(call: Call) -> Rule:
    """All dimensions except the scanned one are parallel, because the combination is elementwise.

    >>> print(associative_scan(Call("associative_scan", {"axis": 0}, ((8, 3),) * 2, ((8, 3),) * 2, ("f4", "f4"))))
    a b, a b -> a b, a b; communicate a
    """
    axis, shape = call.params["axis"], call.in_shapes[0]
    make = RuleMaker()
    array = AlongAxis.of(make, shape, axis)

    def local(shards: Shards, *xs: Any) -> list[Any]:
        atoms, combine = array.atoms(shards), call.params["combination"]
        scanned = shards.bind(*xs)
        if not atoms or not xs[0].size:
            return scanned
        # Padding comes after all elements, so it does not affect them.
        ends = [shards.all_gather(lax.slice_in_dim(x, -1, None, axis=axis), axis, atoms) for x in scanned]
        part = lax.axis_index(atoms)
        before = _before(ends, part, axis, combine, shards)
        combined = combine([jnp.broadcast_to(x, xs[0].shape) for x in before], scanned)
        return [jnp.where(part > 0, with_before, x) for with_before, x in zip(combined, scanned, strict=True)]

    flops = 2 * math.prod(shape) * len(call.in_shapes)
    arrays = [array.dims for _ in call.in_shapes]
    return make.rule(arrays, arrays, local=local, sends=array.gather_bytes(call.in_dtypes), flops=flops)
