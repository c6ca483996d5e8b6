"""search: the best plan for a function on a machine, without marks or with some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gshard.analysis.machine import Machine, kind_of_devices
from gshard.api.jit import Jitted, jit
from gshard.core.errors import ArgumentError
from gshard.core.mesh import Mesh
from gshard.remat.rematerialise import bytes_of
from gshard.search.find import PricedPlan, best_plan
from gshard.search.found import Found
from gshard.search.meshes import meshes


def search(
    f: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    machine: str | Machine | None = None,
    memory_limit: int | str | None = None,
    budget_seconds: float | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    on_better: Callable[[PricedPlan], None] | None = None,
    **kwargs: Any,
) -> Found:
    """Searches for the plan of a function that takes least time on a machine, and tells how near the best it is.

    Marks in the function and shardings of its arguments are kept. The plan is never worse than what the marks alone,
    data parallelism or a split state give.

    Args:
        f: a function, or one that ``gshard.jit`` returned: then its mesh, machine, limit, marks and donated arguments
            count where others are not given.
        args, kwargs: its arguments: arrays or ``jax.ShapeDtypeStruct``.
        mesh: as for ``jit``, or an abstract mesh of any size; a number of devices tries all shapes with up to two axes
            and takes the best.
        machine: what the devices are, such as ``"h100:4x8"``; by default what the mesh's devices are.
        memory_limit: bytes that a device may hold, or text such as ``"14GiB"``; by default the machine's memory.
        budget_seconds: how long to search on each mesh, about. None goes on for a number of steps that follows from the
            size of the program, and finds the same on any computer.
        donate_argnums: arguments whose memory the results may take, as for ``jit``: a training state.
        on_better: called with each plan that is the best so far.

    Returns:
        what was found; print it. ``gshard.jit(f, mesh=found.mesh, plan=found.plan)`` runs it.

    Raises:
        MachineError: there is no such machine, or it has another number of devices.
        ArgumentError: ``donate_argnums`` for a function that ``gshard.jit`` returned, which has its own.
        ShardingError, TraceError: as ``jit``.

    >>> import jax
    >>> from gshard.core.mesh import Mesh
    >>> w, x = jax.ShapeDtypeStruct((8192, 8192), "float32"), jax.ShapeDtypeStruct((8, 8192), "float32")
    >>> found = search(lambda w, x: x @ w, w, x, mesh=Mesh.abstract(devices=8), machine="h100:1x8")
    >>> found.plan.format(found.plan.program.block.inputs[0]), found.gap
    ('f32[8192,8192@devices]', 0.0)
    """
    options: dict[str, Any] = {} if donate_argnums is None else {"donate_argnums": donate_argnums}
    if isinstance(f, Jitted):
        if donate_argnums is not None:
            raise ArgumentError(
                "gshard.search takes donate_argnums for a plain function only.",
                got=f"donate_argnums={donate_argnums!r}, for {f!r}",
                way_out="Give it to gshard.jit, which made this function.",
            )
        made, given = f, f.options
        mesh = given.mesh if mesh is None else mesh
        machine = given.machine if machine is None else machine
        memory_limit = given.memory_limit if memory_limit is None else memory_limit
    else:
        made = jit(f, mesh=1, **options)
    tried = []
    for one in meshes(int(mesh)) if _is_number(mesh) else [Mesh.of(mesh)]:
        kind = machine or kind_of_devices(one)
        on = kind if isinstance(kind, Machine) else Machine.of(kind, one.size)
        lowered = made.on(one).lower(*args, **kwargs)
        limit = None if memory_limit is None else bytes_of(memory_limit)
        tried.append(
            best_plan(
                lowered.program, one, on, donated=lowered.donated, memory_limit=limit, budget_seconds=budget_seconds,
                on_better=on_better,
            )
        )  # fmt: skip
    best = min(tried, key=lambda b: b.chosen.rank(b.limit))
    return Found(best, tuple(tried), tuple(sorted(lowered.donated)))


def _is_number(mesh: Any) -> bool:
    return isinstance(mesh, int | np.integer) and not isinstance(mesh, bool)
