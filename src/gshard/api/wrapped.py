"""Reads the options of a function from ``jax.jit`` that is passed to gshard, and the mesh of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import mesh_of_context, user_line
from gshard.core.jax_adapter_jit import given_to_jit
from gshard.core.paths import parameters_of
from gshard.tracing.trace import name_of


def unwrapped(
    f: Callable[..., Any], shardings: dict[str, Any], of_jax: Mapping[str, Any]
) -> tuple[Any, dict[str, Any], jax.sharding.Mesh | AbstractMesh | None]:
    """Reads options of ``jax.jit`` that ``gshard.jit`` was given, and what ``jax.jit`` was given with the function.

    Returns the function from ``jax.jit`` with its static and donated arguments, the options that ``gshard.jit`` keeps,
    and the mesh of the first sharding that ``jax.jit`` was given.
    """
    refuse_device("gshard.jit", of_jax.get("device") or of_jax.get("backend"))
    before = given_to_jit(f)
    mesh, options = None, dict(shardings)
    if before is not None:
        refuse_device("jax.jit", before.device)
        theirs = {"in_shardings": before.in_shardings, "out_shardings": before.out_shardings}
        has_shardings = any(x is not None for x in theirs.values())
        mesh = mesh_of_shardings(jax.tree.leaves((before.in_shardings, before.out_shardings)))
        inside = has_shardings and any(x is not None for x in shardings.values())
        if not inside and not before.layouts and not before.resolves:
            f = before.f
            options |= theirs if has_shardings else {}
            of_jax = {
                **of_jax,
                "compiler_options": {**before.compiler_options, **(of_jax.get("compiler_options") or {})},
            }
    by_jax = _jitted(f, of_jax)
    own = given_to_jit(by_jax)
    assert own is not None
    options |= {"keep_unused": own.keep_unused, "compiler_options": tuple(own.compiler_options.items())}
    if before is not None:
        options["keep_unused"] |= before.keep_unused
        pairs = zip((*own.static, *own.donated), (*before.static, *before.donated), strict=True)
        both = {key: (*ours, *(x for x in theirs if x not in ours)) for key, (ours, theirs) in zip(_NAMED, pairs)}
        by_jax = _jitted(f, both)
    return by_jax, options, mesh


# The options of ``jax.jit`` that name arguments, as ``GivenToJit`` lists them.
_NAMED = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")


def _jitted(f: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """The function from ``jax.jit``, which refuses what is no function, and arguments that it does not have."""
    try:
        return jax.jit(f, **given)
    except (ValueError, TypeError) as error:
        names = parameters_of(f)
        raise ArgumentError.like(
            error,
            str(error),
            user_line(),
            f"{name_of(f)}({', '.join(names)})" if names else name_of(f),
            "Name arguments that the function has, each as static or as donated.",
        ) from None


def mesh_of_shardings(shardings: Iterable[Any]) -> jax.sharding.Mesh | AbstractMesh | None:
    """The mesh of the first ``NamedSharding``, over devices if there is one; None if there is none."""
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty]
    return next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)), next(iter(meshes), None))


def mesh_of_arguments(args: Any, kwargs: Any) -> jax.sharding.Mesh | AbstractMesh | None:
    """The mesh that the arguments are on; None where ``jax.set_mesh`` has set one, or they are on none."""
    if mesh_of_context() is not None:
        return None
    return mesh_of_shardings(getattr(x, "sharding", None) for x in jax.tree.leaves((args, kwargs)))


def refuse_device(by: str, device: Any) -> None:
    """Raises ``ArgumentError`` where a jitted function was given a device or a backend."""
    if device is not None:
        raise ArgumentError(
            f"{by} was given a device or a backend: the mesh of gshard.jit names the devices.",
            user_line(),
            f"{device!r}",
            "Write mesh=jax.devices('cpu')[:8], for example.",
        )
