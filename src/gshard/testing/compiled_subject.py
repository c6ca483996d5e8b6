"""Compiled subject: whatever a test gives, compiled and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gshard.api.compiled_programs import (
    explain_compiled,
    explain_compiled_by_gshard,
    is_compiled,
    is_from_jax_jit,
    lowered_by_jax,
    on_first_devices,
)
from gshard.api.framework_jit import names_of_arrays
from gshard.api.jitted import Jitted
from gshard.api.lowered import Compiled, Lowered
from gshard.api.specs import told
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.mesh import MeshLike
from gshard.xla_programs.compiled_explanation import CompiledExplanation


def compiled_subject(
    f: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, mesh: MeshLike = None
) -> CompiledExplanation:
    """Compiles a function and reads the program; reads a program that is compiled."""
    if isinstance(args, Mapping | str) or not isinstance(args, Sequence):
        raise ArgumentError(
            "the arguments of the function stand in a tuple.",
            user_line(),
            got=f"args: {told(args)}",
            hint="Write assert_collectives(jax.jit(step), (state, batch), all_gather=0).",
        )
    kwargs = kwargs or {}
    is_function = isinstance(f, Jitted) or (is_from_jax_jit(f) and not isinstance(f, Lowered | Compiled))
    if not is_function and (args or kwargs):
        if callable(f) and not is_compiled(f) and not isinstance(f, Compiled):
            raise _not_jitted(f)
        raise ArgumentError(
            "a compiled program takes no arguments here.",
            user_line(),
            got=f"{told(f)} and {len(args) + len(kwargs)} arguments",
            hint="Give the function itself with its arguments, or the compiled program alone.",
        )
    if is_function and mesh is not None:
        raise ArgumentError(
            "mesh= is for a text and for an exported function.",
            user_line(),
            got=f"mesh={mesh!r} for {told(f)}",
            hint="Place the arguments of jax.jit; give the mesh to gshard.jit.",
        )
    if isinstance(f, CompiledExplanation):
        return f
    if isinstance(f, Jitted):
        return _of_jitted(f, args, kwargs)
    if isinstance(f, Lowered):
        return explain_compiled_by_gshard(f.compile())
    if isinstance(f, Compiled):
        return explain_compiled_by_gshard(f)
    if is_compiled(f):
        return explain_compiled(f, mesh)
    if is_function:
        return explain_compiled(_lowered(f, args, kwargs), names=names_of_arrays(f, tuple(args), kwargs))
    raise _not_jitted(f)


def _lowered(f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> jax.stages.Lowered:
    try:
        return lowered_by_jax(f, args, kwargs)
    except ValueError as error:
        if "AbstractMesh" not in str(error):
            raise
        raise ArgumentError.like(
            error,
            "the shardings inside this function are on an abstract mesh, for which XLA cannot compile.",
            user_line(),
            hint="Check it inside `with jax.set_mesh(jax.make_mesh((8,), ('data',))):`, with the axes of that mesh.",
        ) from error


def _of_jitted(f: Jitted, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CompiledExplanation:
    mesh = f.options.mesh
    if mesh is not None and mesh.devices is None:
        f = f.on(mesh.on_first_devices())
    args, kwargs = on_first_devices((tuple(args), dict(kwargs)))
    return explain_compiled_by_gshard(f.lower(*args, **kwargs).compile())


def _not_jitted(f: Any) -> ArgumentError:
    return ArgumentError(
        f"there is no compiled program of {told(f)}.",
        user_line(),
        hint="Give jax.jit(f) or gshard.jit(f) and its arguments, or what one of them has compiled.",
    )
