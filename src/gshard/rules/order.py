"""Sorting and the k largest, along dimensions that may be split."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.comm.shards import Shards, identity, mask, rest_bytes
from gshard.comm.sorting import are_twins, sort_split, ways
from gshard.core.mesh import Mesh
from gshard.core.program import itemsize
from gshard.core.rule import Rule, RuleMaker
from gshard.core.split import Split
from gshard.rules.registry import Call, rule


@rule("sort")
def sort(call: Call) -> Rule:
    """The ordered dimension exchanges: gathered, moved crosswise or as columns, whichever sends least (comm.sorting).

    >>> print(sort(Call("sort", {"dimension": 1, "num_keys": 1}, ((4, 6), (4, 6)), ((4, 6), (4, 6)), ("f", "i"))))
    a b, a b -> a b, a b; exchange b

    Sorting on shards is stable whether or not that was asked for.
    """
    axis, num_keys = call.params["dimension"], call.params["num_keys"]
    shape = call.in_shapes[0]
    make = RuleMaker()
    on_keys = any(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) for dtype in call.in_dtypes)
    ordered = make.whole if on_keys else make.exchange
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
    a b -> a c, a c; exchange b; whole c
    """
    (shape,) = call.in_shapes
    axis, k = call.params.get("axis", -1) % len(shape), call.params["k"]
    make = RuleMaker()
    operand = [make.exchange(n) if d == axis else make.factor(n) for d, n in enumerate(shape)]
    found = make.whole(k)
    result = [found if d == axis else dim for d, dim in enumerate(operand)]

    def local(shards: Shards, x: Any) -> list[Any]:
        atoms = shards.atoms(operand[axis][0])
        if not atoms or not k:
            return shards.bind(x)
        if shape[axis] % shards.mesh.count(atoms):
            x = mask(x, axis, shape[axis], atoms, identity("max", x.dtype))
        values, places = shards.bind(x, k=min(k, x.shape[axis]))
        places = places + jnp.asarray(shards.offset(operand[axis]), places.dtype)
        values, places = shards.all_gather(values, axis, atoms), shards.all_gather(places, axis, atoms)
        best, at = shards.bind(values)
        return [best, jnp.take_along_axis(places, at, axis)]

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(operand[axis][0], ()))
        offered = min(k, -(-shape[axis] // parts)) * (parts - 1)
        rest = rest_bytes(shape, call.in_dtypes[0], axis, operand, split, mesh)
        return offered * (rest + rest // itemsize(call.in_dtypes[0]) * 4)

    return make.rule([operand], [result for _ in call.out_shapes], local=local, sends=sends)
