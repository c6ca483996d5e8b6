"""Peer: compiles the same program with XLA's own partitioner, for comparison.

Marks become ``jax.lax.with_sharding_constraint``; everything else is left as the user wrote it, and ``jax.jit``
hands the rest to GSPMD or Shardy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import PlanError
from gshard.core.mark import resolve
from gshard.core.mesh import Mesh
from gshard.core.program import Equation, Program
from gshard.language.region import Interpreter


def xla_function(program: Program, mesh: Mesh) -> Callable[..., list[Any]]:
    """A function of the program's flat inputs (captured arrays first) that XLA's partitioner can be given."""
    inside = [e for e in program.block.walk() if e.rule is not None and e.rule.manual is not None]
    if inside:
        raise PlanError(
            "a program with a shard_map that leaves axes automatic cannot be handed to XLA's partitioner from here.",
            next((e.line for e in inside if e.line), None),
            hint="Compile the function itself: jax.jit(f).lower(...).compile().",
        )
    replay = Marked(mesh)
    return lambda *arrays: replay.run(program.block, arrays)


@dataclasses.dataclass(frozen=True)
class Marked(Interpreter):
    """Runs blocks on whole arrays; marks are constraints."""

    mesh: Mesh

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs an equation; a mark is a constraint."""
        if e.mark is None:
            return super().equation(e, inputs)
        demand = resolve(e.mark, self.mesh, e.outputs[0].shape, e.line)
        entries = [
            PartitionSpec.UNCONSTRAINED if is_open else atoms or None
            for atoms, is_open in zip(demand.dims, demand.open, strict=True)
        ]
        sharding = NamedSharding(self.mesh.jax_mesh, PartitionSpec(*entries))
        return [jax.lax.with_sharding_constraint(inputs[0], sharding)]
