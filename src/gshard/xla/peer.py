"""Peer: compiles the same program with XLA's own partitioner, for comparison.

Marks become ``jax.lax.with_sharding_constraint``; everything else is left as the user wrote it, and ``jax.jit``
hands the rest to GSPMD or Shardy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import PlanError
from gshard.core.mark import resolve
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Constant, Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.language.mark_primitive import mark_p
from gshard.language.region import Interpreter


def xla_function(
    program: Program,
    mesh: Mesh,
    plan: Plan | None = None,
    *,
    ignored: Collection[Value] = (),
) -> Callable[..., list[Any]]:
    """A function of the program's flat inputs (captured arrays first) that XLA's partitioner can be given."""
    inside = [e for e in program.block.walk() if e.rule is not None and e.rule.manual is not None]
    if inside:
        raise PlanError(
            "a program with a shard_map that leaves axes automatic cannot be handed to XLA's partitioner from here.",
            next((e.line for e in inside if e.line), None),
            hint="Compile the function itself: jax.jit(f).lower(...).compile().",
        )
    replay = Marked(mesh, plan, ignored)
    return lambda *arrays: replay.run(program.block, arrays)


@dataclasses.dataclass(frozen=True)
class Marked(Interpreter):
    """Runs blocks on whole arrays; marks are constraints."""

    mesh: Mesh
    plan: Plan | None = None
    ignored: Collection[Value] = ()

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs an equation; a mark is a constraint."""
        if e.primitive is mark_p and e.outputs[0] in self.ignored:
            results: Sequence[Any] = [inputs[0]]
        elif e.mark is None:
            results = super().equation(e, inputs)
        else:
            demand = resolve(e.mark, self.mesh, e.outputs[0].shape, e.line)
            entries = [
                PartitionSpec.UNCONSTRAINED if is_open else atoms or None
                for atoms, is_open in zip(demand.dims, demand.open, strict=True)
            ]
            sharding = NamedSharding(self.mesh.jax_mesh, PartitionSpec(*entries))
            results = [jax.lax.with_sharding_constraint(inputs[0], sharding)]
        return self.with_plan(e, results)

    def with_plan(self, e: Equation, results: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation, constrained to the shardings of the plan."""
        if self.plan is None:
            return results
        return [self.constrained(x, v, self.plan.sharding(v)) for x, v in zip(results, e.outputs, strict=True)]

    def constrained(self, x: Any, value: Value | Constant, planned: Sharding) -> Any:
        """An array that is constrained to a sharding, if JAX has it."""
        if planned.unreduced or not planned.is_even(self.mesh, value.shape) or not value.shape:
            return x
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh.jax_mesh, PartitionSpec(*(atoms or None for atoms in planned.dims)))
        )
