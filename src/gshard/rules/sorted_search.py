"""Searching in a sorted array that is split: each device counts what comes before, and the counts are added up.

``jnp.searchsorted`` is written as a loop that halves what is left, and each round looks up an element of an array that
may be split. Where a call is exactly what JAX makes of it, it is one operator: the place of a number is how many
elements come before it, and of these each device counts its own.

One whose elements fall is searched from its other end (``jnp.digitize`` asks which way they go, and searches both
ways): each device counts its own part, turned around; turning around all of it would move it.

The array has to be sorted. Of one that is not, JAX says nothing: its methods differ, and so do ways to split it.
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
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gshard.comm.shards import Shards, identity
from gshard.core.jax_adapter import shapes_of
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.language.registry import Call, rule

_SIDES, _METHODS = ("left", "right"), ("scan", "scan_unrolled", "sort", "compare_all")

search_p = Primitive("searchsorted")


@search_p.def_impl
def _run(places: Any, numbers: Any, *, side: str, method: str, dtype: Any, falling: bool) -> Any:
    places = lax.rev(places, (0,)) if falling else places
    return jnp.searchsorted(places, numbers, side=side, method=method).astype(dtype)


@search_p.def_abstract_eval
def _shape(places: Any, numbers: Any, *, side: str, method: str, dtype: Any, falling: bool) -> Any:
    return jax.core.ShapedArray(numbers.shape, dtype)


mlir.register_lowering(search_p, mlir.lower_fun(_run, multiple_results=False))


@rule("searchsorted")
def searchsorted(call: Call) -> Rule:
    """
    >>> params = {"side": "left", "method": "scan", "dtype": np.dtype("int32"), "falling": False}
    >>> print(searchsorted(Call("searchsorted", params, ((8,), (3, 2)), ((3, 2),), ("f4", "f4"))))
    a, b c -> b c; add over a=8
    """
    (n,), shape = call.in_shapes
    make = RuleMaker()
    places, numbers = make.factor(n, REDUCE, "add"), make.parallel(shape)

    def local(shards: Shards, x: Any, numbers: Any) -> list[Any]:
        size, atoms = x.shape[0], shards.atoms(places[0])
        if n % shards.mesh.count(atoms) == 0:
            return shards.bind(x, numbers)
        valid = jnp.clip(n - shards.offset(places), 0, size)
        if call.params["falling"]:  # padding comes before everything, and is not counted
            least = jnp.asarray(identity("max", x.dtype), x.dtype)
            (found,) = shards.bind(jnp.where(jnp.arange(size) < valid, x, least), numbers)
            return [jnp.maximum(found - (size - valid).astype(found.dtype), 0)]
        # Padding comes after everything, also after elements that are equal to it.
        last = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else np.iinfo(x.dtype).max
        x = jnp.where(jnp.arange(size) < valid, x, jnp.asarray(last, x.dtype))
        (found,) = shards.bind(x, numbers)
        return [jnp.minimum(found, valid.astype(found.dtype))]

    flops = math.prod(shape) * n.bit_length()
    return make.rule([[places], numbers], [numbers], local=local, flops=flops, masks_itself=True)


def sorted_search(params: Mapping[str, Any], in_avals: Sequence[Any]) -> Any:
    """The closed jaxpr of a search for a call, if the call is one as JAX writes it."""
    if params.get("name") != "searchsorted" or len(in_avals) != 2:
        return None
    places, numbers = in_avals
    kinds = [getattr(x.dtype, "kind", "") for x in in_avals]
    if len(places.shape) != 1 or 0 in places.shape or places.dtype != numbers.dtype or not set(kinds) <= set("iuf"):
        return None
    arguments = shapes_of(in_avals)
    for side in _SIDES:
        for method in _METHODS:
            made = jax.make_jaxpr(functools.partial(jnp.searchsorted, side=side, method=method))(*arguments)
            calls = [e for e in made.eqns if e.params.get("name") == "searchsorted"]
            if len(calls) == 1 and str(calls[0].params["jaxpr"]) == str(params["jaxpr"]):
                (out,) = calls[0].outvars
                bind = functools.partial(search_p.bind, side=side, method=method, dtype=out.aval.dtype, falling=False)
                return jax.make_jaxpr(bind)(*arguments)
    return None
