"""Peer: the same program under XLA's own partitioner, to measure against.

Marks become ``jax.lax.with_sharding_constraint``; everything else is left as the user wrote it, and ``jax.jit``
hands the rest to GSPMD or Shardy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.mark import resolve
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Equation, Program, Value
from gshard.language.interpret import Interpreter


def xla_function(program: Program, mesh: Mesh, plan: Plan | None = None) -> Callable[..., list[Any]]:
    """A function of the program's flat inputs (captured arrays first) that XLA's partitioner can be given.

    Args:
        program: a traced function.
        mesh: the devices; must be concrete for the function to be compiled.
        plan: constrains the result of every equation to the sharding planned for it, as far as it divides evenly;
            otherwise only marks are constraints.

    Returns:
        a function of global arrays to the flat results, to be compiled with ``jax.jit``.
    """
    replay = _Marked(mesh, plan)
    return lambda *arrays: replay.run(program.block, arrays)


@dataclasses.dataclass(frozen=True)
class _Marked(Interpreter):
    """Runs blocks on whole arrays; marks are constraints."""

    mesh: Mesh
    plan: Plan | None = None

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs an equation; a mark is a constraint."""
        if e.mark is None:
            results = super().equation(e, inputs)
        else:
            demand = resolve(e.mark, self.mesh, e.outputs[0].shape, e.line)
            entries = [
                PartitionSpec.UNCONSTRAINED if is_open else atoms or None
                for atoms, is_open in zip(demand.dims, demand.open, strict=True)
            ]
            sharding = NamedSharding(self.mesh.jax_mesh, PartitionSpec(*entries))
            results = [jax.lax.with_sharding_constraint(inputs[0], sharding)]
        if self.plan is None:
            return results
        return [self._constrained(x, v) for x, v in zip(results, e.outputs, strict=True)]

    def _constrained(self, x: Any, value: Value) -> Any:
        assert self.plan is not None
        planned = self.plan.sharding(value)
        if planned.unreduced or not planned.is_even(self.mesh, value.shape) or not value.shape:
            return x
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh.jax_mesh, PartitionSpec(*(atoms or None for atoms in planned.dims)))
        )
