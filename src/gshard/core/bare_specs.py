"""Gives bare PartitionSpecs the mesh of ``gshard.jit``, where no mesh is set.

    gshard.jit(lambda x: jax.lax.with_sharding_constraint(x, P("data")) * 2, mesh=8)

JAX resolves a bare ``PartitionSpec`` (in ``with_sharding_constraint``, ``jax.device_put``, the shardings of a nested
``jax.jit``) against the mesh that is set. It resolves ``jax.shard_map`` without ``mesh=`` in the same way. If no mesh
is set, JAX raises. gshard then sets the mesh of ``gshard.jit`` and traces the function again. gshard traces functions
that need no mesh without one, because JAX refuses a ``shard_map`` over axes that the set mesh does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gshard.core.jax_adapter import mesh_of_context
from gshard.core.jax_adapter_context import mesh_set
from gshard.core.mesh import Mesh

_NEEDS_A_MESH = (
    "requires a non-empty mesh in context if you are passing",
    "Please set a mesh via `jax.set_mesh` if a PartitionSpec",
    "Using PartitionSpec when you are not under a mesh context",
    "The context mesh cannot be empty",
)


def with_mesh_for_specs(trace: Callable[[], Any], mesh: Mesh | None) -> Any:
    """Traces a function, and traces it again with a mesh set if JAX refuses a ``PartitionSpec`` because none is set.

    Args:
        trace: traces the function; called once or twice.
        mesh: the mesh to set for the second call. With None there is no second call.

    Raises:
        Exception: any exception of ``trace``.
    """
    try:
        return trace()
    except (RuntimeError, ValueError) as error:
        if mesh is None or not any(text in str(error) for text in _NEEDS_A_MESH) or mesh_of_context() is not None:
            raise
    with mesh_set(mesh.user_jax_mesh):
        return trace()
