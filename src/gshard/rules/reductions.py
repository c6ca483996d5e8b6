"""Reductions: by monoids and by any computation, positions of extremes, and prefix sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import Shards, along, identity
from gshard.core.jax_adapter import called_jaxpr, closed
from gshard.core.program import Equation
from gshard.core.rule import REDUCE, REPLICATE, Rule, RuleMaker
from gshard.core.xla_workarounds import with_initial
from gshard.language.registry import Call, rule
from gshard.language.traits import Maker, combined, emit, if_finite, traits_of
from gshard.rules.shape import AlongAxis


def monoid_of(jaxpr: Any) -> str | None:
    """The monoid of a computation of two scalars, if it is a monoid with a known identity; otherwise None."""
    jaxpr = closed(jaxpr)[0]
    if len(jaxpr.invars) != 2 or len(jaxpr.eqns) != 1:
        return None
    (equation,) = jaxpr.eqns
    body = called_jaxpr(equation)
    in_order = list(equation.invars) in (list(jaxpr.invars), list(jaxpr.invars[::-1]))
    if not in_order or list(equation.outvars) != list(jaxpr.outvars):
        return None
    if body is not None:
        return monoid_of(body)
    dtype = jaxpr.invars[0].aval.dtype
    is_complex_order = equation.primitive.name in ("max", "min") and jnp.issubdtype(dtype, np.complexfloating)
    return None if is_complex_order else (traits_of(equation.primitive.name).monoid or None)


_MONOIDS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}
# gshard calls functions of JAX for these primitives: from JAX 0.12 on they need another parameter in a `shard_map`.
_EXTREMES = {"reduce_max": lax.reduce_max, "reduce_min": lax.reduce_min}


def _merged(a: Maker, e: Equation) -> bool:
    fine, axes = a.either(e.inputs[0]), e.params["axes"]
    if len(e.inputs) > 1 or (e.name not in _MONOIDS and any(len(fine.groups[d]) > 1 for d in axes)):
        return False
    groups = tuple(group for d, group in enumerate(fine.groups) if d not in axes)
    return emit(a, e, (fine.array,), groups, axes=fine.all_dims(axes))


@rule(*_MONOIDS, merged=_merged)
def reduction(call: Call) -> Rule:
    """Reduced dimensions are combined by the monoid of the primitive. The others are parallel.

    >>> print(reduction(Call("reduce_max", {"axes": (1,)}, ((4, 6),), ((4,),), ("f",))))
    a b -> a; max over b=6
    """
    axes = set(call.params["axes"])
    make = RuleMaker()
    monoid = _MONOIDS[call.name]
    kind = REPLICATE if call.is_complex and monoid in ("max", "min") else REDUCE
    dims = [make.factor(n, kind, monoid) if d in axes else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    result = [dim for d, dim in enumerate(dims) if d not in axes]
    function = _EXTREMES.get(call.name)
    local = (lambda shards, x: [function(x, call.params["axes"])]) if function else None
    linear = combined(monoid, call.in_dtypes[0], 0)
    picked = [("pick", (0,))] if linear and monoid == "add" else []
    finite = if_finite(call.in_dtypes[0], (0,)) if monoid == "add" else []
    return make.rule([dims], [result], local=local, linear=[*linear, *picked], finite=finite, sums=True)


@rule("reduce")
def any_reduction(call: Call) -> Rule:
    """A reduction by any computation. If it is not a monoid, the reduced dimensions cannot be split.

    >>> import jax
    >>> params = {"dimensions": (1,), "jaxpr": jax.make_jaxpr(lambda x, y: x * y)(1.0, 1.0)}
    >>> print(any_reduction(Call("reduce", params, ((4, 6), ()), ((4,),), ("f4", "f4"))))
    a b, () -> a; mul over b=6

    An initial value counts once, whether or not it is the identity.
    """
    reduced, shape, count = call.params["dimensions"], call.in_shapes[0], len(call.out_shapes)
    monoid = monoid_of(call.params["jaxpr"]) if count == 1 else None
    make = RuleMaker()
    kind = REDUCE if monoid else REPLICATE
    dims = [make.factor(n, kind, monoid) if d in reduced else make.factor(n) for d, n in enumerate(shape)]
    result = [dim for d, dim in enumerate(dims) if d not in reduced]

    def local(shards: Shards, x: Any, init: Any) -> list[Any]:
        atoms = shards.reduced_atoms()
        if not atoms:
            return shards.bind(x, init)
        (part,) = shards.bind(x, jnp.asarray(identity(monoid or "", x.dtype), x.dtype))
        return [with_initial(part, init, COMBINE[monoid or ""], shards.is_first(atoms))]

    return make.rule([*([dims] * count), *([[]] * count)], [result] * count, local=local if monoid else None)


@rule("argmax", "argmin", merged=_merged)
def arg_reduction(call: Call) -> Rule:
    """Each shard finds its extreme and its position. The best of these is the result, the first of several equal ones.

    >>> print(arg_reduction(Call("argmax", {"axes": (1,), "index_dtype": "i4"}, ((4, 6),), ((4,),), ("f4",))))
    a b -> a; communicate b
    """
    (axis,) = call.params["axes"]
    (shape,) = call.in_shapes
    make = RuleMaker()
    operand = AlongAxis.of(make, shape, axis)
    monoid = "max" if call.name == "argmax" else "min"

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = operand.atoms(shards)
        if not atoms:
            return shards.bind(x)
        x = operand.fill_padding(shards, x, identity(monoid, x.dtype))
        dtype = call.params["index_dtype"]
        places = lax.broadcasted_iota(dtype, x.shape, axis) + jnp.asarray(shards.offset(operand.dim), dtype)
        found = _first_extreme(x, places, axis, monoid)
        extremes, places = (shards.all_gather(own[None], 0, atoms) for own in found)
        return [_first_extreme(extremes, places, 0, monoid)[1]]

    return make.rule([operand.dims], [operand.other_dims], local=local)


def _first_extreme(x: Any, places: Any, axis: int, monoid: str) -> Sequence[Any]:
    """The maximum or minimum along a dimension and its place, in one pass and in JAX's order of elements."""

    def better(one: Any, other: Any) -> Any:
        (a, a_place), (b, b_place) = one, other
        wins = (a > b if monoid == "max" else a < b) | (a != a)
        is_first = wins | (a == b) & (a_place < b_place)
        return jnp.where(wins, a, b), jnp.where(is_first, a_place, b_place)

    last = np.array(jnp.iinfo(places.dtype).max, places.dtype)
    return lax.reduce((x, places), (np.array(identity(monoid, x.dtype), x.dtype), last), better, (axis,))


_CUMULATIVE = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min", "cumlogsumexp": "logaddexp"}


def _cumulative_merged(a: Maker, e: Equation) -> bool:
    fine, axis = a.either(e.inputs[0]), e.params["axis"]
    return len(fine.groups[axis]) == 1 and emit(a, e, (fine.array,), fine.groups, axis=fine.dims(axis)[0])


@rule(*_CUMULATIVE, merged=_cumulative_merged)
def cumulative(call: Call) -> Rule:
    """Each shard reduces its own elements, and then adds the last results of the shards before it.

    >>> print(cumulative(Call("cumsum", {"axis": 1, "reverse": False}, ((4, 6),), ((4, 6),), ("f4",))))
    a b -> a b; communicate b
    """
    axis, reverse = call.params["axis"], call.params["reverse"]
    (shape,) = call.in_shapes
    monoid = _CUMULATIVE[call.name]
    make = RuleMaker()
    has_no_order = call.is_complex and monoid not in ("add", "mul")
    array = AlongAxis.of(make, shape, axis, make.replicate if has_no_order else make.communicate)

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = array.atoms(shards)
        if not atoms or not x.size:
            return shards.bind(x)
        neutral = float("-inf") if monoid == "logaddexp" else identity(monoid, x.dtype)
        (within,) = shards.bind(array.fill_padding(shards, x, neutral))
        end = lax.slice_in_dim(within, 0, 1, axis=axis) if reverse else lax.slice_in_dim(within, -1, None, axis=axis)
        ends = shards.all_gather(end, axis, atoms)
        part, parts = lax.axis_index(atoms), jnp.arange(ends.shape[axis])
        is_before = parts > part if reverse else parts < part
        ends = jnp.where(along(is_before, axis, x.ndim), ends, jnp.asarray(neutral, x.dtype))
        return [COMBINE[monoid](_REDUCE[monoid](ends, axis), within)]

    linear = [] if monoid == "logaddexp" else combined(monoid, call.in_dtypes[0], 0)
    finite = if_finite(call.in_dtypes[0], (0,)) if monoid == "add" else []
    return make.rule([array.dims], [array.dims], local=local, linear=linear, finite=finite)


COMBINE: dict[str, Any] = {
    "add": lax.add,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "logaddexp": jnp.logaddexp,
}
_REDUCE: dict[str, Any] = {
    "add": lambda x, axis: jnp.sum(x, axis, keepdims=True, dtype=x.dtype),
    "mul": lambda x, axis: jnp.prod(x, axis, keepdims=True, dtype=x.dtype),
    "max": lambda x, axis: jnp.max(x, axis, keepdims=True),
    "min": lambda x, axis: jnp.min(x, axis, keepdims=True),
    "logaddexp": lambda x, axis: lax.cumlogsumexp(x, axis=axis)[
        tuple(slice(-1, None) if d == axis else slice(None) for d in range(x.ndim))
    ],
}
