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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import Shards, identity
from gshard.core.jax_adapter import closed
from gshard.core.planning_tables import tabulated
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.language.function_primitive import function_primitive
from gshard.language.registry import Call, rule

_Axes = tuple[tuple[int | None, int | None], ...]
_SIDES, _METHODS = ("left", "right"), ("scan", "scan_unrolled", "sort", "compare_all")


def _run(array: Any, numbers: Any, *, side: str, method: str, dtype: Any, falling: bool) -> Any:
    array = lax.rev(array, (array.ndim - 1,)) if falling else array
    search = functools.partial(jnp.searchsorted, side=side, method=method)
    for _ in range(array.ndim - 1):
        search = jax.vmap(search)
    return search(array, numbers).astype(dtype)


def _shape(array: Any, numbers: Any, *, side: str, method: str, dtype: Any, falling: bool) -> Any:
    return jax.core.ShapedArray(numbers.shape, dtype)


search_p = function_primitive("searchsorted", _run, _shape)


@rule("searchsorted")
def searchsorted(call: Call) -> Rule:
    """The last dimension of the array is reduced by ``add``, the numbers are parallel. Dimensions before it are mapped.

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
    """
    name = str(params.get("name") or params.get("_prim"))
    if ("searchsorted_" not in name and "SearchSorted" not in name) or len(in_avals) != 2:
        return None
    array, numbers = in_avals
    if not 1 <= len(array.shape) <= 3 or 0 in array.shape or not _is_ordered(array.dtype):
        return None
    return _replacement(_text(params), (array.shape, numbers.shape), array.dtype)


@tabulated(256)
def _replacement(text: str, shapes: tuple[tuple[int, ...], ...], dtype: Any) -> Any:
    """The closed jaxpr that replaces an equation of this text; None if it is not a search as JAX writes it."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    for axes, side, method in itertools.product(_mapped_axes(*shapes), _SIDES, _METHODS):
        if f"_{method.removesuffix('_unrolled')}_impl" not in text and f"method={method}" not in text:
            continue
        for search in _written(functools.partial(jnp.searchsorted, side=side, method=method), axes, dtype):
            found = _search_in(jax.make_jaxpr(search)(*arguments))
            if found is not None and _text(found.params) == text:
                out = found.outvars[0].aval.dtype
                bind = functools.partial(search_p.bind, side=side, method=method, dtype=out, falling=False)
                return jax.make_jaxpr(lambda a, v, axes=axes, bind=bind: bind(*_mapped_first(a, v, axes)))(*arguments)
    return None


def _mapped_axes(array: tuple[int, ...], numbers: tuple[int, ...]) -> list[_Axes]:
    """The dimensions of both operands over which nested ``jax.vmap``s may have mapped a search, the outermost first.

    All but the outermost map the first dimensions.
    """
    axes: list[_Axes] = []
    if len(array) == 1:
        axes = [(), *(((None, j),) for j in range(len(numbers)))]
        return axes if len(numbers) < 2 else [*axes, ((None, 0),) * 2]
    inner = ((0, 0),) * (len(array) - 2)
    outer = [(i, j) for i in ((0,) if inner else (0, 1)) for j in (*range(len(numbers)), None)]
    return [((i, j), *inner) for i, j in outer if j is None or numbers[j] == array[i]]


def _written(search: Callable[..., Any], axes: _Axes, dtype: Any) -> Iterator[Callable[..., Any]]:
    """The functions in which JAX writes a search in another way: mapped, and what a derivative leaves of it."""

    def mapped(f: Callable[..., Any]) -> Callable[..., Any]:
        return functools.reduce(jax.vmap, reversed(axes), f)

    yield mapped(search)
    if jnp.issubdtype(dtype, jnp.floating):
        yield _primal(mapped(search))
        yield mapped(_primal(search))


def _primal(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: jax.linearize(f, *arrays)[0]


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


def _mapped_first(array: Any, numbers: Any, axes: _Axes) -> tuple[Any, Any]:
    """The operands with their mapped dimensions first. If only the array has one, the numbers are repeated."""
    for i, j in axes[:1]:
        array = array if i is None else jnp.moveaxis(array, i, 0)
        numbers = jnp.broadcast_to(numbers, (len(array), *numbers.shape)) if j is None else jnp.moveaxis(numbers, j, 0)
    return array, numbers
