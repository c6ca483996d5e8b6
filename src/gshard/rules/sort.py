"""Sorting and the k largest, along dimensions that may be split."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import Shards, identity, mask, rest_bytes
from gshard.comm.sorting import are_twins, sort_split, ways
from gshard.core.mesh import Mesh
from gshard.core.program import itemsize
from gshard.core.rule import Rule, RuleMaker
from gshard.core.split import Split
from gshard.language.registry import Call, rule


@rule("sort", same_on_parts=True)
def sort(call: Call) -> Rule:
    """The ordered dimension exchanges: gathered, moved crosswise or as columns, whichever sends least (comm.sorting).

    >>> print(sort(Call("sort", {"dimension": 1, "num_keys": 1}, ((4, 6), (4, 6)), ((4, 6), (4, 6)), ("f", "i"))))
    a b, a b -> a b, a b; communicate b

    Sorting on shards is stable whether or not that was asked for.
    """
    axis, num_keys = call.params["dimension"], call.params["num_keys"]
    shape = call.in_shapes[0]
    make = RuleMaker()
    on_keys = any(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) for dtype in call.in_dtypes)
    ordered = make.replicate if on_keys else make.communicate
    dims = [ordered(n) if d == axis else make.factor(n) for d, n in enumerate(shape)]

    def local(shards: Shards, *operands: Any) -> list[Any]:
        atoms = shards.atoms(dims[axis][0])
        if not atoms or not operands[0].size:
            return shards.bind(*operands)
        return sort_split(shards, operands, axis, shape[axis], num_keys, atoms)

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(dims[axis][0], ()))
        others = rest_bytes(shape, np.int8, axis, dims, split, mesh)
        if parts == 1 or not shape[axis] * others:
            return 0
        sizes = [itemsize(dtype) for dtype in call.in_dtypes]
        return min(ways(shape[axis], parts, others, sizes, num_keys, are_twins(call.in_dtypes, num_keys)).values())

    rounds = max(shape[axis], 1).bit_length()
    flops = math.prod(shape) * rounds
    operands = [dims for _ in call.in_shapes]
    return make.rule(operands, operands, local=local, sends=None if on_keys else sends, flops=flops)


@rule("top_k")
def top_k(call: Call) -> Rule:
    """Every shard offers its own k largest with their positions; the k largest of those win.

    >>> print(top_k(Call("top_k", {"k": 2, "operand": None}, ((4, 6),), ((4, 2), (4, 2)), ("f4",))))
    a b -> a c, a c; communicate b; replicate c
    """
    (shape,) = call.in_shapes
    axis, k = call.params.get("axis", -1) % len(shape), call.params["k"]
    make = RuleMaker()
    operand = [make.communicate(n) if d == axis else make.factor(n) for d, n in enumerate(shape)]
    found = make.replicate(k)
    result = [found if d == axis else dim for d, dim in enumerate(operand)]

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = shards.atoms(operand[axis][0])
        if not atoms or not k:
            return shards.bind(x)
        if shape[axis] % shards.mesh.count(atoms):
            # Last of all stand the NaN that are negative, and equals in the order of their places: padding after them.
            inexact = jnp.issubdtype(x.dtype, jnp.inexact)
            x = mask(x, axis, shape[axis], atoms, -np.nan if inexact else identity("max", x.dtype))
        values, places = shards.bind(x, k=min(k, x.shape[axis]))
        places = places + jnp.asarray(shards.offset(operand[axis]), places.dtype)
        values = shards.all_gather(values, axis, atoms)
        best, at = shards.bind(values)
        if 1 in shards.unread:
            return [best, at]
        places = shards.all_gather(places, axis, atoms)
        return [best, jnp.take_along_axis(places, at, axis)]

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(operand[axis][0], ()))
        offered = min(k, -(-shape[axis] // parts)) * (parts - 1)
        rest = rest_bytes(shape, call.in_dtypes[0], axis, operand, split, mesh)
        return offered * (rest + rest // itemsize(call.in_dtypes[0]) * 4)

    return make.rule([operand], [result for _ in call.out_shapes], local=local, sends=sends)


@rule("approx_top_k")
def approx_top_k(call: Call) -> Rule:
    """Every shard offers its own k best, found with the recall that the whole asks for; the best of those win.

    >>> params = {"k": 2, "reduction_dimension": -1, "aggregate_to_topk": True, "is_max_k": True}
    >>> print(approx_top_k(Call("approx_top_k", params, ((4, 6),), ((4, 2), (4, 2)), ("f4",))))
    a b -> a c, a c; communicate b; replicate c

    The values have at least the recall that was asked for, and are exact where the operator itself is (on CPU). The
    operator does not say which of equal values it takes, nor where NaNs are; here their places are valid and distinct,
    and NaNs are the best. A result that is not brought down to k elements has a size that belongs to the whole
    dimension, which is then not split.
    """
    (shape,), p = call.in_shapes, call.params
    axis, k = p["reduction_dimension"] % len(shape), p["k"]
    make = RuleMaker()
    reduced = make.communicate if p["aggregate_to_topk"] else make.replicate
    operand = [reduced(n) if d == axis else make.factor(n) for d, n in enumerate(shape)]
    found = make.replicate(call.out_shapes[0][axis])
    result = [found if d == axis else dim for d, dim in enumerate(operand)]

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = shards.atoms(operand[axis][0])
        if not atoms:
            return shards.bind(x)
        size, n = x.shape[axis], shape[axis]
        some, start = min(k, size), lax.axis_index(atoms) * size
        if n % shards.mesh.count(atoms):
            places = start + lax.broadcasted_iota(jnp.int32, x.shape, axis)
            values, places = _best(x, places, places >= n, axis, some, p["is_max_k"])
        else:
            override = p["reduction_input_size_override"]
            values, places = shards.bind(x, k=some, reduction_input_size_override=override if override > 0 else n)
            places = places + start
        values, places = shards.all_gather(values, axis, atoms), shards.all_gather(places, axis, atoms)
        return _best(values, places, places >= n, axis, k, p["is_max_k"])

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(operand[axis][0], ()))
        others = rest_bytes(shape, np.int8, axis, operand, split, mesh)
        return (parts - 1) * min(k, -(-shape[axis] // parts)) * others * (itemsize(call.in_dtypes[0]) + 4)

    results = [result for _ in call.out_shapes]
    if not p["aggregate_to_topk"]:
        return make.rule([operand], results)
    return make.rule([operand], results, local=local, sends=sends)


def _best(values: Any, places: Any, padding: Any, axis: int, k: int, most: bool) -> list[Any]:
    """The k best of values with their places, padding after everything else; of equal values the first."""
    key = -values if most else values
    operands = (padding, ~jnp.isnan(values), key, values, places)
    _, _, _, values, places = lax.sort(operands, dimension=axis, is_stable=True, num_keys=3)
    return [lax.slice_in_dim(x, 0, k, axis=axis) for x in (values, places)]
