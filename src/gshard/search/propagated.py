"""Propagated: the plan that follows from a program's marks, as ``jit``, presets and marks that are tried all make it.

Without a machine it is the plan that sends least. With one there are two: that one, and the one that the model finds
to take least time. Both are partitioned and priced, and the faster one is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gshard.analysis.cost import Cost, cost
from gshard.analysis.machine import Machine
from gshard.core.border import AS_MARKED, Border
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.program import Program
from gshard.core.spmd import SpmdProgram
from gshard.passes.facts import facts_of
from gshard.passes.objective import Objective, bytes_on
from gshard.passes.partition import partition
from gshard.passes.propagate import propagate
from gshard.search.seconds import seconds_on

# Of the time of the plan that sends least: what takes longer than so much of it is not worth more bytes.
_WORTH = 0.98


@dataclasses.dataclass(frozen=True, slots=True)
class Propagated:
    """A plan, and what is known of it.

    Attributes:
        plan: the plan.
        spmd: what it becomes, if that had to be known to choose it;
        cost: and what that costs.
    """

    plan: Plan
    spmd: SpmdProgram | None = None
    cost: Cost | None = None


def propagated(
    program: Program,
    mesh: Mesh,
    machine: Machine | None,
    *,
    strict: bool = False,
    border: Border = AS_MARKED,
) -> tuple[Propagated, ...]:
    """Completes the user's marks to plans, the best first; arguments and errors as of ``passes.propagate``.

    Args:
        program: the traced function.
        mesh: the devices; with a machine, with its times (``seconds.on_machine``).
        machine: whose time counts; bytes count if None.
        strict: refuse primitives that have no rule.
        border: what is asked of arguments and results.
    """
    facts = facts_of(program, mesh)

    def planned(objective: Callable[[Mesh, tuple[Atoms, ...]], Objective]) -> Plan:
        return propagate(program, mesh, strict=strict, border=border, objective=objective, facts=facts)

    least = planned(bytes_on)
    if machine is None:
        return (Propagated(least),)
    first = len(program.captured)
    found = []
    for plan in (least, planned(seconds_on(machine))):
        spmd = partition(plan)
        found.append(Propagated(plan, spmd, cost(spmd, machine, [i - first for i in border.donated])))
    sends_least, fastest = (made.cost.seconds for made in found if made.cost is not None)
    return tuple(found[::-1] if fastest < _WORTH * sends_least else found)
