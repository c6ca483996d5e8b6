"""Reductions: sums, maxima and their kin, by any computation, positions of extremes, running sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import Shards, along, identity, mask, rest_bytes
from gshard.core.mesh import Mesh
from gshard.core.program import Equation, itemsize
from gshard.core.rule import COMMUNICATE, REDUCE, REPLICATE, Rule, RuleMaker
from gshard.core.split import Split
from gshard.core.xla_workarounds import with_initial
from gshard.language.computation import monoid_of, skipping
from gshard.language.merged_dims import Maker, emit
from gshard.language.passing import combined, if_finite
from gshard.language.registry import Call, rule
from gshard.language.traits import set_traits

_MONOIDS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}
# Called as functions: from JAX 0.12 on these primitives need a parameter inside `shard_map` that they can do without
# elsewhere.
_EXTREMES = {"reduce_max": lax.reduce_max, "reduce_min": lax.reduce_min}


def _merged(a: Maker, e: Equation) -> bool:
    own, axes = a.either(e.inputs[0]), e.params["axes"]
    if len(e.inputs) > 1 or (e.name not in _MONOIDS and any(len(own.groups[d]) > 1 for d in axes)):
        return False
    groups = tuple(g for d, g in enumerate(own.groups) if d not in axes)
    return emit(a, e, (own.array,), groups, axes=own.all_dims(axes))


@rule(*_MONOIDS, merged=_merged)
def reduction(call: Call) -> Rule:
    """Reduced dimensions combine by the primitive's monoid; the others are parallel.

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

    def local(shards: Shards, x: Any) -> list[Any]:
        return [function(x, call.params["axes"])] if function else shards.bind(x)

    linear = combined(monoid, call.in_dtypes[0], 0)
    picked = [("pick", (0,))] if linear and monoid == "add" else []
    finite = if_finite(call.in_dtypes[0], (0,)) if monoid == "add" else []
    return make.rule(
        [dims], [result], local=local if function else None, linear=[*linear, *picked], finite=finite, sums=True
    )


@rule("reduce")
def any_reduction(call: Call) -> Rule:
    """By a monoid as the reductions above; by any other computation each shard folds its own, then all fold the parts.

    >>> import jax
    >>> params = {"dimensions": (1,), "jaxpr": jax.make_jaxpr(lambda x, y: x * y)(1.0, 1.0)}
    >>> print(any_reduction(Call("reduce", params, ((4, 6), ()), ((4,),), ("f4", "f4"))))
    a b, () -> a; mul over b=6

    The initial values count once, whether or not they are identities. A computation that is no known monoid may depend
    on the order, so only the outermost reduced dimension is split then: its parts, in order, are the elements in order.
    """
    reduced, jaxpr = call.params["dimensions"], call.params["jaxpr"]
    count = len(call.in_shapes) // 2
    shape, axis = call.in_shapes[0], min(reduced, default=-1)
    monoid = monoid_of(jaxpr) if count == 1 else None
    make = RuleMaker()

    def dimension(d: int, n: int) -> tuple[int, ...]:
        if d not in reduced:
            return make.factor(n)
        return make.factor(n, REDUCE, monoid) if monoid else make.communicate(n) if d == axis else make.replicate(n)

    dims = [dimension(d, n) for d, n in enumerate(shape)]
    left = [dim for d, dim in enumerate(dims) if d not in reduced]

    def local_monoid(shards: Shards, x: Any, init: Any) -> list[Any]:
        atoms = shards.reduced_atoms()
        if not atoms:
            return shards.bind(x, init)
        (part,) = shards.bind(x, jnp.asarray(identity(monoid or "", x.dtype), x.dtype))
        return [with_initial(part, init, COMBINE[monoid or ""], shards.is_first(atoms))]

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        atoms = shards.atoms(dims[axis][0]) if reduced else ()
        if not atoms:
            return shards.bind(*arrays)
        xs, inits = arrays[:count], arrays[count:]
        size, n = xs[0].shape[axis], shape[axis]
        valid = lax.axis_index(atoms) * size + lax.broadcasted_iota(jnp.int32, xs[0].shape, axis) < n
        folded = _fold_valid(valid, xs, inits, jaxpr, tuple(reduced))
        used = -(-n // size) if size else 0
        parts = [shards.all_gather(jnp.expand_dims(x, 0), 0, atoms)[:used] for x in folded]
        # The initial values are elements like the others, before them: see ``with_initial``.
        parts = [jnp.concatenate([jnp.broadcast_to(init, (1, *x.shape[1:])), x]) for x, init in zip(parts, inits)]
        return _fold_valid(jnp.ones(parts[0].shape, jnp.bool_), parts, inits, jaxpr, (0,))

    def sends(mesh: Mesh, split: Split) -> int:
        sizes = [-(-n // mesh.count(split.get(dim[0], ()))) for d, (n, dim) in enumerate(zip(shape, dims))
                 if d not in reduced]  # fmt: skip
        each = sum(itemsize(dtype) for dtype in call.in_dtypes[:count])
        return (mesh.count(split.get(dims[axis][0], ())) - 1) * math.prod(sizes) * each

    operands = [*([dims] * count), *([[]] * count)]
    if monoid or not reduced:
        return make.rule(operands, [left] * count, local=local_monoid if monoid else None)
    return make.rule(operands, [left] * count, local=local, sends=sends)


def _fold_valid(valid: Any, xs: Sequence[Any], inits: Sequence[Any], jaxpr: Any, axes: tuple[int, ...]) -> list[Any]:
    """Folds the elements that are valid; where none is, the initial values come out."""
    return list(lax.reduce((valid, *xs), (np.False_, *inits), skipping(jaxpr), axes)[1:])


set_traits(*_EXTREMES, same_on_parts=True)


@rule("argmax", "argmin", same_on_parts=True, merged=_merged)
def arg_reduction(call: Call) -> Rule:
    """Every shard offers its own extreme with its position; the best of them wins, the first among equals.

    >>> print(arg_reduction(Call("argmax", {"axes": (1,), "index_dtype": "i4"}, ((4, 6),), ((4,),), ("f4",))))
    a b -> a; communicate b
    """
    (axis,) = call.params["axes"]
    (shape,) = call.in_shapes
    make = RuleMaker()
    dims = [make.communicate(n) if d == axis else make.factor(n) for d, n in enumerate(shape)]
    worst = "max" if call.name == "argmax" else "min"

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = shards.atoms(dims[axis][0])
        if not atoms:
            return shards.bind(x)
        if shape[axis] % shards.mesh.count(atoms):
            x = mask(x, axis, shape[axis], atoms, identity(worst, x.dtype))
        (at,) = shards.bind(x)
        at = jnp.expand_dims(at, axis)
        best = jnp.take_along_axis(x, at, axis)
        places = shards.all_gather(at + jnp.asarray(shards.offset(dims[axis]), at.dtype), axis, atoms)
        (winner,) = shards.bind(shards.all_gather(best, axis, atoms))
        return [jnp.squeeze(jnp.take_along_axis(places, jnp.expand_dims(winner, axis), axis), axis)]

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(dims[axis][0], ()))
        each = itemsize(call.in_dtypes[0]) + itemsize(call.params["index_dtype"])
        return (
            (parts - 1)
            * rest_bytes(shape, call.in_dtypes[0], axis, dims, split, mesh)
            * each
            // max(itemsize(call.in_dtypes[0]), 1)
        )

    return make.rule([dims], [[dim for d, dim in enumerate(dims) if d != axis]], local=local, sends=sends)


_RUNNING = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min", "cumlogsumexp": "logaddexp"}


def _running_merged(a: Maker, e: Equation) -> bool:
    own, axis = a.either(e.inputs[0]), e.params["axis"]
    return len(own.groups[axis]) == 1 and emit(a, e, (own.array,), own.groups, axis=own.dims(axis)[0])


@rule(*_RUNNING, same_on_parts=True, merged=_running_merged)
def cumulative(call: Call) -> Rule:
    """Each shard runs by itself, and then continues where the shards before it ended: one number from each.

    >>> print(cumulative(Call("cumsum", {"axis": 1, "reverse": False}, ((4, 6),), ((4, 6),), ("f4",))))
    a b -> a b; communicate b
    """
    axis, reverse = call.params["axis"], call.params["reverse"]
    (shape,) = call.in_shapes
    monoid = _RUNNING[call.name]
    make = RuleMaker()
    kind = REPLICATE if call.is_complex and monoid not in ("add", "mul") else COMMUNICATE
    dims = [make.factor(n, kind) if d == axis else make.factor(n) for d, n in enumerate(shape)]

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = shards.atoms(dims[axis][0])
        if not atoms or not x.size:
            return shards.bind(x)
        start = _start(monoid, x.dtype)
        if shape[axis] % shards.mesh.count(atoms):
            x = mask(x, axis, shape[axis], atoms, start)
        (run,) = shards.bind(x)
        end = lax.slice_in_dim(run, 0, 1, axis=axis) if reverse else lax.slice_in_dim(run, -1, None, axis=axis)
        ends = shards.all_gather(end, axis, atoms)
        part, parts = lax.axis_index(atoms), jnp.arange(ends.shape[axis])
        before = parts > part if reverse else parts < part
        ends = jnp.where(along(before, axis, x.ndim), ends, jnp.asarray(start, x.dtype))
        return [COMBINE[monoid](_ALL[monoid](ends, axis), run)]

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(dims[axis][0], ()))
        return (parts - 1) * rest_bytes(shape, call.in_dtypes[0], axis, dims, split, mesh)

    linear = [] if monoid == "logaddexp" else combined(monoid, call.in_dtypes[0], 0)
    finite = if_finite(call.in_dtypes[0], (0,)) if monoid == "add" else []
    return make.rule([dims], [dims], local=local, sends=sends, linear=linear, finite=finite)


def _start(monoid: str, dtype: Any) -> Any:
    return float("-inf") if monoid == "logaddexp" else identity(monoid, dtype)


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
_ALL: dict[str, Any] = {
    "add": lambda x, axis: jnp.sum(x, axis, keepdims=True, dtype=x.dtype),
    "mul": lambda x, axis: jnp.prod(x, axis, keepdims=True, dtype=x.dtype),
    "max": lambda x, axis: jnp.max(x, axis, keepdims=True),
    "min": lambda x, axis: jnp.min(x, axis, keepdims=True),
    "logaddexp": lambda x, axis: lax.cumlogsumexp(x, axis=axis)[
        tuple(slice(-1, None) if d == axis else slice(None) for d in range(x.ndim))
    ],
}
