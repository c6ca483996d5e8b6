"""Compiled command: ``gshard explain`` of what XLA compiles: a dump of a program, or a function from ``jax.jit``.

gshard explain step.hlo.txt --machine v5e:2x4           the text of a compiled program, also as .gz; nothing is compiled
gshard explain train.py:step                            a function from jax.jit whose arguments have shardings
gshard explain train.py:lowered                         what .lower(...) or .compile() returned
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from gshard.api.call_errors import clear_call_errors
from gshard.api.compiled_programs import (
    GSHARD,
    STAGES,
    XLA,
    is_from_jax_jit,
    lowered_by_jax,
    partitions_of,
)
from gshard.api.explained import Planned, explain, explain_lowered
from gshard.api.function_again import with_bound_arguments
from gshard.api.jitted import Jitted
from gshard.core.errors import ArgumentError
from gshard.core.mesh import Mesh
from gshard.named_target import TOLD, mesh_of, play_devices
from gshard.xla_programs.compiled_explanation import CompiledExplanation

_PLANS = ("memory_limit", "plan", "finite", *TOLD)  # options that say how gshard partitions
_OF_STAGES = ("is not for a function that is lowered", "Leave it out, or name the function itself.")


def is_dump(target: str) -> bool:
    """Whether a target is a file of a compiled program, and no function in a file."""
    return not target.endswith(".py") and Path(target).is_file()


def of_dump(options: argparse.Namespace) -> CompiledExplanation:
    """The explanation of a dump."""
    _refuse(options, (*_PLANS, "why", "arg"), "is not for a compiled program", "Leave it out, or name a function.")
    if options.partitioner == GSHARD:
        raise ArgumentError(
            "a compiled program is partitioned already.",
            got="--partitioner gshard",
            hint="Name the function: gshard explain train.py:step --partitioner gshard.",
        )
    mesh = mesh_of(options.mesh) if options.mesh else None
    return explain(Path(options.target), mesh=mesh, machine=options.machine)


def of_function(f: Any, arguments: tuple[Any, ...], options: argparse.Namespace) -> CompiledExplanation | None:
    """The explanation of what XLA compiles of a function; None if gshard partitions it, as for ``explain``."""
    if isinstance(f, STAGES):
        return _of_stage(f, options)
    f, (arguments, named) = with_bound_arguments(f, arguments, {})
    if isinstance(f, Jitted) or not is_from_jax_jit(f) or options.partitioner == GSHARD:
        return None
    asks_for_plan = any(getattr(options, name) for name in ("mesh", *_PLANS))
    if options.partitioner is None and asks_for_plan:
        return None
    if (mesh := mesh_of_arguments((arguments, named))) is not None:
        play_devices(mesh.size)  # XLA compiles for devices that exist
    with clear_call_errors(explain, f, arguments, named):
        lowered = lowered_by_jax(f, arguments, named)
    if options.partitioner is None and partitions_of(lowered) == 1:
        return None
    _refuse(
        options, ("mesh", *_PLANS, "why"), "is for what gshard partitions, and XLA partitions this",
        f"Leave it out, or give --partitioner {GSHARD}.",
    )  # fmt: skip
    return explain_lowered(lowered, f, arguments, named, options.machine)


def _of_stage(f: Any, options: argparse.Namespace) -> CompiledExplanation | None:
    """The explanation of a function that is lowered or compiled; None if gshard planned it, as for ``of_function``."""
    by_gshard = isinstance(f, Planned)
    if by_gshard and options.partitioner != XLA:
        named = [name for name in ("mesh", *_PLANS) if getattr(options, name)]
        _refuse_given(options, [f"--{name.replace('_', '-')}" for name in named], *_OF_STAGES)
        return None
    if not by_gshard and options.partitioner == GSHARD:
        raise ArgumentError(
            "a program that jax.jit lowered is partitioned by XLA.",
            got="--partitioner gshard",
            hint="Name a function that returns (function, *arguments).",
        )
    _refuse(options, ("mesh", *_PLANS, "why"), *_OF_STAGES)
    return explain(f, machine=options.machine, partitioner="xla") if by_gshard else explain(f, machine=options.machine)


def mesh_of_arguments(arguments: Any) -> Mesh | None:
    """The mesh of the first argument that is placed on one, abstract ones included; None without."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    found = next((s.mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1), None)
    return None if found is None else Mesh.of(found)


def _refuse(options: argparse.Namespace, names: tuple[str, ...], why: str, hint: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    given += [f"--against {XLA}"] if options.against == XLA else []
    _refuse_given(options, given, why, hint)


def _refuse_given(options: argparse.Namespace, given: list[str], why: str, hint: str) -> None:
    if given:
        raise ArgumentError(f"{given[0]} {why}.", got=f"{options.target} with {', '.join(given)}", hint=hint)
