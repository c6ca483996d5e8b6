"""Compiled ranking: compiles the best plans of a search, and orders them by what the compiler made of them.

The cost model prices programs before XLA fuses and schedules them. Here each plan is compiled for the machine and read:
what it sends and holds, its time, and how far the model was off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax

from gshard.core.mesh import Mesh
from gshard.core.number_text import format_ms
from gshard.core.planning_tables import with_tables
from gshard.core.program import format_bytes
from gshard.device.machine import Machine
from gshard.emit.compile import compile_spmd
from gshard.explanation.compiled_source import CompiledCost, source_of
from gshard.explanation.search_result import SearchResult
from gshard.lowering.pipeline import Planned
from gshard.search.find import Best, axes_text
from gshard.search.pricing import PricedPlan, as_run
from gshard.xla.tpu import topology_mesh


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledPlan:
    """A plan as XLA compiled it."""

    best: Best  # the search on its mesh;
    priced: PricedPlan  # the plan, with what the cost model says of it
    cost: CompiledCost | None  # of the compiled program; None if XLA does not compile it
    refused: str = ""  # what XLA says if it does not compile it: that it does not fit, for example

    @property
    def error(self) -> float:
        """The compiled program's time as a multiple of the modelled one; 0 if there is none."""
        modelled = self.priced.cost.seconds
        return self.cost.seconds / modelled if self.cost is not None and modelled else 0.0

    def rank(self, limit: float) -> tuple[bool, bool, float]:
        """Orders plans, the better first: those that compile, of them those that fit, of them by time."""
        if self.cost is None:
            return True, True, self.priced.cost.seconds
        return False, self.cost.peak > limit, self.cost.seconds

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """Its row in the table of a ranking."""
        first = f"{self.priced.name} ({axes_text(self.best.mesh)})", format_ms(self.priced.cost.seconds)
        if self.cost is None:
            return *first, self.refused[:60], "", ""
        compiled = f"{format_ms(self.cost.seconds)} (x {self.error:.2f})"
        return *first, compiled, format_bytes(self.cost.sent), format_bytes(self.cost.peak)


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledRanking:
    """The best plans of a search, as XLA compiled them; the best first."""

    plans: tuple[CompiledPlan, ...]  # those that were compiled
    platform: str  # what they were compiled for
    machine: str  # what their times are modelled on

    @property
    def best(self) -> CompiledPlan:
        """The best of them."""
        return self.plans[0]

    def __str__(self) -> str:
        rows = [("plan", "modelled", "compiled", "sent", "peak"), *(plan.row for plan in self.plans)]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(text.ljust(n) for text, n in zip(row, wide, strict=True)).rstrip() for row in rows]
        return "\n  ".join([f"as XLA compiled them for {self.platform}, on {self.machine}", *lines])


def devices_for(found: SearchResult) -> Sequence[object]:
    """What plans are compiled for: the mesh's devices, those of a TPU by libtpu, or the first that JAX has."""
    return devices_on(found.plan.mesh, found.cost.machine)


def devices_on(mesh: Mesh, machine: Machine) -> Sequence[object]:
    """What plans on a mesh of a machine are compiled for: as ``devices_for``."""
    on = topology_mesh(machine) if mesh.devices is None and machine.topology else mesh.on_first_devices()
    assert on.devices is not None, "both have devices"
    return on.devices


@with_tables
def ranked(found: SearchResult, k: int) -> SearchResult:
    """A search with the plan that is the best as XLA compiled it, of the best ``k`` on all meshes that it tried."""
    devices, pairs = devices_for(found), _best_plans(found.tried or (found.best,), k)
    made = sorted(
        (_compiled(best, priced, found.donated, devices) for best, priced in pairs),
        key=lambda plan: plan.rank(plan.best.limit),
    )
    best, priced = made[0].best, made[0].priced
    if priced is not best.chosen:  # nothing is proven about a plan that the simplified model did not choose
        best = dataclasses.replace(best, chosen=priced, predicted=None)
    platform = str(getattr(devices[0], "platform", ""))
    return dataclasses.replace(
        found, best=best, compiled=CompiledRanking(tuple(made), platform, found.cost.machine.name)
    )


def _best_plans(tried: Iterable[Best], k: int) -> list[tuple[Best, PricedPlan]]:
    """The best plans of all meshes, by the cost model."""
    every = [
        (best, priced)
        for best in tried
        for priced in dict.fromkeys((best.chosen, best.searched, *best.others))
        if priced is not None
    ]
    every.sort(key=lambda pair: pair[1].rank(pair[0].limit))
    different: dict[tuple[str, int, int], tuple[Best, PricedPlan]] = {}
    for best, priced in every:
        # Meshes of other shapes have the same plan in other words: it takes, sends and holds the same.
        cost = priced.cost
        different.setdefault((f"{cost.seconds:.9g}", cost.sent, cost.peak), (best, priced))
    return list(different.values())[:k]


def _compiled(best: Best, priced: PricedPlan, donated: Sequence[int], devices: Sequence[object]) -> CompiledPlan:
    """Compiles one plan for devices."""
    mesh = priced.plan.mesh
    there = dataclasses.replace(mesh, devices=tuple(devices)) if mesh.devices is None else mesh
    plan = dataclasses.replace(priced.plan, mesh=there)
    machine = priced.cost.machine
    run = as_run(Planned(plan), machine, donated, int(best.limit), recomputes=priced.recomputed)
    assert run.spmd is not None, "it is partitioned to be priced"
    try:
        compiled = compile_spmd(run.spmd, frozenset(donated)).compiled
    except jax.errors.JaxRuntimeError as error:
        return CompiledPlan(best, priced, None, refused=str(error).splitlines()[0])
    return CompiledPlan(best, priced, source_of(compiled, Mesh.of(there.user_jax_mesh)).cost(machine))
