"""Reductions: sums, maxima and their kin, positions of extremes, running sums."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards, along, identity, mask, rest_bytes
from gshard.core.mesh import Mesh
from gshard.core.program import itemsize
from gshard.core.rule import EXCHANGE, REDUCE, WHOLE, Rule, RuleMaker
from gshard.core.split import Split
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
    kind = WHOLE if call.is_complex and monoid in ("max", "min") else REDUCE
    dims = [make.factor(n, kind, monoid) if d in axes else make.factor(n) for d, n in enumerate(call.in_shapes[0])]
    return make.rule([dims], [[dim for d, dim in enumerate(dims) if d not in axes]])


@rule("argmax", "argmin")
def arg_reduction(call: Call) -> Rule:
    """Every shard offers its own extreme with its position; the best of them wins, the first among equals.

    >>> print(arg_reduction(Call("argmax", {"axes": (1,), "index_dtype": "i4"}, ((4, 6),), ((4,),), ("f4",))))
    a b -> a; exchange b
    """
    (axis,) = call.params["axes"]
    (shape,) = call.in_shapes
    make = RuleMaker()
    dims = [make.exchange(n) if d == axis else make.factor(n) for d, n in enumerate(shape)]
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
        return (parts - 1) * rest_bytes(shape, call.in_dtypes[0], axis, dims, split, mesh) * each // max(
            itemsize(call.in_dtypes[0]), 1
        )

    return make.rule([dims], [[dim for d, dim in enumerate(dims) if d != axis]], local=local, sends=sends)


_RUNNING = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min", "cumlogsumexp": "logaddexp"}


@rule(*_RUNNING)
def cumulative(call: Call) -> Rule:
    """Each shard runs by itself, and then continues where the shards before it ended: one number from each.

    >>> print(cumulative(Call("cumsum", {"axis": 1, "reverse": False}, ((4, 6),), ((4, 6),), ("f4",))))
    a b -> a b; exchange b
    """
    axis, reverse = call.params["axis"], call.params["reverse"]
    (shape,) = call.in_shapes
    monoid = _RUNNING[call.name]
    make = RuleMaker()
    kind = WHOLE if call.is_complex and monoid not in ("add", "mul") else EXCHANGE
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
        return [_TWO[monoid](_ALL[monoid](ends, axis), run)]

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(dims[axis][0], ()))
        return (parts - 1) * rest_bytes(shape, call.in_dtypes[0], axis, dims, split, mesh)

    return make.rule([dims], [dims], local=local, sends=sends)


def _start(monoid: str, dtype: Any) -> Any:
    return float("-inf") if monoid == "logaddexp" else identity(monoid, dtype)


_TWO: dict[str, Any] = {
    "add": lax.add,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
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
