"""explain: how a function is partitioned, by gshard or by XLA, and what it costs.

By gshard a function is planned and partitioned, and neither compiled nor run. A function from ``jax.jit`` whose
arguments are placed on several devices is compiled and read, as XLA's partitioner split it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from gshard.api.compiled_programs import (
    GSHARD,
    XLA,
    explain_compiled,
    explain_compiled_by_gshard,
    is_compiled,
    is_from_framework,
    is_from_jax_jit,
    lowered_by_jax,
    lowered_instead_of_jit,
    names_of_arrays,
    partitions_of,
    stage_inside,
)
from gshard.api.function_again import compiled_again, compiled_for, with_bound_arguments
from gshard.api.jit import Jitted, jit
from gshard.api.lowered import Compiled, Lowered, Traced
from gshard.api.marks import told
from gshard.api.wrapped import mesh_of_arguments
from gshard.core.errors import ArgumentError, GShardError, MeshError
from gshard.core.jax_adapter import mesh_of_context, user_line
from gshard.core.jax_adapter_jit import has_substitute
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mesh import MeshLike
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.device.machine import Machine
from gshard.explanation.compiled_source import REFUSED, CompiledSource, source_of
from gshard.explanation.explain import Explanation
from gshard.explanation.plan_source import PlanSource
from gshard.planning.saved_plan import SavedPlan
from gshard.remat.rematerialise import bytes_of
from gshard.tracing.trace import name_of
from gshard.xla.described import PlanningError

Planned = Traced | Lowered | Compiled  # the stages of a function from gshard.jit


@without_our_frames
@with_tables
def explain(
    f: Any,
    *args: Any,
    mesh: MeshLike = None,
    machine: str | Machine | None = None,
    memory_limit: int | str | None = None,
    plan: Plan | SavedPlan | None = None,
    partitioner: Literal["gshard", "xla"] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Tells how a function is partitioned: by gshard, without compiling it; or by XLA, as it compiled it.

    Args:
        f: a marked function, or one that ``gshard.jit`` or ``jax.jit`` returned, with its options, or what
            ``.trace(...)``, ``.lower(...)`` and ``.lower(...).compile()`` of one of these returned. Or another compiled
            program: a text of a compiled program, or the path of a file with it.
        args, kwargs: its arguments: arrays or ``jax.ShapeDtypeStruct``, and values for static ones. An argument that
            has the name of an option here is bound before: ``functools.partial(f, mesh=...)``.
        mesh: as for ``jit``, or an abstract mesh of any size (``gshard.Mesh.abstract(data=64, expert=32)``). None takes
            the mesh that ``gshard.jit`` was given, that of the shardings that ``jax.jit`` was given, the one that
            ``jax.set_mesh`` has set, or the one on which an argument is placed.
        machine: as for ``jit``: what the plan is made for. None takes that of a function from ``gshard.jit``, or the
            devices of the mesh; by bytes if there is no model of them, and for CPUs and abstract meshes. A function
            from ``jax.jit`` is compiled for the machine, which need not exist, if its compiler is installed
            (``pip install "jax[cuda13]"`` or ``libtpu``); else the program for the devices here is priced on it.
        memory_limit, plan: as for ``jit``. None takes those of a function from ``gshard.jit``.
        partitioner: ``"gshard"`` or ``"xla"``, which explains what XLA compiles. None takes XLA for a program that
            ``jax.jit`` traced, lowered or compiled, and for a function from ``jax.jit`` whose arguments are placed on
            several devices, unless ``mesh``, ``memory_limit`` or ``plan`` is given; and gshard otherwise.

    Returns:
        the explanation; print it, or write it as a page by ``.html(path)``.

    Raises:
        MeshError: no mesh was given and none is set. ArgumentError: ``f`` is no function.

    >>> import jax.numpy as jnp
    >>> from gshard.api.marks import split
    >>> from gshard.core.mesh import Mesh
    >>> found = explain(lambda x: split(x, 0, 4).sum(), jnp.zeros((8, 2)), mesh=Mesh.abstract(data=4))
    >>> found.bytes_by_kind
    {'all_reduce': 6}
    """
    ours: dict[str, Any] = {"memory_limit": memory_limit, "plan": plan}
    if partitioner not in (None, XLA, GSHARD):
        raise ArgumentError(
            f"there is no partitioner {partitioner!r}.",
            user_line(),
            hint='Give "gshard", or "xla" for the partitioner of jax.jit (Shardy).',
        )
    f, (args, kwargs) = with_bound_arguments(stage_inside(f), args, kwargs)
    if isinstance(f, Planned):
        return _of_stage(f, args, kwargs, {"mesh": mesh, **ours}, machine, partitioner)
    compiled = _as_compiled(f, args, kwargs, mesh, machine, partitioner, ours)
    if compiled is not None:
        return compiled
    if not callable(f):
        raise ArgumentError(
            f"gshard.explain got {told(f)} where the function stands.",
            user_line(),
            hint="Give the function first: gshard.explain(f, x, mesh=8).",
        )
    if is_from_framework(f):
        return _of_lowered(lowered_instead_of_jit(f, args, kwargs, mesh, machine=machine, **ours))
    if isinstance(f, Jitted):
        limit = None if memory_limit is None else bytes_of(memory_limit)
        jitted = f if mesh is None else f.on(mesh)
        changed = {"machine": machine, "memory_limit": limit, "recorded": SavedPlan.checked(plan)}
        jitted = jitted._with(**{name: value for name, value in changed.items() if value is not None})
    else:
        jitted = jit(f, mesh=mesh, machine=machine, **ours)
    if jitted.options.mesh is None and not isinstance(f, Jitted):
        meant = mesh_of_arguments(args, kwargs)
        if meant is None and is_from_jax_jit(f) and mesh_of_context() is None:
            raise _on_one_device(f)
        jitted = jitted if meant is None else jitted.on(meant)
    return _of_lowered(jitted.lower(*args, **kwargs))


def _of_stage(
    f: Planned,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    machine: str | Machine | None,
    partitioner: str | None,
) -> Explanation:
    """The explanation of a function from ``gshard.jit`` that is traced, lowered or compiled."""
    own = {**options, "machine": machine if partitioner != XLA else None}
    given = [f"{name}=" for name in (*(n for n, value in own.items() if value is not None), *kwargs)]
    given += map(told, args)
    if given:
        raise ArgumentError(
            "a function that gshard.jit lowered has its arguments, its mesh and its options.",
            user_line(),
            got=", ".join(given),
            hint="Give the function itself, with its arguments. "
            "Times on another machine: gshard.explain(lowered).verdict(machine).",
        )
    lowered = f.lower() if isinstance(f, Traced) else f.lowered if isinstance(f, Compiled) else f
    if partitioner == XLA:
        return explain_compiled_by_gshard(f if isinstance(f, Compiled) else lowered.compile(), machine)
    return _of_lowered(lowered)


def _of_lowered(lowered: Lowered) -> Explanation:
    """The explanation of a function that is planned for its arguments."""
    target = lowered.target
    made = target.recorded is None and target.search is False
    source = PlanSource(
        plan=lowered.plan, spmd=lowered.spmd, donated=lowered.donated, marked=lowered.marked,
        by_bytes=made and target.machine is None,
        planning_seconds=lowered.planning_seconds,
    )  # fmt: skip
    return Explanation(source, target.machine)


def _as_compiled(
    f: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: MeshLike,
    machine: str | Machine | None,
    partitioner: str | None,
    ours: Mapping[str, Any],
) -> Explanation | None:
    """The explanation of what XLA compiles; None if gshard is to partition."""
    given = [name for name, value in ours.items() if value is not None]
    if is_compiled(f):
        if given or args or kwargs or partitioner == GSHARD:
            raise ArgumentError(
                "a compiled program takes mesh= and machine= only.",
                user_line(),
                got=", ".join([*(f"{name}=" for name in [*given, *kwargs]), *map(told, args)])
                or "partitioner='gshard'",
                hint="Give the function itself, with its arguments.",
            )
        return explain_compiled(f, mesh, machine)
    if isinstance(f, Jitted) or not is_from_jax_jit(f) or partitioner == GSHARD:
        if partitioner == XLA:
            raise ArgumentError(
                f"XLA's partitioner is for functions from jax.jit, not for {told(f)}.",
                user_line(),
                hint="Give jax.jit(f) and arguments with shardings; what XLA compiles of a function from gshard.jit is "
                'gshard.explain(jitted.lower(...), partitioner="xla").',
            )
        return None
    if partitioner is None and (given or mesh is not None):
        return None
    if given or mesh is not None:
        raise ArgumentError(
            "XLA's partitioner takes the devices and the options of jax.jit.",
            user_line(),
            got=", ".join(f"{name}=" for name in [*given, *(["mesh"] if mesh is not None else [])]),
            hint="Place the arguments, or give jax.jit in_shardings.",
        )
    given_to_f, names, not_for, refused = (args, dict(kwargs)), dict[str, str](), tuple[str, ...](), None
    try:
        if machine is not None and not has_substitute():
            names = names_of_arrays(f, args, kwargs)
            described = compiled_for(machine, f, given_to_f, names)
            if described is not None:
                return Explanation(*described)
    except (PlanningError, *REFUSED) as error:
        refused, reason = error, str(error).strip().splitlines()
        not_for = (f"XLA did not compile it for {machine}: {reason[0]}", *(line.strip() for line in reason[1:2]))
    try:
        lowered = lowered_by_jax(f, args, kwargs)
    except MeshError as error:
        if refused is not None and not isinstance(refused, GShardError):
            raise refused from None
        ways = not_for or ('Or name a machine: machine="h100:8x8" compiles for devices that need not exist.',)
        raise MeshError(error.what, error.where, error.got, "\n  ".join(filter(None, (error.hint, *ways)))) from None
    if isinstance(lowered, Lowered):  # in a block of instead_of_jit
        return _of_stage(lowered, (), {}, {}, machine, partitioner)
    if partitioner is None and partitions_of(lowered) == 1:
        return None
    names = names or names_of_arrays(f, args, kwargs)
    found = explain_compiled(lowered, None, machine, names)
    source = found.source
    assert isinstance(source, CompiledSource), "XLA compiled it"
    again = compiled_again(source, f, given_to_f, functools.partial(source_of, names=names))
    return dataclasses.replace(found, source=dataclasses.replace(source, again=again, not_for=not_for))


def _on_one_device(f: Any) -> MeshError:
    return MeshError(
        f"XLA compiles {name_of(f)} for one device: no argument has a sharding over several devices.",
        user_line(),
        "no mesh was given, and none is set",
        "Place the arguments with jax.device_put(x, NamedSharding(mesh, P('data'))), or give shapes: "
        "jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=...). With mesh=8, gshard.explain shows gshard's own plan.",
    )
