"""Searches in a split sorted array: each device counts the elements that come before a number, and gshard adds counts.

JAX writes ``jnp.searchsorted`` as a loop of bisections, which looks up elements of an array that may be split. gshard
replaces a search that is exactly the one of JAX, also under ``jax.vmap``, by one operator. The position of a number is
the number of elements that come before it, and each device counts those in its part.

An array in falling order is searched in reverse (``jnp.digitize`` searches in both orders). Each device reverses only
its part, because a reversal of the array would move it.

The array must be sorted. For other arrays JAX defines no result, and its methods differ.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import Shards, identity
from gshard.core.jax_adapter import closed, shapes_of
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.language.function_primitive import function_primitive
from gshard.language.registry import Call, rule

_SIDES, _METHODS = ("left", "right"), ("scan", "scan_unrolled", "sort", "compare_all")


def _run(array: Any, numbers: Any, *, side: str, method: str, dtype: Any, falling: bool) -> Any:
    array = lax.rev(array, (array.ndim - 1,)) if falling else array
    search = functools.partial(jnp.searchsorted, side=side, method=method)
    return (jax.vmap(search) if array.ndim > 1 else search)(array, numbers).astype(dtype)


def _shape(array: Any, numbers: Any, *, side: str, method: str, dtype: Any, falling: bool) -> Any:
    return jax.core.ShapedArray(numbers.shape, dtype)


search_p = function_primitive("searchsorted", _run, _shape)


@rule("searchsorted")
def searchsorted(call: Call) -> Rule:
    """The last dimension of the array is reduced by ``add``, the numbers are parallel. A dimension before it is mapped.

    >>> params = {"side": "left", "method": "scan", "dtype": np.dtype("int32"), "falling": False}
    >>> print(searchsorted(Call("searchsorted", params, ((8,), (3, 2)), ((3, 2),), ("f4", "f4"))))
    a, b c -> b c; add over a=8
    """
    (*mapped, n), shape = call.in_shapes
    make = RuleMaker()
    array, numbers = make.factor(n, REDUCE, "add"), make.parallel(shape)

    def local(shards: Shards, x: Any, numbers: Any) -> list[Any]:
        size, atoms = x.shape[-1], shards.atoms(array[0])
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
    return make.rule(
        [[*numbers[: len(mapped)], array], numbers], [numbers], local=local, flops=flops, masks_itself=True
    )


def sorted_search(params: Mapping[str, Any], in_avals: Sequence[Any]) -> Any:
    """The closed jaxpr that replaces the search in a call of ``jnp.searchsorted``; None for other equations.

    JAX converts types and applies a ``sorter`` in the call, before the search.

    Args:
        params: the parameters of the equation.
        in_avals: the types of its operands.
    """
    is_search = "searchsorted_" in str(params.get("name")) or "SearchSorted" in str(params.get("_prim"))
    if not is_search or len(in_avals) != 2:
        return None
    array, numbers = in_avals
    if not 1 <= len(array.shape) <= 2 or 0 in array.shape or not _is_ordered(array.dtype):
        return None
    arguments = shapes_of(in_avals)
    for axes, side, method in itertools.product(_mapped_axes(array.shape, numbers.shape), _SIDES, _METHODS):
        search = functools.partial(jnp.searchsorted, side=side, method=method)
        found = _search_in(jax.make_jaxpr(search if axes == (None, None) else jax.vmap(search, axes))(*arguments))
        if found is not None and _text(found.params) == _text(params):
            bind = functools.partial(
                search_p.bind, side=side, method=method, dtype=found.outvars[0].aval.dtype, falling=False
            )
            return jax.make_jaxpr(lambda a, v, axes=axes, bind=bind: bind(*_mapped_first(a, v, *axes)))(*arguments)
    return None


def _mapped_axes(array: tuple[int, ...], numbers: tuple[int, ...]) -> list[tuple[int | None, int | None]]:
    """The dimensions of both operands over which ``jax.vmap`` may have mapped a search."""
    every = [None, *range(len(numbers))]
    if len(array) == 1:
        return [(None, j) for j in every]
    return [(i, j) for i in (0, 1) for j in every if j is None or numbers[j] == array[i]]


def _is_ordered(dtype: Any) -> bool:
    """Whether numbers of a type have an order, and NaN if they are floats."""
    is_float = jnp.issubdtype(dtype, jnp.floating) and bool(np.isnan(np.asarray(np.nan).astype(dtype)))
    return is_float or getattr(dtype, "kind", "") in "iu"


def _search_in(jaxpr: Any) -> Any:
    """The equation of the search in a jaxpr that calls ``jnp.searchsorted``, if the jaxpr does nothing else."""
    body = closed(jaxpr)[0]
    if len(body.eqns) != 1 or body.eqns[0].outvars != body.outvars:
        return None
    called = closed(body.eqns[0].params["jaxpr"])[0]
    return called.eqns[0] if len(called.eqns) == 1 and called.eqns[0].outvars == called.outvars else None


def _text(params: Mapping[str, Any]) -> str:
    """The text of what an equation computes."""
    return str([params.get(key) for key in ("name", "jaxpr", "_prim")])


def _mapped_first(array: Any, numbers: Any, i: int | None, j: int | None) -> tuple[Any, Any]:
    """The operands with their mapped dimensions first. If only the array has one, the numbers are repeated."""
    if j is not None:
        numbers = jnp.moveaxis(numbers, j, 0)
    if i is not None:
        array = jnp.moveaxis(array, i, 0)
        numbers = numbers if j is not None else jnp.broadcast_to(numbers, (len(array), *numbers.shape))
    return array, numbers
