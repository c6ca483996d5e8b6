"""explain: plans and partitions a function and explains the result, without compiling or running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gshard.api.call_errors import clear_call_errors
from gshard.api.jit import jit
from gshard.api.jitted import Jitted
from gshard.api.specs import told
from gshard.api.wrapped import mesh_that_is_meant
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mesh import MeshLike
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.device.machine import Machine
from gshard.explanation.explain import Explanation
from gshard.explanation.explain_program import explain_program
from gshard.planning.saved_plan import SavedPlan
from gshard.remat.rematerialise import bytes_of


@without_our_frames
@with_tables
def explain(
    f: Callable[..., Any],
    *args: Any,
    mesh: MeshLike = None,
    machine: str | Machine | None = None,
    memory_limit: int | str | None = None,
    plan: Plan | SavedPlan | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    finite: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Tells how a function would be partitioned, without compiling or running it.

    Args:
        f: a marked function, or one that ``gshard.jit`` or ``jax.jit`` returned.
        args, kwargs: its arguments: arrays or ``jax.ShapeDtypeStruct``, and values for static ones.
        mesh: as for ``jit``, or an abstract mesh of any size (``gshard.Mesh.abstract(data=64, expert=32)``). None takes
            the mesh that ``gshard.jit`` was given, that of the shardings that ``jax.jit`` was given, the one that
            ``jax.set_mesh`` has set, the one on which an argument is placed, or that of a sharding inside the function.
        machine: as for ``jit``: what the plan is made for. None takes that of a function from ``gshard.jit``, or the
            devices of the mesh; by bytes if there is no model of them, and for CPUs and abstract meshes.
        memory_limit, plan: as for ``jit``. None takes those of a function from ``gshard.jit``.
        static_argnums, static_argnames, donate_argnums, donate_argnames, finite: as for ``jit``; a function from
            ``gshard.jit`` has its own.

    Returns:
        the explanation; print it, or write it as a page by ``.html(path)``.

    Raises:
        MeshError: no mesh was given and none is set. ArgumentError: ``f`` is no function, or is one from
            ``gshard.jit``, which has static and donated arguments and ``finite`` of its own.

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
    own: dict[str, Any] = {
        "static_argnums": static_argnums, "static_argnames": static_argnames,
        "donate_argnums": donate_argnums, "donate_argnames": donate_argnames,
    }  # fmt: skip
    limit = None if memory_limit is None else bytes_of(memory_limit)
    if isinstance(f, Jitted):
        refuse_options("explain", f, finite, **own)
        jitted = f if mesh is None else f.on(mesh)
        changed = {"machine": machine, "memory_limit": limit, "recorded": SavedPlan.checked(plan)}
        jitted = jitted._with(**{name: value for name, value in changed.items() if value is not None})
    else:
        jitted = jit(f, mesh=mesh, machine=machine, memory_limit=limit, plan=plan, finite=finite, **own)
    with clear_call_errors(explain, f, args, kwargs):
        if jitted.options.mesh is None and not isinstance(f, Jitted):
            meant = mesh_that_is_meant(args, kwargs, lambda: jitted.trace(*args, **kwargs).jaxpr)
            jitted = jitted if meant is None else jitted.on(meant)
        lowered = jitted.lower(*args, **kwargs)
    target = lowered.target
    made = target.recorded is None and target.search is False
    return explain_program(
        lowered.plan, lowered.spmd, lowered.marked, lowered.donated,
        by_bytes=made and target.machine is None, machine=target.machine,
        marked_by_bytes=None if target.machine is None else lowered.marked_by_bytes, choice=lowered.choice,
    )  # fmt: skip


def refuse_options(asker: str, f: Jitted, finite: bool, **own: Any) -> None:
    """Refuses options for a function that ``gshard.jit`` returned, which has its own.

    Args:
        asker: the function of gshard that was called.
        f: the function.
        finite: as it was given; True is no other where the function has it.
        own: other options; those that are not given are None.

    Raises:
        ArgumentError: one is given.
    """
    given = {name: value for name, value in own.items() if value is not None}
    if finite and not f.options.finite:
        given["finite"] = finite
    if given:
        raise ArgumentError(
            f"gshard.{asker} takes {' and '.join(given)} for a plain function only.",
            user_line(),
            got=f"{', '.join(f'{name}={value!r}' for name, value in given.items())}, for {f!r}",
            hint="Give it to gshard.jit, which made this function.",
        )
