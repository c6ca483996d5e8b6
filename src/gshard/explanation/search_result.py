"""SearchResult: what ``gshard.search`` returns: a plan, its cost, and a bound on the cost of the best one."""

from __future__ import annotations

import dataclasses
import functools

# Text of a search: what ``print(found)`` shows of the plan, the presets and meshes beside it, and the arguments.
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.memory_kinds import in_memory
from gshard.core.mesh import Mesh
from gshard.core.number_text import format_ms
from gshard.core.plan import Boundary, Plan
from gshard.core.program import Program, format_bytes
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.core.time_budget import TimeBudget
from gshard.device.cost import Cost
from gshard.device.memory import held_at_peak
from gshard.emit.partition import partition
from gshard.explanation.explain import Explanation
from gshard.explanation.plan_source import PlanSource, rows_of_tensors
from gshard.explanation.report.page import Page
from gshard.explanation.rows import array_lines
from gshard.explanation.verdict import does_not_pay, headline
from gshard.explanation.warnings import idle_devices
from gshard.lowering.pipeline import Planned
from gshard.naming.array_names import ArrayNames
from gshard.planning.added_marks import spec_of_cut
from gshard.planning.demands import by_axes
from gshard.planning.propagate import propagate
from gshard.planning.saved_plan import SavedPlan
from gshard.search.as_marks import Marks, marks_of, statements_of
from gshard.search.find import Best, axes_text, ended, how_near
from gshard.search.pricing import PricedPlan, Pricing, as_run, plans_of


def text_of_search(best: Best, tried: Sequence[Best], names: ArrayNames) -> str:
    """The best plan, why it takes its time, what was tried beside it, and how it splits the arguments."""
    plan, cost = best.chosen.plan, best.chosen.cost
    shape = axes_text(best.mesh)
    memory = f"peak {format_bytes(cost.peak)} of {format_bytes(int(best.limit))}"
    lines = [
        f"{format_ms(cost.seconds)} a call on {cost.machine.name}, mesh ({shape}); {memory}; "
        f"{format_bytes(cost.sent)} sent by each device"
    ]
    if best.chosen.recomputed:
        lines[0] += f"; give jit memory_limit={int(best.limit)} too, so that some values are recomputed"
    if not best.fits:
        lines += [
            "this DOES NOT FIT, and needs least of all that was tried. At its peak it holds:",
            *_held(best, names),
        ]
    else:
        lines.append(f"{how_near(best, is_one_of_several=len(tried) > 1)}; {best.seconds:.1f} s")
    if best.chosen is not best.searched:
        known = best.searched
        beside = "" if known is None else f"; the searched plan takes {format_ms(known.cost.seconds)}"
        lines.append(f"this is the plan of '{best.chosen.name}'{beside}")
    lines += filter(None, (headline(cost), does_not_pay(plan, cost)))
    lines += _idle(best, names)
    lines += ended(best.seconds, best.left_out, best.stopped, best.failed)
    shown = best_presets(tried or (best,))[:5]
    lines += ["presets"] if shown else []
    for o in shown:
        on = f" on mesh ({axes_text(o.plan.mesh)})" if len(tried) > 1 else ""
        lines.append(f"  {o.name} {format_ms(o.cost.seconds)}{_note(o.cost, best, on)}")
    for other in tried:
        if other is not best and (known := other.searched) is not None:
            lines.append(f"mesh ({axes_text(other.mesh)}): {format_ms(known.cost.seconds)}{_note(known.cost, best)}")
    arguments = [row for row in rows_of_tensors(plan, names, {}) if row.is_argument]
    return "\n".join([*lines, *array_lines("arguments", arguments, most=24)])


def best_presets(tried: Sequence[Best]) -> list[PricedPlan]:
    """Each preset on the mesh where it is best, of those for which it was priced; the best preset first."""
    best_of: dict[str, PricedPlan] = {}
    for plan in sorted((plan for best in tried for plan in best.others), key=lambda plan: plan.rank(tried[0].limit)):
        best_of.setdefault(plan.name, plan)
    return [*best_of.values()]


def _idle(best: Best, names: ArrayNames) -> list[str]:
    """Devices without work of their own, and those of this computer that the mesh leaves out."""
    mesh, lines = best.mesh, list(idle_devices(best.chosen.plan, names))
    if mesh.devices is not None and mesh.size < (there := len(mesh.devices[0].client.devices())):
        lines.append(f"the mesh has {mesh.size} of the {there} devices that there are; the others are not used")
    return lines


def _held(best: Best, names: ArrayNames) -> list[str]:
    """What takes most memory at the peak."""
    cost = best.chosen.cost
    held = held_at_peak(cost.memory, cost.program.block, best.chosen.plan.program, names)
    rows = [(cost.memory.arguments, "arguments"), *((row.bytes, str(row)) for row in held[:5])]
    return [f"  {format_bytes(n):>10} {what}" for n, what in rows]


def _note(cost: Cost, best: Best, on: str = "") -> str:
    return on if cost.peak <= best.limit else f"{on}, does not fit"


# Found: the result of ``gshard.search``: a plan, its cost, and a bound on its distance from the best.

_IN_A_BLOCK = "with gshard.instead_of_jit(mesh=found.mesh, plan=found.plan)"


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SearchResult(Page):
    """The plan that was found for a function, and what is known of it.

    Attributes:
        best: the search on the mesh that was chosen.
        tried: the searches on all meshes for which plans were priced, the most promising ones first.
        donated: the arguments whose memory results may take.
        in_tree: the structure of the arguments, positional and named.
        paths: the paths of the arguments, as ``gshard.shard_by_path`` has them; None if ``flax.nnx.jit``,
            ``equinox.filter_jit`` or the like returned the function, which takes its arguments apart.
        budget_seconds: the time that the search was given; what is found later has as much.
        progress: where the search printed its progress. Methods of the result print theirs there too.
    """

    best: Best
    tried: tuple[Best, ...] = ()
    donated: tuple[int, ...] = ()
    in_tree: Any = None
    paths: tuple[str, ...] | None = None
    budget_seconds: float | None = None
    progress: bool | Callable[[str], object] | None = None

    @property
    def plan(self) -> Plan:
        """The plan, for ``gshard.jit(f, mesh=found.mesh, plan=found.plan)`` or ``instead_of_jit``."""
        return self.best.chosen.plan

    @property
    def mesh(self) -> Mesh:
        """The mesh that it is for, with the names of its axes."""
        return self.best.mesh

    @property
    def cost(self) -> Cost:
        """What a call takes on each device, as ``gshard cost`` tells it."""
        return self.best.chosen.cost

    @property
    def in_shardings(self) -> Any:
        """How the plan cuts the positional arguments, as ``in_shardings`` of ``gshard.jit`` takes it.

        Raises:
            ArgumentError: a framework jits the function, and takes its arguments apart.
        """
        self.refuse_framework()
        program = self.plan.program
        arguments = program.block.inputs[len(program.captured) :]
        specs = [spec_of_cut(self.plan.shardings[v], self.plan.mesh) for v in arguments]
        return jax.tree.unflatten(self.in_tree, specs)[0]

    def named(self, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
        """The shardings of the plan for ``jax.jit(in_shardings=..., out_shardings=...)``, on a mesh with Auto axes.

        They are even and over whole axes, as ``jax.jit`` takes them: what the plan splits further is split inside.
        Those of arrays in the memory of the host have its memory kind. Arguments by keyword have none in ``jax.jit``.

        Returns:
            the shardings of the positional arguments, and of the results.

        Raises:
            ArgumentError: a framework jits the function, or it writes references (``jax.Ref``).
        """
        self.refuse_framework()
        program, spmd = self.plan.program, self.explain().spmd
        if program.references:
            raise ArgumentError(
                "jax.jit has no shardings for references (jax.Ref) that a function writes.",
                user_line(),
                hint="Run gshard.jit(f, mesh=found.mesh, plan=found.plan), or return the new values instead.",
            )

        def on_mesh(end: Sequence[Sharding], memory: Callable[[int], str]) -> list[NamedSharding]:
            specs = (spec_of_cut(by_axes(Sharding(s.dims), spmd.mesh), spmd.mesh) or PartitionSpec() for s in end)
            return [in_memory(NamedSharding(mesh, spec), memory(i)) for i, spec in enumerate(specs)]

        entering = on_mesh(spmd.in_shardings, program.input_memory)
        leaving = on_mesh(spmd.out_shardings, program.output_memory)
        positional, _ = jax.tree.unflatten(self.in_tree, entering[len(program.captured) :])
        return positional, jax.tree.unflatten(program.out_tree, leaving)

    @property
    def bound(self) -> float:
        """Seconds that no plan without pipelines takes less than on this mesh, in the simplified model.

        If ``best.is_limited``, not all plans over whole axes were compared, and the bound is of those that were.
        That model is the problem that was solved. It counts each collective and each kernel by itself, so the full
        price of a plan (``cost``) may be below this bound (collectives that share a message) or above the plan's own
        time in the model (copies, kernels that are not fused).
        """
        return self.best.bound

    @property
    def gap(self) -> float | None:
        """How much of this plan's time could at most be saved on this mesh, as a part of it, in the simplified model.

        0 is a plan that is optimal there. None where nothing is proven about this plan: it does not fit, values of it
        are recomputed, it has collective matmuls, it is a preset, or the search ended before it had a bound.
        """
        return self.best.gap

    @property
    def stopped(self) -> int | None:
        """The signal that ended the search early (``signal.SIGINT``, ``signal.SIGTERM``); None if none did."""
        return self.best.stopped

    @property
    def left_out(self) -> tuple[str, ...]:
        """What was not tried, or cut, since the time was over."""
        return self.best.left_out

    @property
    def failed(self) -> tuple[str, ...]:
        """What was not tried, since it ended with an error, each with the first line of the error."""
        return self.best.failed

    @property
    def presets(self) -> list[PricedPlan]:
        """The plans that people write by hand, each on the best mesh of those it was priced for; the best first."""
        return best_presets(self.tried or (self.best,))

    @functools.cached_property
    def names(self) -> ArrayNames:
        """What the arrays of the program are called where they are printed."""
        return ArrayNames(self.plan.program)

    @functools.cached_property
    def marks(self) -> Marks:
        """The plan said in few marks, each of them tried: how much of its speed they alone give.

        Takes as long as the search may take (``budget_seconds``, or 300 seconds) at most, and prints its progress as
        the search did. The marks that were found by then are returned, with ``left_out``.
        """
        budget = TimeBudget.of(self.budget_seconds, self.progress)
        found = marks_of(self.best.chosen, self.best.limit, lambda marked: self._priced("marks", marked), budget)
        if self.paths is None:
            return found.placed_by_user()
        return dataclasses.replace(found, statements=statements_of(found, self.paths))

    def _priced(self, name: str, program: Program) -> PricedPlan:
        return Pricing(self.cost.machine, list(self.donated), self.best.limit).marked(name, program, self.plan.mesh)

    def refuse_framework(self) -> None:
        """Refuses a function that a framework jits, where shardings of its own arguments are needed.

        Raises:
            ArgumentError: it is one.
        """
        if self.paths is None:
            raise ArgumentError(
                f"{self.plan.program.name} is jitted by a framework, which takes its arguments apart: gshard has no "
                "shardings for them as you give them, and no table of names.",
                user_line(),
                hint=f"Run the plan in a block: {_IN_A_BLOCK}.",
            )

    def explain(self) -> Explanation:
        """What each tensor got and why, as ``gshard.explain`` tells it of a marked function."""
        first, machine = len(self.plan.program.captured), self.cost.machine
        boundary = Boundary(tuple(first + i for i in self.donated))

        limit = int(self.best.limit)

        def marked(program: Program, by_bytes: bool = False) -> SpmdProgram:
            if by_bytes:
                return partition(propagate(program, self.plan.mesh, boundary=boundary))
            found, *_ = plans_of(program, self.plan.mesh, machine, boundary=boundary)
            return run(found)

        def run(made: Planned, *, recomputes: bool = False) -> SpmdProgram:
            found = as_run(made, machine, self.donated, limit, recomputes=recomputes)
            assert found.spmd is not None
            return found.spmd

        spmd = run(Planned(self.plan), recomputes=self.best.chosen.recomputed)
        source = PlanSource(plan=self.plan, spmd=spmd, donated=frozenset(self.donated), marked=marked)
        return Explanation(source, machine)

    def _page_data(self) -> dict[str, Any]:
        known = [str(self), *([str(self.marks)] if "marks" in self.__dict__ else [])]  # marks take a while
        return self.explain().data(self.cost.machine) | {"searched": "\n\n".join(known)}

    def save(self, path: str | Path) -> None:
        """Writes the plan; ``gshard.jit(f, mesh=..., plan=gshard.SavedPlan.load(path))`` runs it, in any process."""
        SavedPlan.of(self.plan).save(path)

    def __str__(self) -> str:
        return text_of_search(self.best, self.tried, self.names)

    __repr__ = __str__
