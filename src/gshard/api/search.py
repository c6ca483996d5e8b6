"""search: the best plan for a function on a machine, without marks or with some."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, overload

import numpy as np

from gshard.analysis.hardware import machine_of
from gshard.analysis.machine import Machine
from gshard.api.explained import refuse_finite
from gshard.api.jit import Jitted, jit
from gshard.api.lowered import Lowered
from gshard.api.names import paths_of_arguments, with_names_of_arguments
from gshard.core.errors import ArgumentError, MeshError
from gshard.core.layout import Layout, Names
from gshard.core.mesh import Mesh
from gshard.core.paths import place_of_definition
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.remat.rematerialise import bytes_of
from gshard.search.find import Begun, Best, PricedPlan, begin, finish
from gshard.search.found import Found
from gshard.search.layouts import FoundLayout, Namable, layout_of
from gshard.search.meshes import meshes

_OVER = ("plan", "layout")
_FINISHED = 3  # of the meshes that are tried, the most promising ones, whose plans are priced
_EFFORT = 0.1  # for each of many meshes


@overload
def search(f: Callable[..., Any], *args: Any, over: Literal["layout"], **kwargs: Any) -> FoundLayout: ...


@overload
@with_tables
def search(
    f: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    machine: str | Machine | None = None,
    memory_limit: int | str | None = None,
    budget_seconds: float | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    on_better: Callable[[PricedPlan], None] | None = None,
    over: Literal["plan"] = "plan",
    finite: bool = False,
    **kwargs: Any,
) -> Found: ...


def search(
    f: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    machine: str | Machine | None = None,
    memory_limit: int | str | None = None,
    budget_seconds: float | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    on_better: Callable[[PricedPlan], None] | None = None,
    over: str = "plan",
    finite: bool = False,
    **kwargs: Any,
) -> Found | FoundLayout:
    """Searches for the plan of a function that takes least time on a machine, and tells how near the best it is.

    Marks in the function and shardings of its arguments are kept. The plan is never worse than what the marks alone,
    data parallelism or a split state give.

    Args:
        f: a function, or one that ``gshard.jit`` returned: then its mesh, machine, limit, marks and donated arguments
            count where others are not given. Of one that ``jax.jit`` returned all that it was given counts.
        args, kwargs: its arguments: arrays or ``jax.ShapeDtypeStruct``.
        mesh: as for ``jit``, or an abstract mesh of any size, or a list of ``Mesh`` of one size to choose from; a
            number of devices tries all shapes with up to two axes.
        machine: what the devices are, such as ``"h100:4x8"``; by default what the mesh's devices are.
        memory_limit: bytes that a device may hold, or text such as ``"14GiB"``; by default the machine's memory.
        budget_seconds: how long to search on each mesh, about. None goes on for a number of steps that follows from the
            size of the program, and finds the same on any computer.
        donate_argnums: arguments whose memory the results may take, as for ``jit``: a training state.
        on_better: called with each plan that is the best so far.
        over: ``"plan"``, the sharding of every value and the split of every equation; or ``"layout"``, a table of names
            of dimensions and mesh axes (``gshard.Layout``), which says less and is short. Names are those that the
            function and its arguments have, and letters for the rest; rows of a layout that it has are kept.
        finite: as for ``jit``; a function from ``gshard.jit`` has its own.

    Returns:
        what was found; print it. ``gshard.jit(f, mesh=found.mesh, plan=found.plan)`` runs a plan,
        ``gshard.jit(f, mesh=found.mesh, machine=..., layout=found.layout, names=found.names)`` a table.

    Raises:
        MachineError: there is no such machine, or it has another number of devices; or none is given, and there is no
            model of the mesh's devices.
        ArgumentError: ``donate_argnums`` or ``finite`` for a function that ``gshard.jit`` returned, which has its own;
            ``over`` is another word, ``budget_seconds`` no time; a table for a function with ordered rules
            (``Layout.of``).
        ShardingError, TraceError: as ``jit``.

    >>> import jax
    >>> from gshard.core.mesh import Mesh
    >>> w, x = jax.ShapeDtypeStruct((8192, 8192), "float32"), jax.ShapeDtypeStruct((8, 8192), "float32")
    >>> found = search(lambda w, x: x @ w, w, x, mesh=Mesh.abstract(devices=8), machine="h100:1x8")
    >>> found.plan.format(found.plan.program.block.inputs[0]), found.gap
    ('f32[8192,8192@devices]', 0.0)
    >>> search(lambda w, x: x @ w, w, x, mesh=Mesh.abstract(x=8), machine="h100:1x8", over="layout").layout
    Layout(b='x')
    """
    options: dict[str, Any] = {} if donate_argnums is None else {"donate_argnums": donate_argnums}
    if isinstance(f, Jitted):
        if donate_argnums is not None:
            raise ArgumentError(
                "gshard.search takes donate_argnums for a plain function only.",
                got=f"donate_argnums={donate_argnums!r}, for {f!r}",
                hint="Give it to gshard.jit, which made this function.",
            )
        refuse_finite("search", f, finite)
        made, given = f, f.options
        mesh = given.mesh if mesh is None else mesh
        machine = given.machine if machine is None else machine
        memory_limit = given.memory_limit if memory_limit is None else memory_limit
    else:
        made = jit(f, finite=finite, **options)
        mesh = made.options.mesh if mesh is None else mesh
    if over not in _OVER:
        raise ArgumentError(
            f"gshard.search knows nothing to search over that is called {over!r}.",
            got=f"over={over!r}",
            hint="Write over='plan', the sharding of every value, or over='layout', a table of names and axes.",
        )
    if budget_seconds is not None and not (isinstance(budget_seconds, int | float) and budget_seconds > 0):
        raise ArgumentError(
            f"budget_seconds={budget_seconds!r} is no time to search for.",
            hint="Give seconds above zero, or None for a number of steps that follows from the size of the program.",
        )
    begun: list[tuple[Begun, Lowered]] = []
    candidates = list(_meshes(mesh))
    for one in candidates:
        named = machine_of(one) if machine is None else machine
        on = named if isinstance(named, Machine) else Machine.of(named, one.size)
        lowered = made.on(one).lower(*args, **kwargs)
        limit = None if memory_limit is None else bytes_of(memory_limit)
        started = begin(
            lowered.program,
            one,
            on,
            donated=lowered.donated,
            memory_limit=limit,
            budget_seconds=budget_seconds,
            effort=1.0 if len(candidates) <= _FINISHED else _EFFORT,
        )
        begun.append((started, lowered))
    tried: list[tuple[Best, Namable]] = []
    for started, lowered in sorted(begun, key=lambda pair: pair[0].rank)[:_FINISHED]:
        best = finish(
            started,
            on,
            donated=lowered.donated,
            known=tried[0][0].others if tried else None,
            budget_seconds=budget_seconds,
            on_better=on_better,
        )
        tried.append((best, _namable(made.on(started.mesh), lowered, args, kwargs)))
    donated = tuple(sorted(lowered.donated))
    if over == "layout":
        tables = [layout_of(best, function, donated, budget_seconds) for best, function in tried]
        return min(tables, key=lambda table: table.priced.rank(table.limit))
    best, function = min(tried, key=lambda pair: pair[0].chosen.rank(pair[0].limit))
    return Found(best, tuple(best for best, _ in tried), donated, lowered.in_tree, function)


def _namable(made: Jitted, lowered: Lowered, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Namable:
    """The function as its dimensions can be named: what ``jit`` would trace with a layout and with names."""
    program = lowered.program
    retraced = any(named.line for named in program.named)  # names inside become marks there

    def told(layout: Layout, said: Sequence[Names | None]) -> Program:
        base = dataclasses.replace(program, layout=layout)
        if retraced:
            base = made.under(layout).lower(*args, **kwargs).program
        return with_names_of_arguments(base, said, ())

    return Namable(program, paths_of_arguments(program, lowered.in_tree), told, place_of_definition(made))


def _meshes(mesh: Any) -> Iterable[Mesh]:
    """The meshes to try."""
    if isinstance(mesh, int | np.integer) and not isinstance(mesh, bool):
        return meshes(int(mesh))
    if isinstance(mesh, list | tuple) and mesh and all(isinstance(one, Mesh) for one in mesh):
        if len({one.size for one in mesh}) > 1:
            raise MeshError("meshes to choose from have one size.", got=", ".join(map(str, mesh)))
        return mesh
    return [Mesh.of(mesh)]
