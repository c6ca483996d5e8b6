"""Framework jit: functions that ``flax.nnx.jit`` or ``equinox.filter_jit`` returned, which call ``jax.jit`` themselves.

They take modules apart, pass the arrays to ``jax.jit`` in an order of their own, and have stages that hold those of
JAX. Here arrays get the names that they have in the user's modules: ``model.up.kernel``, not ``model.states[0][3]``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax

from gshard.api.call_errors import clear_call_errors
from gshard.api.compiled_programs import is_from_jax_jit, lowered_by_jax
from gshard.api.instead_of_jit import instead_of_jit
from gshard.api.jitted import Jitted
from gshard.api.lowered import Lowered
from gshard.api.wrapped import mesh_of_shardings
from gshard.core.errors import ArgumentError, MeshError
from gshard.core.jax_adapter import mesh_of_context, user_line
from gshard.core.jax_adapter_given import arguments_of_calls, given_to_jit
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.paths import leaf_names
from gshard.tracing.by_jax import name_of

_log = logging.getLogger(__name__)


def is_from_framework(f: Any) -> bool:
    """Whether ``flax.nnx.jit``, ``equinox.filter_jit`` or the like returned a function."""
    return is_from_jax_jit(f) and not isinstance(f, Jitted) and given_to_jit(f) is None


def names_of_arrays(f: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The names of arrays in the user's arguments, by the names that they have in the program of ``jax.jit``.

    The function is traced, and the arrays that reach ``jax.jit`` are found among its arguments.
    """
    if not is_from_framework(f):
        return {}
    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]
    names = leaf_names(f, (args, dict(kwargs)))

    def called(given: list[Any]) -> None:
        whole = dict(enumerate(leaves)) | dict(zip(arrays, given, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [whole[i] for i in range(len(leaves))])
        f(*args, **kwargs)

    try:
        found = arguments_of_calls(jax.make_jaxpr(called)([leaves[i] for i in arrays]))
    except Exception as error:  # what is lowered need not be traced in a program: it keeps the framework's names
        _log.info("gshard: the arguments of %s have the names of its framework: %s", name_of(f), error)
        return {}
    return {name: names[arrays[i]] for name, i in found[0].items()} if len(found) == 1 else {}


def mesh_of_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MeshLike:
    """The mesh that the arguments are on; None where ``jax.set_mesh`` has set one, or they are on none."""
    if mesh_of_context() is not None:
        return None
    return mesh_of_shardings(getattr(x, "sharding", None) for x in jax.tree.leaves((args, dict(kwargs))))


def lowered_instead_of_jit(
    f: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: MeshLike,
    options: Mapping[str, Any],
    refused: Mapping[str, Any],
    asker: Any,
) -> Lowered:
    """Lowers a function in a block of ``instead_of_jit``, so that gshard partitions it."""
    given = [name for name, value in refused.items() if value is not None]
    if given:
        raise ArgumentError(
            f"gshard.{asker.__name__} takes {' and '.join(given)} for a function of arrays only.",
            user_line(),
            got=f"{given[0]}= for {name_of(f)}",
            hint="Give what jits this function its static and donated arguments.",
        )
    mesh = mesh_of_arguments(args, kwargs) if mesh is None else mesh
    with instead_of_jit(mesh, **options), clear_call_errors(asker, f, args, kwargs):
        lowered = lowered_by_jax(f, args, kwargs)
    if not isinstance(lowered, Lowered):
        raise MeshError(
            f"{name_of(f)} is left to XLA: its arguments are on devices that are not in the mesh.",
            user_line(),
            got=f"mesh: {Mesh.of(mesh)}",
            hint="Give the mesh of the devices on which the arguments are.",
        )
    names = names_of_arrays(f, args, kwargs)
    program = dataclasses.replace(lowered.program, names=tuple(names.get(n, n) for n in lowered.program.names))
    return dataclasses.replace(lowered, program=program)
