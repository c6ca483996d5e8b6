"""Peer: the same program under XLA's own partitioner, to measure against.

Marks become ``jax.lax.with_sharding_constraint``; everything else is left as the user wrote it, and ``jax.jit``
hands the rest to GSPMD or Shardy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.mark import resolve
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Block, Constant, Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.rules.region import REGIONS


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
    replay = _Replay(mesh, plan)
    return lambda *arrays: replay.run(program.block, arrays)


@dataclasses.dataclass(frozen=True)
class _Replay:
    """Runs blocks on whole arrays; marks are constraints."""

    mesh: Mesh
    plan: Plan | None = None

    def sharding(self, value: Value | Constant) -> Sharding:
        """Nothing is split by us."""
        return Sharding.replicated(len(value.shape))

    def move(self, value: Value | Constant, array: Any, target: Sharding, equation: Equation) -> Any:
        """Nothing is moved by us."""
        return array

    def run(self, block: Block, arrays: Sequence[Any], trips: int = 1) -> list[Any]:
        """Runs a block on global arrays."""
        env: dict[Value, Any] = dict(zip(block.inputs, arrays, strict=True))

        def read(v: Value | Constant) -> Any:
            return v.value if isinstance(v, Constant) else env[v]

        for e in block.equations:
            inputs = [read(v) for v in e.inputs]
            region = REGIONS.get(e.name)
            if region is not None:
                results = list(region.emit(e, self, [jnp.asarray(x) for x in inputs]))
            elif e.mark is not None:
                demand = resolve(e.mark, self.mesh, e.outputs[0].shape, e.line)
                entries = [
                    PartitionSpec.UNCONSTRAINED if is_open else atoms or None
                    for atoms, is_open in zip(demand.dims, demand.open, strict=True)
                ]
                sharding = NamedSharding(self.mesh.jax_mesh, PartitionSpec(*entries))
                results = [jax.lax.with_sharding_constraint(inputs[0], sharding)]
            else:
                out = e.primitive.bind(*inputs, **e.params)
                results = list(out) if e.primitive.multiple_results else [out]
            if self.plan is not None and region is None:
                results = [self._constrained(x, v) for x, v in zip(results, e.outputs, strict=True)]
            env.update(zip(e.outputs, results, strict=True))
        return [jnp.asarray(read(v)) for v in block.outputs]

    def _constrained(self, x: Any, value: Value) -> Any:
        assert self.plan is not None
        planned = self.plan.sharding(value)
        if planned.unreduced or not planned.is_even(self.mesh, value.shape) or not value.shape:
            return x
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh.jax_mesh, PartitionSpec(*(atoms or None for atoms in planned.dims)))
        )
