"""Exported module: the program of a plan as StableHLO with ``sdy`` shardings, through ``jax.export``.

The module takes the arguments of the function, and holds the arrays that the function closes over. It is called once
more from ``jax.jit`` and compiled, and what that sends is compared with what was exported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import export

from gshard.core.errors import PlanError
from gshard.core.memory_kinds import is_host_kind, is_in_host_space
from gshard.xla_programs.compiled_explanation import CompiledExplanation
from gshard.xla_programs.plan_compiler import PlanCompiler


def exported_module(made: PlanCompiler, function: Callable[..., Any], compiled: CompiledExplanation) -> export.Exported:
    """The program as ``jax.export`` makes it, checked."""
    program, tree = made.program, made.found.in_tree
    first = len(program.captured)

    def called(*args: Any, **kwargs: Any) -> Any:
        # Captured arrays become constants of the module, which have no sharding but by a constraint.
        constants = [
            x if is_host_kind(s.memory_kind) else jax.lax.with_sharding_constraint(x, s)
            for x, s in zip(program.captured, made.ins, strict=False)
        ]
        return jax.tree.unflatten(program.out_tree, function(*constants, *jax.tree.leaves((args, kwargs))))

    called.__name__ = called.__qualname__ = program.name if program.name.isidentifier() else "f"
    args, kwargs = jax.tree.unflatten(tree, _shapes(made, first))
    options: dict[str, Any] = {"out_shardings": jax.tree.unflatten(program.out_tree, made.outs)}
    if not kwargs:
        options["in_shardings"] = jax.tree.unflatten(tree, made.ins[first:])[0]
    platform = made.jax_mesh.devices.flat[0].platform
    found = export.export(jax.jit(called, **options), platforms=[platform])(*args, **kwargs)
    again = jax.jit(lambda *args, **kwargs: found.call(*args, **kwargs), **options)
    sent = made.read(again.lower(*args, **kwargs).compile()).bytes_by_kind
    if sent != compiled.bytes_by_kind:
        raise PlanError(
            "the module that jax.export makes of this program sends other bytes than jax.jit's.",
            got=f"{sent}, and jax.jit: {compiled.bytes_by_kind}",
            hint="Export the function with exported.named(mesh) yourself: jax.export.export(jax.jit(f, ...)).",
        )
    return found


def _shapes(made: PlanCompiler, first: int) -> list[Any]:
    """For each argument its shape and dtype; with its sharding if ``in_shardings`` cannot give it that."""
    program = made.program
    by_keyword = bool(jax.tree.unflatten(made.found.in_tree, range(made.found.in_tree.num_leaves))[1])
    if not by_keyword:
        return list(made.takes[first:])
    for i, v in enumerate(program.block.inputs[first:], first):
        if v.on_host != is_in_host_space(program.input_memory(i)):
            raise PlanError(
                f"{program.names[i]} is in the memory {program.input_memory(i)!r}, and its type is of another one.",
                hint="Give arguments by position: jax.jit takes no in_shardings for arguments by keyword.",
            )
    inputs = zip(program.block.inputs[first:], made.ins[first:], strict=True)
    return [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s) for v, s in inputs]
