"""search: finds a fast plan of a function for a machine, with or without marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gshard.api.call_errors import clear_call_errors
from gshard.api.jitted import Jitted
from gshard.api.search_run import (
    SearchRun,
    is_number_of_devices,
    meshes_to_try,
    searched_of,
)
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.device.machine import Machine
from gshard.explanation.found import SearchResult
from gshard.remat.rematerialise import bytes_of
from gshard.search.priced import PricedPlan
from gshard.search.stopping import stoppable
from gshard.search.time_budget import TimeBudget, seconds_of
from gshard.xla_programs.compiled_ranking import devices_on, ranked


@without_our_frames
def search(
    f: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    machine: str | Machine | None = None,
    memory_limit: int | str | None = None,
    budget_seconds: float | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    on_better: Callable[[PricedPlan], None] | None = None,
    progress: bool | Callable[[str], object] | None = None,
    finite: bool = False,
    compile_best: int | None = None,
    **kwargs: Any,
) -> SearchResult:
    """Searches for the plan of a function that takes least time on a machine, and tells how near the best it may be.

    What is proven is proven in a simplified model (``found.bound``, ``found.gap``); ``found.cost`` is the full price.

    Marks in the function and shardings of its arguments are kept. gshard also tries pipelines over stacked layers that
    have no mark (``gshard.pipeline``). With enough time, the plan is never worse than what the marks alone, data
    parallelism or a split state give. What there was no time for, the result lists.

    Ctrl-C and SIGTERM (in the main thread) end the search, which then returns the best plan so far; ``found.stopped``
    has the signal. Where nothing was found yet they act as they do without a search.

    Args:
        f: a function, or one that ``gshard.jit`` returned: then its mesh, machine, limit, marks, static and donated
            arguments count where others are not given. If ``jax.jit``, ``flax.nnx.jit`` or ``equinox.filter_jit``
            returned it, the options that it was jitted with count.
        args, kwargs: its arguments: arrays or ``jax.ShapeDtypeStruct``, and values for static ones. An argument that
            has the name of an option here is bound before: ``functools.partial(f, mesh=...)``.
        mesh: as for ``jit``, or an abstract mesh of any size, or a list of ``Mesh`` of one size to choose from; a
            number of devices tries all shapes with up to two axes, and shapes of three near the best of them.
        machine: what the devices are, such as ``"h100:4x8"``; by default what the mesh's devices are.
        memory_limit: bytes that a device may hold, or text such as ``"14GiB"``; by default the machine's memory.
        budget_seconds: how long the whole search may take, tracing, all meshes, presets and prices included. It takes
            longer by no more than one planning of the program and, if no mark splits it, of data parallelism and of a
            split state (FSDP), so that what is found is never worse than these. With None the size of the program says
            how many steps there are, and every computer finds the same unless they take more than 300 seconds, where
            the search ends. ``float("inf")`` is the same without an end.
        static_argnums, static_argnames, donate_argnums, donate_argnames: as for ``jit``; donate a training state.
        on_better: called with each plan that is the best so far.
        progress: None prints lines on stderr once the search has taken two seconds; True prints all, False none; or a
            function that is called with each line. ``found.marks``, ``found.patch`` and ``found.with_mark`` do the
            same.
        finite: as for ``jit``; a function from ``gshard.jit`` has its own.
        compile_best: compiles so many of the best plans, and returns the one that is best as XLA compiled it, with the
            ranking (``found.compiled``): time on the machine with the kernels and the schedule that XLA chose, bytes,
            memory, and what the cost model had said. They are compiled for the mesh's devices; for an abstract mesh by
            libtpu if ``machine`` is a TPU, and otherwise for the first devices that JAX has.

    Returns:
        what was found; print it. ``gshard.jit(f, mesh=found.mesh, plan=found.plan)`` runs the plan. A function that a
        framework jits runs it in a block of ``gshard.instead_of_jit(mesh=found.mesh, plan=found.plan)``.

    Raises:
        MachineError: there is no such machine, or it has another number of devices; or none is given, and there is no
            model of the mesh's devices.
        ArgumentError: static or donated arguments or ``finite`` for a function that ``gshard.jit`` or a framework
            returned, which has its own; ``budget_seconds`` is no time; ``compile_best`` is no number from 1 on.
        MeshError, PlanningError: there are no devices to compile for; libtpu is missing, for a TPU.
        ShardingError, TraceError: as ``jit``.

    >>> import jax
    >>> from gshard.core.mesh import Mesh
    >>> w, x = jax.ShapeDtypeStruct((8192, 8192), "float32"), jax.ShapeDtypeStruct((8, 8192), "float32")
    >>> found = search(lambda w, x: x @ w, w, x, mesh=Mesh.abstract(devices=8), machine="h100:1x8")
    >>> found.plan.format(found.plan.program.block.inputs[0]), found.gap
    ('f32[8192,8192@devices]', 0.0)
    """
    budget = TimeBudget.of(seconds_of(budget_seconds), progress)
    own: dict[str, Any] = {
        "static_argnums": static_argnums, "static_argnames": static_argnames,
        "donate_argnums": donate_argnums, "donate_argnames": donate_argnames,
    }  # fmt: skip
    _check_number(compile_best)
    searched = searched_of(f, args, kwargs, own, finite, search)
    if isinstance(f, Jitted):
        machine = f.options.machine if machine is None else machine
        memory_limit = f.options.memory_limit if memory_limit is None else memory_limit
    mesh = searched.mesh if mesh is None else mesh
    limit = None if memory_limit is None else bytes_of(memory_limit)
    run = SearchRun(
        searched, list(meshes_to_try(mesh)), is_number_of_devices(mesh), machine, limit, budget, on_better,
        budget_seconds, progress,
    )  # fmt: skip
    if compile_best is not None:  # before the search, which takes long
        devices_on(run.meshes[0], run.machine_on(run.meshes[0]))
    with stoppable() as stop:
        with clear_call_errors(search, f, args, kwargs):
            found = run.found(stop)
        if found is not None:
            return found if compile_best is None else ranked(found, compile_best)
    stop.deliver()
    raise KeyboardInterrupt


def _check_number(compile_best: int | None) -> None:
    """Refuses a number of plans to compile that is none."""
    is_number = isinstance(compile_best, int) and not isinstance(compile_best, bool) and compile_best > 0
    if compile_best is not None and not is_number:
        raise ArgumentError(
            f"compile_best={compile_best!r} is not a number of plans to compile.",
            user_line(),
            hint="Give a positive number, such as compile_best=3, or leave it out.",
        )
