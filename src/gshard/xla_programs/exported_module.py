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
from gshard.core.memory_kinds import is_host_kind
from gshard.xla_programs.compiled_explanation import CompiledExplanation
from gshard.xla_programs.plan_compiler import PlanCompiler


def exported_module(made: PlanCompiler, function: Callable[..., Any], compiled: CompiledExplanation) -> export.Exported:
    """The program as ``jax.export`` makes it, checked.

    Args:
        made: has the program and its shardings.
        function: of the flat inputs, captured arrays first.
        compiled: what XLA compiled of it.

    Raises:
        PlanError: the module that is exported sends other bytes than ``compiled``.
    """
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
    shapes = [
        jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=made.ins[first + i])
        for i, v in enumerate(program.block.inputs[first:])
    ]
    args, kwargs = jax.tree.unflatten(tree, shapes)
    outs = jax.tree.unflatten(program.out_tree, made.outs)
    platform = made.jax_mesh.devices.flat[0].platform
    found = export.export(jax.jit(called, out_shardings=outs), platforms=[platform])(*args, **kwargs)
    again = jax.jit(lambda *args, **kwargs: found.call(*args, **kwargs), out_shardings=outs)
    sent = made.read(again.lower(*args, **kwargs).compile()).bytes_by_kind
    if sent != compiled.bytes_by_kind:
        raise PlanError(
            "the module that jax.export makes of this program sends other bytes than jax.jit's.",
            got=f"{sent}, and jax.jit: {compiled.bytes_by_kind}",
            hint="Export the function with exported.named(mesh) yourself: jax.export.export(jax.jit(f, ...)).",
        )
    return found
