"""Makes the jaxpr of a function with JAX, and translates JAX's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from gshard.core.errors import TraceError
from gshard.core.jax_adapter import line_of_exception


def closed_of(f: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The closed jaxpr of a function of pytrees, over its flat arguments, and the pytree of its results.

    Raises:
        TraceError: as ``trace``; of JAX's own type of error too, so that who expects that one goes on working.
    """
    try:
        jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)(*args, **kwargs)
    except (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError, TypeError) as error:
        raise _refused(f, error) from error
    return jaxpr, jax.tree.structure(shapes)


def _refused(f: Callable[..., Any], error: Exception) -> Exception:
    """The error to raise for one of JAX's."""
    text, name = str(error), name_of(f)
    line = line_of_exception(error)
    if "returned a value of type" in text:
        return TraceError.like(
            error,
            f"{name} returns a value that is no array.",
            line,
            f"it returned a value of type {text.split('returned a value of type ', 1)[1].split(', which is not')[0]}",
            "Return arrays, or pytrees of them; what is known without running belongs outside of the function.",
        )
    is_shape = text.startswith("Shapes must be 1D sequences of concrete values")
    if not is_shape and not isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        return error  # a mistake of another kind
    numpy = isinstance(error, jax.errors.TracerArrayConversionError)
    return TraceError.like(
        error,
        f"{name} cannot be traced: it needs the value of an array, and only shapes are known.",
        line,
        "\n  ".join(words for words in text.splitlines() if words and not words.startswith("See ")),
        "Use jax.numpy instead of numpy on arrays (jnp.sin for np.sin), and static_argnums for plain values."
        if numpy
        else "Use jnp.where or jax.lax.cond instead of branching on array values, and static_argnums for plain values.",
    )


def name_of(f: Any) -> str:
    """What a function is called in messages, HLO and profiles; partial functions and callables have names too."""
    while not hasattr(f, "__name__") and hasattr(f, "func"):
        f = f.func
    return str(getattr(f, "__name__", type(f).__name__))
