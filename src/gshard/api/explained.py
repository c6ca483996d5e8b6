"""explain: how a function would be partitioned, without compiling or running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gshard.analysis.explain import Explanation, explain_program
from gshard.api.jit import Jitted, jit
from gshard.api.specs import told
from gshard.api.wrapped import mesh_that_is_meant
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.planning_tables import with_tables


@with_tables
def explain(f: Callable[..., Any], *args: Any, mesh: Any = None, finite: bool = False, **kwargs: Any) -> Explanation:
    """Tells how a function would be partitioned, without compiling or running it.

    Args:
        f: a marked function, or one that ``gshard.jit`` or ``jax.jit`` returned.
        args, kwargs: its arguments: arrays or ``jax.ShapeDtypeStruct``.
        mesh: as for ``jit``, or an abstract mesh of any size (``gshard.Mesh.abstract(data=64, expert=32)``). None takes
            the mesh that ``gshard.jit`` was given, that of the shardings that ``jax.jit`` was given, the one that
            ``jax.set_mesh`` has set, the one on which an argument is placed, or that of a sharding inside the function.
        finite: as for ``jit``; a function from ``gshard.jit`` has its own.

    Returns:
        the explanation; print it, or write it as a page by ``.html(path)``.

    Raises:
        MeshError: no mesh was given and none is set. ArgumentError: ``f`` is no function, or has a ``finite`` of its
            own.

    >>> import jax.numpy as jnp
    >>> from gshard.api.marks import split
    >>> from gshard.core.mesh import Mesh
    >>> found = explain(lambda x: split(x, 0, 4).sum(), jnp.zeros((8, 2)), mesh=Mesh.abstract(data=4))
    >>> found.bytes_by_kind
    {'all_reduce': 6}
    """
    if not callable(f):
        raise ArgumentError(
            f"gshard.explain got {told(f)} where the function stands.",
            user_line(),
            hint="Give the function first: gshard.explain(f, x, mesh=8).",
        )
    if isinstance(f, Jitted):
        refuse_finite("explain", f, finite)
        jitted = f if mesh is None else f.on(mesh)
    else:
        jitted = jit(f, mesh=mesh, finite=finite)
        if jitted.options.mesh is None:
            meant = mesh_that_is_meant(args, kwargs, lambda: jitted.trace(*args, **kwargs).jaxpr)
            jitted = jitted if meant is None else jitted.on(meant)
    lowered = jitted.lower(*args, **kwargs)
    by_bytes = lowered.target.machine is None and lowered.target.recorded is None
    return explain_program(
        lowered.plan, lowered.spmd, lowered.marked, lowered.donated, by_bytes=by_bytes,
        marked_by_bytes=None if lowered.target.machine is None else lowered.marked_by_bytes,
    )  # fmt: skip


def refuse_finite(asker: str, f: Jitted, finite: bool) -> None:
    """Refuses ``finite`` for a function that ``gshard.jit`` returned.

    Raises:
        ArgumentError: it is given.
    """
    if finite and not f.options.finite:
        raise ArgumentError(
            f"gshard.{asker} takes finite for a plain function only.",
            got=f"finite={finite!r}, for {f!r}",
            hint="Give it to gshard.jit, which made this function.",
        )
