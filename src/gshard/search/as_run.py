"""As run: the program that devices run for a plan on a machine, and what it costs.

``jit``, ``explain``, ``search`` with its presets, and the command line all price a plan by what is made here. So one
program has one modelled time, whoever is asked.

    with_rings   contractions become collective matmuls where a call is faster then
    in_memory    values are recomputed where a limit of memory asks for it; loops fetch ahead where that is faster
    as_run       both, with the cost
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from gshard.analysis.cost import Cost, cost
from gshard.analysis.machine import Machine
from gshard.analysis.overlap import Windowed
from gshard.core.spmd import SpmdProgram
from gshard.passes.partition import partition
from gshard.passes.windowed import Policy, windowed
from gshard.remat.prefetch import prefetched
from gshard.remat.rematerialise import rematerialise
from gshard.search.propagated import Propagated


def with_rings(
    made: Propagated, policy: Policy | None, machine: Machine, donated: Iterable[int], limit: int | None = None
) -> Propagated:
    """A plan, or the same with collective matmuls if a call then takes less time.

    Args:
        made: the plan.
        policy: which contractions may be collective matmuls.
        machine: tells what takes how long.
        donated: arguments (counted without captured arrays) whose memory results may take.
        limit: bytes that a device may hold; the machine's memory if None.
    """
    plan = windowed(made.plan, policy)
    if not plan.rings:
        return made
    donated = list(donated)
    made, other = _priced(made, machine, donated), _priced(Propagated(plan), machine, donated)

    def seconds(one: Propagated) -> float:
        assert one.spmd is not None
        ahead = in_memory(one.spmd, machine, donated, limit, one.cost).prefetched
        return one.seconds if ahead is None else ahead.seconds

    without, taken = seconds(made), seconds(other)
    if taken >= without:
        return made
    return dataclasses.replace(other, plan=dataclasses.replace(plan, spared=(without, taken, machine.name)))


def in_memory(
    kept: SpmdProgram,
    machine: Machine,
    donated: Iterable[int],
    limit: int | None = None,
    known: Cost | None = None,
    *,
    recomputes: bool = False,
) -> SpmdProgram:
    """A program recomputed as far as a limit of memory asks, whose loops fetch ahead where that is faster.

    Args:
        kept: the program without recomputation.
        machine: tells what takes how long.
        donated: arguments (counted without captured arrays) whose memory results may take.
        limit: bytes that a device may hold; the machine's memory if None.
        known: what ``kept`` costs, if that is known.
        recomputes: whether values are recomputed to keep to the limit.

    Raises:
        MemoryLimitError: with ``recomputes``, it does not fit.
    """
    donated = sorted(donated)
    room = machine.memory if limit is None else limit
    made = rematerialise(kept, room, machine, donated) if recomputes else kept
    return prefetched(made, machine, donated, room, known if made is kept else None)


def as_run(
    made: Propagated,
    machine: Machine,
    donated: Iterable[int],
    limit: int | None = None,
    *,
    recomputes: bool = False,
    rings: bool = True,
) -> Propagated:
    """A plan, the program that runs, and what it costs; arguments as above.

    Args:
        rings: whether contractions become collective matmuls where that is faster, as ``jit`` has it by default.
    """
    donated = list(donated)
    policy = Windowed.of(None, made.plan.mesh, machine) if rings and not made.plan.rings else None
    if policy is not None:
        made = with_rings(made, policy, machine, donated, limit)
    made = _priced(made, machine, donated)
    assert made.spmd is not None
    spmd = in_memory(made.spmd, machine, donated, limit, made.cost, recomputes=recomputes)
    return made if spmd is made.spmd else Propagated(made.plan, spmd, cost(spmd, machine, donated))


def _priced(made: Propagated, machine: Machine, donated: Iterable[int]) -> Propagated:
    """The same, with its program and its cost."""
    if made.spmd is not None and made.cost is not None:
        return made
    spmd = made.spmd or partition(made.plan)
    return Propagated(made.plan, spmd, cost(spmd, machine, donated))
