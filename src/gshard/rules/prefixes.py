"""Prefixes: ``lax.associative_scan`` as one equation; each device combines its own part.

It is written as a recursion over pairs of neighbours: slices of every second element, which are combined, scanned and
interleaved again, in as many levels as the number of elements can be halved. Split, each level has parts of its own.
As one equation (``rewrite.match_associative_scan`` finds it) it takes two steps: every device scans its part, and what
all before it come to, one element of each device, is combined with all of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gshard.comm.shards import Shards, rest_bytes
from gshard.core.mesh import Mesh
from gshard.core.program import Equation, Value, itemsize
from gshard.core.rule import Rule, RuleMaker
from gshard.core.split import Split
from gshard.language.interpret import Interpreter, value_of
from gshard.language.registry import Call, rule

_FEW = 16  # parts

associative_scan_p = Primitive("associative_scan")
associative_scan_p.multiple_results = True


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class Combination:
    """What two elements come to, element by element; an element consists of one number of each of several arrays.

    Attributes:
        equations: elementwise, on arrays of any shape and on numbers.
        left, right: the arrays that are combined.
        results: what they come to.
    """

    equations: tuple[Equation, ...]
    left: tuple[Value, ...]
    right: tuple[Value, ...]
    results: tuple[Value, ...]

    def __repr__(self) -> str:
        return f"Combination({' '.join(e.name for e in self.equations)})"

    def __call__(self, left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        """Combines arrays of one shape."""
        env: dict[Any, Any] = dict(zip((*self.left, *self.right), (*left, *right), strict=True))
        _InShape(left[0].shape).evaluate(self.equations, env)
        return [value_of(x, env) for x in self.results]


@dataclasses.dataclass(frozen=True)
class _InShape(Interpreter):
    """Runs elementwise equations on arrays of another shape than that which they were traced with."""

    shape: tuple[int, ...]

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs one equation; a number is broadcast to the shape."""
        if e.name == "broadcast_in_dim":
            return [jnp.broadcast_to(jnp.asarray(inputs[0], e.outputs[0].dtype), self.shape)]
        return super().equation(e, inputs)


@associative_scan_p.def_impl
def _run(*xs: Any, combination: Combination, axis: int) -> Any:
    return lax.associative_scan(combination, list(xs), axis=axis)


@associative_scan_p.def_abstract_eval
def _shapes(*xs: Any, combination: Combination, axis: int) -> Any:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in xs]


mlir.register_lowering(associative_scan_p, mlir.lower_fun(_run, multiple_results=True))


def _before(ends: Sequence[Any], part: Any, axis: int, combine: Combination, shards: Shards) -> list[Any]:
    """What the parts before one come to, of all parts' last elements; for the first part an unused value.

    Of few parts they are combined one after the other: a compiler makes one kernel of that, and many of a recursion.
    """
    parts = ends[0].shape[axis]
    if parts > _FEW:
        return [lax.dynamic_slice_in_dim(x, jnp.maximum(part - 1, 0), 1, axis) for x in shards.bind(*ends)]
    total, *others = ([lax.slice_in_dim(x, i, i + 1, axis=axis) for x in ends] for i in range(max(1, parts - 1)))
    for i, one in enumerate(others, 1):
        total = [jnp.where(i < part, more, x) for more, x in zip(combine(total, one), total, strict=True)]
    return total


@rule("associative_scan")
def associative_scan(call: Call) -> Rule:
    """All dimensions but the one along which is scanned are parallel: elements are combined number by number.

    >>> print(associative_scan(Call("associative_scan", {"axis": 0}, ((8, 3),) * 2, ((8, 3),) * 2, ("f4", "f4"))))
    a b, a b -> a b, a b; communicate a
    """
    axis, shape = call.params["axis"], call.in_shapes[0]
    make = RuleMaker()
    dims = [make.communicate(n) if d == axis else make.factor(n) for d, n in enumerate(shape)]

    def local(shards: Shards, *xs: Any) -> list[Any]:
        atoms, combine = shards.atoms(dims[axis][0]), call.params["combination"]
        run = shards.bind(*xs)
        if not atoms or not xs[0].size:
            return run
        # Padding comes after all that there is, and so makes no difference.
        ends = [shards.all_gather(lax.slice_in_dim(x, -1, None, axis=axis), axis, atoms) for x in run]
        part = lax.axis_index(atoms)
        before = _before(ends, part, axis, combine, shards)
        both = combine([jnp.broadcast_to(x, xs[0].shape) for x in before], run)
        return [jnp.where(part > 0, x, own) for x, own in zip(both, run, strict=True)]

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(dims[axis][0], ()))
        each = rest_bytes(shape, call.in_dtypes[0], axis, dims, split, mesh) // itemsize(call.in_dtypes[0])
        return (parts - 1) * each * sum(map(itemsize, call.in_dtypes))

    flops = 2 * math.prod(shape) * len(call.in_shapes)
    arrays = [dims for _ in call.in_shapes]
    return make.rule(arrays, arrays, local=local, sends=sends, flops=flops)
