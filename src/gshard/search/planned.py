"""Chooses the plan of a settled program: the stage "choose" of ``search.pipeline``.

Without a machine it is the plan that sends least. With a machine there are three: that one, the one that takes least
time if each message is sent by itself, and the one that takes least time if sums that are ready together share a
message. Which sums share one is known only once there is a plan. So all three are partitioned and priced, and the
fastest one that fits the machine's memory is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.program_boundary import AS_MARKED, Boundary
from gshard.core.spmd import SpmdProgram
from gshard.device.cost import WORTH, Cost, cost
from gshard.device.machine import Machine
from gshard.emit.partition import partition
from gshard.planning.objective import Objective, bytes_on
from gshard.planning.propagate import Choice, choose, propagate
from gshard.planning.propagated import Propagated
from gshard.search.seconds import on_machine, seconds_on


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what is known of it.

    Attributes:
        plan: the plan.
        spmd: what it becomes, if that had to be known to choose it;
        cost: and what that costs.
        choice: poses the problem again that the plan is a solution of, and gives what was chosen in it: None if nothing
            was to be chosen. None for a plan that was given.
    """

    plan: Plan
    spmd: SpmdProgram | None = None
    cost: Cost | None = None
    choice: Callable[[], Choice | None] | None = None

    @property
    def seconds(self) -> float:
        """What it takes, if that had to be known."""
        return math.inf if self.cost is None else self.cost.seconds

    def rank(self, worth: float = 1.0) -> tuple[bool, float]:
        """Orders priced plans, the better first: by time those that fit the machine's memory, by memory the others.

        Args:
            worth: by which the number is multiplied, of a plan that is taken unless another one is better by more.
        """
        assert self.cost is not None
        fits = self.cost.fits
        return not fits, worth * (self.cost.seconds if fits else self.cost.peak)


def cheapest(
    propagated: Propagated, machine: Machine | None, *, strict: bool = False, boundary: Boundary = AS_MARKED
) -> tuple[Planned, ...]:
    """The plans of a settled program, the best first.

    Args:
        propagated: the settled program with what follows from its marks.
        machine: gives the times; bytes count if None.
        strict: refuse primitives that have no rule.
        boundary: constraints on arguments and results, besides marks.

    Raises:
        PlanError: ``strict``, and a primitive without rule, or something that the program says and gshard drops.
    """
    program, mesh = propagated.program, propagated.mesh
    if machine is not None:
        propagated = dataclasses.replace(propagated, mesh=on_machine(mesh, machine))

    def planned(known: Propagated, objective: Callable[[Mesh, tuple[Atoms, ...]], Objective]) -> Planned:
        plan = propagate(program, known.mesh, strict=strict, boundary=boundary, objective=objective, propagated=known)
        return Planned(plan, choice=functools.partial(choose, known, objective, boundary))

    least = planned(propagated, bytes_on)
    if machine is None or not least.plan.counted:  # nothing was to be chosen
        return (least,)
    first = len(program.captured)

    def priced(made: Planned) -> Planned:
        spmd = partition(made.plan)
        return dataclasses.replace(made, spmd=spmd, cost=cost(spmd, machine, [i - first for i in boundary.donated]))

    shared = dataclasses.replace(propagated, mesh=on_machine(propagated.mesh, machine, joined=True))
    sends_least = priced(least)
    alone = planned(propagated, seconds_on(machine, call=sends_least.seconds))
    if alone.plan.runs_as(least.plan):
        alone = dataclasses.replace(alone, spmd=sends_least.spmd, cost=sends_least.cost)
    else:
        alone = priced(alone)
    faster = [alone, priced(planned(shared, seconds_on(machine, joined=True, call=sends_least.seconds)))]
    faster.sort(key=lambda made: made.rank())
    if faster[0].rank() < sends_least.rank(WORTH):
        return *faster, sends_least
    return sends_least, *faster
