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
from gshard.core.rule import operand_sharding, result_sharding
from gshard.core.sharding import Sharding
from gshard.language.mark_primitive import mark_p
from gshard.language.region import Interpreter


def xla_function(
    program: Program,
    mesh: Mesh,
    plan: Plan | None = None,
    *,
    turns_only: bool = False,
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
    replay = _Turned(mesh, plan) if plan is not None and turns_only else _Marked(mesh, plan, ignored)
    return lambda *arrays: replay.run(program.block, arrays)


@dataclasses.dataclass(frozen=True)
class _Marked(Interpreter):
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
        return self._results(e, results)

    def _results(self, e: Equation, results: Sequence[Any]) -> Sequence[Any]:
        if self.plan is None:
            return results
        return [self._constrained(x, v, self.plan.sharding(v)) for x, v in zip(results, e.outputs, strict=True)]

    def _constrained(self, x: Any, value: Value | Constant, planned: Sharding) -> Any:
        if planned.unreduced or not planned.is_even(self.mesh, value.shape) or not value.shape:
            return x
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh.jax_mesh, PartitionSpec(*(atoms or None for atoms in planned.dims)))
        )


class _Turned(_Marked):
    """Both sides of each all-to-all of a plan are constraints."""

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs an equation; what is split along other dimensions on its way in or out is constrained twice."""
        assert self.plan is not None
        split, arrays = self.plan.splits.get(e, {}), list(inputs)
        for i, v in enumerate(e.inputs):
            enters = self.plan.sharding(e.outputs[0]) if e.mark else operand_sharding(e.operator_rule, i, split)
            arrays[i] = self._turned(arrays[i], v, self.plan.sharding(v), enters)
        results = super().equation(e, arrays)
        if e.mark:
            return results
        return [
            self._turned(x, v, result_sharding(e.operator_rule, i, split), self.plan.sharding(v))
            for i, (x, v) in enumerate(zip(results, e.outputs, strict=True))
        ]

    def _results(self, e: Equation, results: Sequence[Any]) -> Sequence[Any]:
        return results

    def _turned(self, x: Any, value: Value | Constant, before: Sharding, after: Sharding) -> Any:
        if before.dims == after.dims or _atoms(before) != _atoms(after):
            return x
        return self._constrained(self._constrained(x, value, before), value, after)


def _atoms(sharding: Sharding) -> set[str]:
    return {atom for atoms in sharding.dims for atom in atoms}
