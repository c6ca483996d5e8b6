"""Defines primitives that JAX evaluates and lowers through a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir


def function_primitive(
    name: str, run: Callable[..., Any], types: Callable[..., Any], *, multiple_results: bool = False
) -> Primitive:
    """A primitive for equations that gshard writes.

    Args:
        name: the name of the primitive.
        run: ``run(*arrays, **params)`` computes the result, or the list of results.
        types: ``types(*avals, **params)`` returns the type of the result, or the list of types.
        multiple_results: whether there is a list of results.
    """
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(run)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=multiple_results))
    return primitive
