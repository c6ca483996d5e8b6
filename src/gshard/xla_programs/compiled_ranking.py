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
from gshard.explanation.compiled_source import CompiledCost, compiled_cost, source_of
from gshard.explanation.search_result import SearchResult
from gshard.lowering.pipeline import Planned
from gshard.search.find import Best, axes_text
from gshard.search.pricing import PricedPlan, as_run
from gshard.xla.tpu import estimated_cycles, topology_mesh

_HIDDEN = 0.005  # of the network's seconds: less is not worth a column


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledPlan:
    """A plan as XLA compiled it."""

    best: Best  # the search on its mesh;
    priced: PricedPlan  # the plan, with what the cost model says of it
    cost: CompiledCost | None  # of the compiled program; None if XLA does not compile it
    cycles: int = 0  # the compiler's own estimate, where it notes one (TPU); 0 elsewhere
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
        title = f"as XLA compiled them for {self.platform}, on {self.machine}"
        rows = [("plan", "modelled", "compiled", "sent", "peak", "hidden", "cycles")]
        for plan in self.plans:
            axes = axes_text(plan.best.mesh)
            name, modelled = f"{plan.priced.name} ({axes})", f"{format_ms(plan.priced.cost.seconds)}"
            if plan.cost is None:
                rows.append((name, modelled, plan.refused[:60], "", "", "", ""))
                continue
            network = plan.cost.network
            hidden = f"{100 * plan.cost.overlapped / network:.0f} %" if plan.cost.overlapped > _HIDDEN * network else ""
            compiled = f"{format_ms(plan.cost.seconds)} (x {plan.error:.2f})"
            sizes = format_bytes(plan.cost.sent), format_bytes(plan.cost.peak)
            rows.append((name, modelled, compiled, *sizes, hidden, f"{plan.cycles:,}" if plan.cycles else ""))
        shown = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
        wide = {i: max(len(row[i]) for row in rows) for i in shown}
        lines = ["  ".join(row[i].ljust(wide[i]) for i in shown).rstrip() for row in rows]
        return "\n".join([title, *(f"  {line}" for line in lines)])


def ranked(found: SearchResult, k: int) -> SearchResult:
    """A search with the plan that is the best as XLA compiled it, of the best ``k``."""
    ranking = compiled_ranking(found, k, devices_for(found))
    best, priced = ranking.best.best, ranking.best.priced
    if priced is not best.chosen:  # nothing is proven about a plan that the simplified model did not choose
        best = dataclasses.replace(best, chosen=priced, predicted=None)
    return dataclasses.replace(found, best=best, compiled=ranking)


def devices_for(found: SearchResult) -> Sequence[object]:
    """What plans are compiled for: the mesh's devices, those of a TPU by libtpu, or the first that JAX has."""
    return devices_on(found.plan.mesh, found.cost.machine)


def devices_on(mesh: Mesh, machine: Machine) -> Sequence[object]:
    """What plans on a mesh of a machine are compiled for: as ``devices_for``."""
    on = topology_mesh(machine) if mesh.devices is None and machine.topology else mesh.on_first_devices()
    assert on.devices is not None, "both have devices"
    return on.devices


@with_tables
def compiled_ranking(found: SearchResult, k: int, devices: Sequence[object]) -> CompiledRanking:
    """Compiles the best plans that a search priced, on all meshes that it tried."""
    made = [
        _compiled(best, priced, found.donated, devices) for best, priced in _best_plans(found.tried or (found.best,), k)
    ]
    ordered = tuple(sorted(made, key=lambda plan: plan.rank(plan.best.limit)))
    return CompiledRanking(ordered, str(getattr(devices[0], "platform", "")), found.cost.machine.name)


def _best_plans(tried: Iterable[Best], k: int) -> list[tuple[Best, PricedPlan]]:
    """The best plans of all meshes, by the cost model."""
    every = [(best, priced) for best in tried for priced in {best.chosen: 0, **dict.fromkeys(_others(best), 0)}]
    every.sort(key=lambda pair: pair[1].rank(pair[0].limit))
    different: dict[tuple[str, int, int], tuple[Best, PricedPlan]] = {}
    for best, priced in every:
        # Meshes of other shapes have the same plan in other words: it takes, sends and holds the same.
        cost = priced.cost
        different.setdefault((f"{cost.seconds:.9g}", cost.sent, cost.peak), (best, priced))
    return list(different.values())[:k]


def _others(best: Best) -> list[PricedPlan]:
    return [*([] if best.searched is None else [best.searched]), *best.others]


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
    program = source_of(compiled, Mesh.of(there.user_jax_mesh)).program
    return CompiledPlan(best, priced, compiled_cost(program, machine), estimated_cycles(program.module))
