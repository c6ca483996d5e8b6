"""Chooses the plan of a settled program: the stage "choose" of ``search.pipeline``.

Without a machine, it is the plan that sends the fewest bytes. With a machine, there are three candidates: that plan,
the fastest plan if every message is sent alone, and the fastest plan if sums that are ready together share a message.
Which sums share a message is known only once there is a plan. So gshard partitions and prices all three. It keeps the
plan that sends the fewest bytes unless another one is better: it fits the machine's memory where this one does not, it
saves time, or it saves memory in no more time.
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
    """A plan, with its per-device program and cost if choosing it required them."""

    plan: Plan  # the plan
    spmd: SpmdProgram | None = None  # the per-device program; None if it is not emitted yet
    cost: Cost | None = None  # the cost of that program; None if it is not priced yet
    # builds and solves the problem of the plan again; it returns None if nothing was open. None for a plan that was
    # given.
    choice: Callable[[], Choice | None] | None = None
    planning_seconds: float = 0.0  # processor time of this thread that planning took; 0 if not measured

    @property
    def seconds(self) -> float:
        """The seconds of a call; ``inf`` if the plan is not priced."""
        return math.inf if self.cost is None else self.cost.seconds

    @property
    def rank(self) -> tuple[bool, float]:
        """Orders priced plans, the better first: plans that fit the machine's memory by time, the others by memory."""
        assert self.cost is not None
        fits = self.cost.fits
        return not fits, self.cost.seconds if fits else self.cost.peak

    def is_better(self, other: Planned) -> bool:
        """Whether this plan fits memory and the other does not, or saves time, or saves memory in no more time.

        Both plans are priced. To save is to save more than ``WORTH`` leaves.
        """
        (fits, value), (other_fits, other_value) = self.rank, other.rank
        if fits != other_fits:  # True for a plan that does not fit
            return fits < other_fits
        assert self.cost is not None
        assert other.cost is not None
        return value < WORTH * other_value or (value <= other_value and self.cost.peak < WORTH * other.cost.peak)


def cheapest(
    propagated: Propagated, machine: Machine | None, *, strict: bool = False, boundary: Boundary = AS_MARKED
) -> tuple[Planned, ...]:
    """The plans of a settled program, the best first."""
    program, mesh = propagated.program, propagated.mesh
    if machine is not None:
        propagated = dataclasses.replace(propagated, mesh=on_machine(mesh, machine))

    def planned(known: Propagated, objective: Callable[[Mesh, tuple[Atoms, ...]], Objective]) -> Planned:
        plan = propagate(program, known.mesh, strict=strict, boundary=boundary, objective=objective, propagated=known)
        return Planned(plan, choice=functools.partial(choose, known, objective, boundary))

    fewest_bytes = planned(propagated, bytes_on)
    if machine is None or not fewest_bytes.plan.counted:  # nothing was open
        return (fewest_bytes,)
    first_argument = len(program.captured)
    donated = [i - first_argument for i in boundary.donated]

    def priced(candidate: Planned) -> Planned:
        spmd = partition(candidate.plan)
        return dataclasses.replace(candidate, spmd=spmd, cost=cost(spmd, machine, donated))

    fewest_bytes = priced(fewest_bytes)
    call = fewest_bytes.seconds
    alone = planned(propagated, seconds_on(machine, call=call))
    if alone.plan.runs_as(fewest_bytes.plan):
        alone = dataclasses.replace(alone, spmd=fewest_bytes.spmd, cost=fewest_bytes.cost)
    else:
        alone = priced(alone)
    joined_mesh = on_machine(propagated.mesh, machine, joined=True)
    joined = planned(dataclasses.replace(propagated, mesh=joined_mesh), seconds_on(machine, joined=True, call=call))
    faster = sorted([alone, priced(joined)], key=lambda candidate: candidate.rank)
    return (*faster, fewest_bytes) if faster[0].is_better(fewest_bytes) else (fewest_bytes, *faster)
