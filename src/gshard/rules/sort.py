"""Sorting and the k largest elements, along dimensions that may be split."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import Shards, identity
from gshard.core.rule import Rule, RuleMaker
from gshard.language.registry import Call, rule
from gshard.rules.shape import AlongAxis


@rule("sort")
def sort(call: Call) -> Rule:
    """Shards gather the sorted dimension, and keep their parts of the result.

    >>> print(sort(Call("sort", {"dimension": 1, "num_keys": 1}, ((4, 6), (4, 6)), ((4, 6), (4, 6)), ("f", "i"))))
    a b, a b -> a b, a b; communicate b

    A sort of shards is always stable.
    """
    axis = call.params["dimension"]
    shape = call.in_shapes[0]
    make = RuleMaker()
    on_keys = any(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) for dtype in call.in_dtypes)
    array = AlongAxis.of(make, shape, axis, make.replicate if on_keys else make.communicate)

    def local(shards: Shards, *operands: Any) -> list[Any]:
        atoms, n, size = array.atoms(shards), shape[axis], operands[0].shape[axis]
        if not atoms or not operands[0].size:
            return shards.bind(*operands)
        whole = [shards.all_gather(x, axis, atoms) for x in operands]
        if missing := whole[0].shape[axis] - n:
            whole = [lax.slice_in_dim(x, 0, n, axis=axis) for x in whole]
        whole = shards.bind(*whole, is_stable=True)
        if missing:
            whole = [jnp.pad(x, [(0, missing if d == axis else 0) for d in range(x.ndim)]) for x in whole]
        return [lax.dynamic_slice_in_dim(x, shards.offset(array.dim), size, axis=axis) for x in whole]

    flops = math.prod(shape) * max(shape[axis], 1).bit_length()
    operands = [array.dims for _ in call.in_shapes]
    return make.rule(operands, operands, local=local, flops=flops)


@rule("top_k")
def top_k(call: Call) -> Rule:
    """Each shard finds its k largest elements and their positions. The k largest of these are the result.

    >>> print(top_k(Call("top_k", {"k": 2, "operand": None}, ((4, 6),), ((4, 2), (4, 2)), ("f4",))))
    a b -> a c, a c; communicate b; replicate c
    """
    (shape,) = call.in_shapes
    axis, k = call.params.get("axis", -1) % len(shape), call.params["k"]
    make = RuleMaker()
    operand = AlongAxis.of(make, shape, axis)
    result = operand.replaced(make.replicate(k))

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = operand.atoms(shards)
        if not atoms or not k:
            return shards.bind(x)
        # Negative NaN is the last in JAX's order. Equal elements keep the order of their positions, so padding is last.
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        x = operand.fill_padding(shards, x, -np.nan if is_inexact else identity("max", x.dtype))
        values, positions = shards.bind(x, k=min(k, x.shape[axis]))
        positions = positions + jnp.asarray(shards.offset(operand.dim), positions.dtype)
        best, candidates = shards.bind(shards.all_gather(values, axis, atoms))
        if 1 in shards.unread:
            return [best, candidates]
        positions = shards.all_gather(positions, axis, atoms)
        return [best, jnp.take_along_axis(positions, candidates, axis)]

    return make.rule([operand.dims], [result for _ in call.out_shapes], local=local)


@rule("approx_top_k")
def approx_top_k(call: Call) -> Rule:
    """Each shard finds its k best elements, with the recall of the whole. The best of these are the result.

    >>> params = {"k": 2, "reduction_dimension": -1, "aggregate_to_topk": True, "is_max_k": True}
    >>> print(approx_top_k(Call("approx_top_k", params, ((4, 6),), ((4, 2), (4, 2)), ("f4",))))
    a b -> a c, a c; communicate b; replicate c

    The values have at least the requested recall, and are exact where the operator is exact (on CPU). The operator does
    not define the order of equal values and of NaN. Here positions are valid and distinct, and NaN is the best value.
    The size of a result that is not reduced to k elements depends on the size of the whole dimension, so gshard does
    not split this dimension.
    """
    (shape,), p = call.in_shapes, call.params
    axis, k = p["reduction_dimension"] % len(shape), p["k"]
    make = RuleMaker()
    operand = AlongAxis.of(make, shape, axis, make.communicate if p["aggregate_to_topk"] else make.replicate)
    results = [operand.replaced(make.replicate(call.out_shapes[0][axis]))] * len(call.out_shapes)
    if not p["aggregate_to_topk"]:
        return make.rule([operand.dims], results)

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = operand.atoms(shards)
        if not atoms:
            return shards.bind(x)
        size, n = x.shape[axis], shape[axis]
        candidates = min(k, size)
        start = lax.axis_index(atoms) * size
        if n % shards.mesh.count(atoms):
            positions = start + lax.broadcasted_iota(jnp.int32, x.shape, axis)
            values, positions = _best(x, positions, positions >= n, axis, candidates, p["is_max_k"])
        else:
            override = p["reduction_input_size_override"]
            input_size = override if override > 0 else n
            values, positions = shards.bind(x, k=candidates, reduction_input_size_override=input_size)
            positions = positions + start
        values, positions = shards.all_gather(values, axis, atoms), shards.all_gather(positions, axis, atoms)
        return _best(values, positions, positions >= n, axis, k, p["is_max_k"])

    return make.rule([operand.dims], results, local=local)


def _best(values: Any, positions: Any, is_padding: Any, axis: int, k: int, largest: bool) -> list[Any]:
    """The k best values and their positions, in order; the first of equal values, and padding after all values."""
    key = -values if largest else values
    operands = (is_padding, ~jnp.isnan(values), key, values, positions)
    _, _, _, values, positions = lax.sort(operands, dimension=axis, is_stable=True, num_keys=3)
    return [lax.slice_in_dim(x, 0, k, axis=axis) for x in (values, positions)]
