"""Searches in a split sorted array: each device counts the elements that come before a number, and gshard adds counts.

JAX writes ``jnp.searchsorted`` as a loop of bisections, which looks up elements of an array that may be split. gshard
replaces a call that is exactly the one of JAX by one operator. The position of a number is the number of elements that
come before it, and each device counts those in its part.

An array in falling order is searched in reverse (``jnp.digitize`` searches in both orders). Each device reverses only
its part, because a reversal of the array would move it.

The array must be sorted. For other arrays JAX defines no result, and its methods differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import Shards, identity
from gshard.core.jax_adapter import shapes_of
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.language.function_primitive import function_primitive
from gshard.language.registry import Call, rule

_SIDES, _METHODS = ("left", "right"), ("scan", "scan_unrolled", "sort", "compare_all")


def _run(array: Any, numbers: Any, *, side: str, method: str, dtype: Any, falling: bool) -> Any:
    array = lax.rev(array, (0,)) if falling else array
    return jnp.searchsorted(array, numbers, side=side, method=method).astype(dtype)


def _shape(array: Any, numbers: Any, *, side: str, method: str, dtype: Any, falling: bool) -> Any:
    return jax.core.ShapedArray(numbers.shape, dtype)


search_p = function_primitive("searchsorted", _run, _shape)


@rule("searchsorted")
def searchsorted(call: Call) -> Rule:
    """The array is reduced by ``add``, the numbers are parallel.

    >>> params = {"side": "left", "method": "scan", "dtype": np.dtype("int32"), "falling": False}
    >>> print(searchsorted(Call("searchsorted", params, ((8,), (3, 2)), ((3, 2),), ("f4", "f4"))))
    a, b c -> b c; add over a=8
    """
    (n,), shape = call.in_shapes
    make = RuleMaker()
    array, numbers = make.factor(n, REDUCE, "add"), make.parallel(shape)

    def local(shards: Shards, x: Any, numbers: Any) -> list[Any]:
        size, atoms = x.shape[0], shards.atoms(array[0])
        if n % shards.mesh.count(atoms) == 0:
            return shards.bind(x, numbers)
        valid = jnp.clip(n - shards.offset(array), 0, size)
        is_valid = jnp.arange(size) < valid
        if call.params["falling"]:  # in reverse order padding comes first, and its count is subtracted
            least = jnp.asarray(identity("max", x.dtype), x.dtype)
            (count,) = shards.bind(jnp.where(is_valid, x, least), numbers)
            return [jnp.maximum(count - (size - valid).astype(count.dtype), 0)]
        # Padding comes last, also after elements that are equal to it.
        greatest = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else np.iinfo(x.dtype).max
        (count,) = shards.bind(jnp.where(is_valid, x, jnp.asarray(greatest, x.dtype)), numbers)
        return [jnp.minimum(count, valid.astype(count.dtype))]

    flops = math.prod(shape) * n.bit_length()
    return make.rule([[array], numbers], [numbers], local=local, flops=flops, masks_itself=True)


def sorted_search(params: Mapping[str, Any], in_avals: Sequence[Any]) -> Any:
    """The closed jaxpr that replaces a call of ``jnp.searchsorted``; None for other calls.

    Args:
        params: the parameters of the call.
        in_avals: the types of its operands.
    """
    if params.get("name") != "searchsorted" or len(in_avals) != 2:
        return None
    array, numbers = in_avals
    kinds = [getattr(x.dtype, "kind", "") for x in in_avals]
    if len(array.shape) != 1 or 0 in array.shape or array.dtype != numbers.dtype or not set(kinds) <= set("iuf"):
        return None
    arguments = shapes_of(in_avals)
    for side in _SIDES:
        for method in _METHODS:
            search = jax.make_jaxpr(functools.partial(jnp.searchsorted, side=side, method=method))(*arguments)
            calls = [e for e in search.eqns if e.params.get("name") == "searchsorted"]
            if len(calls) == 1 and str(calls[0].params["jaxpr"]) == str(params["jaxpr"]):
                (out,) = calls[0].outvars
                bind = functools.partial(search_p.bind, side=side, method=method, dtype=out.aval.dtype, falling=False)
                return jax.make_jaxpr(bind)(*arguments)
    return None
