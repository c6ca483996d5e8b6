"""Defines primitives that JAX evaluates and lowers through a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def function_primitive(
    name: str,
    run: Callable[..., Any],
    types: Callable[..., Any],
    *,
    dimension: str = "",
) -> Primitive:
    """A primitive with one result, for equations that gshard writes."""
    primitive = Primitive(name)
    primitive.def_impl(run)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    batching.primitive_batchers[primitive] = functools.partial(_mapped, primitive, run, dimension)
    return primitive


def _mapped(
    primitive: Primitive,
    run: Callable[..., Any],
    dimension: str,
    xs: Sequence[Any],
    dims: Sequence[Any],
    /,
    **params: Any,
) -> Any:
    """The batching rule of a primitive; the mapped dimension of the result is the first one."""
    pairs = list(zip(xs, dims, strict=True))
    if not dimension or any(d is not None and x.ndim == 1 for x, d in pairs):
        result = jax.vmap(functools.partial(run, **params), tuple(dims))(*xs)
    else:
        size = next(x.shape[d] for x, d in pairs if d is not None)
        in_first = [jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
        operands = [x if jnp.ndim(x) == 0 else batch for (x, _), batch in zip(pairs, in_first, strict=True)]
        result = primitive.bind(*operands, **{**params, dimension: params[dimension] + 1})
    return result, 0
