"""Traces a function to a jaxpr with JAX, and translates JAX's errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import jax

from gshard.core.errors import ArgumentError, TraceError
from gshard.core.jax_adapter import ShardingTypeError, line_of_exception, user_line
from gshard.core.jax_adapter_jit import jaxpr_and_constants


def traced_by(jitted: Any, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """The trace of a function from ``jax.jit``. An error of JAX to which gshard can add something is one of gshard."""
    try:
        return jitted.trace(*args, **kwargs)  # type: ignore[no-any-return]
    except (ShardingTypeError, TypeError, ValueError, NameError, OverflowError) as error:
        translated = _translated(jitted, error)
        if translated is error:
            raise
        raise translated from error


def closed_of(f: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The closed jaxpr of a function of pytrees, over its flat arguments, and the pytree of its results."""
    traced = traced_by(jax.jit(f), *args, **kwargs)
    return jaxpr_and_constants(traced)[0], jax.tree.structure(traced.out_info)


def _translated(f: Callable[..., Any], error: Exception) -> Exception:
    """The error to raise for an error of JAX; the same error if gshard has nothing to add."""
    text, name, line = str(error), name_of(f), line_of_exception(error)
    if (hint := _of_arguments(text)) is not None:
        text = text.split("\nThis typically")[0].replace(str(getattr(f, "__wrapped__", f)), name)
        return ArgumentError.like(error, text, user_line(), hint=hint)
    if isinstance(error, NameError):
        return _unbound_axis(error, name, line)
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return leaked(error, name, line)
    if isinstance(error, ShardingTypeError):
        hint = (
            "jax.make_mesh makes axes of type Explicit, for which JAX wants such shardings from you. On a mesh with "
            "axis_types=(jax.sharding.AxisType.Auto,) * n, n axes, gshard chooses them."
        )
        return TraceError.like(error, f"{name} cannot be traced: {text}", line, hint=hint)
    return error


def _of_arguments(text: str) -> str | None:
    """The hint for an error of JAX about an argument of a jitted function; None for other errors."""
    if text.startswith("Non-hashable static arguments"):
        return "Give a tuple or another value that is hashable and does not change."
    if text.startswith("An overflow was encountered while parsing an argument"):
        return "Use integers of 64 bits: jax.config.update('jax_enable_x64', True)."
    if not text.startswith("Error interpreting argument to"):
        return None
    return (
        "A value that is no array is a static argument: gshard.jit(..., static_argnames=...); it must be hashable. "
        "Inside of an argument it is static with eqx.filter_jit in a block of gshard.instead_of_jit."
    )


def leaked(error: jax.errors.UnexpectedTracerError, name: str, line: str | None) -> TraceError:
    """The error for an array that a function computed while it was traced, and that another function reads."""
    made = re.search(r"created on line (\S+?)(?::\d+)? \((.*?)\)", str(error))
    where = f" at {os.path.basename(made[1])} ({made[2]})" if made else ""
    return TraceError.like(
        error,
        f"{name} reads an array that another function computed{where} and stored while it was traced.",
        line,
        str(error).splitlines()[0],
        "Return this array from that function, and pass it as an argument. Inside `with jax.checking_leaks():` JAX "
        "raises the error where the array is stored.",
    )


def _unbound_axis(error: NameError, name: str, line: str | None) -> Exception:
    """The error for a collective over an unbound axis, such as a remaining ``jax.lax.pmean`` of a ``pmap``."""
    match = re.search(r"unbound axis name: (\S+?)\.?(?:\s|$)", str(error))
    if match is None:
        return error  # an undefined Python name
    return TraceError.like(
        error,
        f"{name} uses the axis {match[1]!r} in a collective, and no jax.shard_map or jax.vmap around it has that axis.",
        line,
        str(error),
        "If jax.pmap needed the collective, remove it: here arrays are whole, so a mean over the batch is one over all "
        "devices. A collective of your own belongs inside jax.shard_map.",
    )


def name_of(f: Any) -> str:
    """The name of a function in messages, HLO and profiles; also for partial functions and callable objects."""
    while not hasattr(f, "__name__") and hasattr(f, "func"):
        f = f.func
    return str(getattr(f, "__name__", type(f).__name__))
