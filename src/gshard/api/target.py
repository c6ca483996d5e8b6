"""Target: the devices and the options that a function is partitioned for."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from collections.abc import Hashable
from typing import Any

import jax

from gshard.core.layout import Layout
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.plan import AS_MARKED, Boundary, Plan
from gshard.core.processes import Group
from gshard.core.program import MESH, Program, format_block
from gshard.core.spmd import SpmdProgram
from gshard.device.cost import Cost
from gshard.device.machine import Machine, machine_of, machine_to_plan_for
from gshard.emit.compile import Executable, compile_spmd
from gshard.explanation.advice import allowed_bytes, check_bytes
from gshard.explanation.plan_source import refuse_unused
from gshard.lowering.pipeline import PARTITION, PLANNING, RECOMPUTE, Draft, Planned, Settings, run
from gshard.lowering.seconds import on_machine
from gshard.planning.collective_matmuls import CollectiveMatmul
from gshard.planning.demands import at_boundary
from gshard.planning.propagate import in_best_order
from gshard.planning.saved_plan import SavedPlan
from gshard.remat.rematerialise import bytes_of, compiled_within


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kept:
    """The options of ``jit`` that a target has as they are given."""

    strict: bool = False  # refuse operations without a rule
    budget: float | None = None  # bytes that each device may send in one call
    leaves_by_axes: bool = False  # split results over whole axes of the mesh only, as JAX does for Explicit axes
    has_places: bool = False  # marks in the function already say where its arguments lie
    memory_limit: int | None = None  # bytes that a device may hold; values are recomputed to keep to it
    keep_unused: bool = False  # pass XLA the arguments that nothing reads
    compiler_options: tuple[tuple[str, Any], ...] = ()  # XLA's, as pairs
    recorded: SavedPlan | None = None  # a plan that was found or saved before; None plans
    search: bool | float = False  # search for a plan, or for how many seconds; False propagates the marks
    layout: Layout | None = None  # meanings of the names of dimensions
    finite: bool = False  # parts of sums of floats are known to be finite


@dataclasses.dataclass(frozen=True)
class Target(_Kept):
    """What a function is partitioned for."""

    mesh: Mesh  # the devices
    # put devices in the order that marks ask for. False under a transformation: the program that JAX compiles around
    # this one has a single order of devices, the mesh's.
    reorders: bool = True
    collective_matmul: CollectiveMatmul | None = None  # which contractions are collective matmuls
    faster: bool = False  # use a collective matmul only if the cost model predicts a faster call
    machine: Machine | None = None  # planning and recomputation are by seconds on it; by bytes if None
    # the JAX mesh that was given. Results have the types of its axes; meshes that differ in nothing but these are
    # equal.
    jax_mesh: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "jax_mesh", self.mesh.given)

    def in_best_order(self, program: Program) -> Target:
        """The same with the devices in the order that the program's marks ask for."""
        chooses = self.reorders and self.takes_arguments_as_marks
        return dataclasses.replace(self, mesh=in_best_order(program, self.mesh)) if chooses else self

    @property
    def options(self) -> dict[str, Hashable]:
        """The options of ``gshard.jit`` that are not left at their defaults, and decide how a program is made."""
        given: dict[str, Any] = {
            "strict": self.strict, "budget": self.budget, "collective_matmul": self.collective_matmul,
            "memory_limit": self.memory_limit, "machine": self.machine,
            "compiler_options": self.compiler_options, "plan": self.recorded,
            "search": self.search, "layout": self.layout, "finite": self.finite,
            # Axes, not devices: the devices are those of the outer function, in any order, or of an abstract mesh.
            MESH: " ".join(f"{name}={size}" for name, size in self.mesh.axes),
        }  # fmt: skip
        return {
            name: value for name, value in given.items() if value is not None and value is not False and value != ()
        }

    def with_kept_options(self, program: Program) -> Program:
        """The program, whose inner calls of ``gshard.jit`` drop the options that this target does not have."""
        own = self.options
        dropped = (d for d in program.dropped if d.option is None or own.get(d.option[0]) != d.option[1])
        return dataclasses.replace(program, dropped=tuple(dropped))

    @property
    def takes_arguments_as_marks(self) -> bool:
        """Whether the shardings of arguments count as marks, and not just what ``in_shardings`` says."""
        return self.recorded is None and self.search is False and not self.has_places

    @property
    def by_marks(self) -> Target:
        """The same for programs with other marks, whatever they cost: a plan that is given is not theirs."""
        return dataclasses.replace(self, recorded=None, search=False, budget=None)

    def planned(self, program: Program, boundary: Boundary = AS_MARKED) -> Planned:
        """The program's plan."""
        if self.strict and self.reorders:  # a derivative, or one half of it, need not have all names
            refuse_unused(program, self.mesh)
        began = time.thread_time()
        made = run(PLANNING, Draft(program), self._settings(program, boundary)).best
        made = made if self.reorders else Planned(dataclasses.replace(made.plan, orders={}))
        return dataclasses.replace(made, planning_seconds=time.thread_time() - began)

    def _settings(self, program: Program, boundary: Boundary) -> Settings:
        given = None if self.search is False else self._searched
        given = given if self.recorded is None else self.recorded.plan
        return Settings(
            self.mesh, self.machine, self.strict, boundary, tuple(i - len(program.captured) for i in boundary.donated),
            given, self.collective_matmul if given is None else None, self.faster, self.memory_limit,
            recomputes=self.memory_limit is not None,
        )  # fmt: skip

    def _searched(self, program: Program, mesh: Mesh, boundary: Boundary) -> Plan:
        """The plan that a search finds; where there are several processes, the one that the first of them finds.

        Every search has an end by the clock, so that two processes need not find the same.
        """
        on = self.machine or machine_of(mesh)

        def searched() -> Plan:
            search = importlib.import_module("gshard.search.find")  # which nothing else of ``jit`` needs
            found: Plan = search.best_plan(
                program, mesh, on, donated=[i - len(program.captured) for i in boundary.donated],
                memory_limit=self.memory_limit, budget_seconds=None if self.search is True else float(self.search),
                progress=None,
            ).chosen.plan  # fmt: skip
            return found

        group = Group.of(mesh.devices)
        if group is None:
            return at_boundary(searched(), boundary)
        devices = str(mesh), mesh.order, on
        options = devices, self.memory_limit, self.search, boundary, program.argument_marks, program.finite
        key = f"{options}\n{format_block(program.block)}"
        found = group.from_first(program.name, key, lambda: SavedPlan.of(searched()).as_json())
        return SavedPlan.of_json(found).plan(program, mesh, boundary)

    def check(self, plan: Plan, spmd: SpmdProgram) -> None:
        """Refuses what goes beyond the budget."""
        if self.budget is not None:
            check_bytes(self.budget, plan, spmd)

    def partitioned(self, made: Planned) -> SpmdProgram:
        """The per-device program of a plan, without recomputation."""
        return run((PARTITION,), Draft(plans=(made,)), Settings(self.mesh)).spmd

    def fitted(self, plan: Plan, kept: SpmdProgram, donated: frozenset[int], known: Cost | None = None) -> SpmdProgram:
        """A program with values recomputed to keep to the limit of memory."""
        settings = Settings(
            self.mesh, self.machine, donated=tuple(donated), memory_limit=self.memory_limit,
            recomputes=self.memory_limit is not None,
        )  # fmt: skip
        return run((RECOMPUTE,), Draft(plans=(Planned(plan, kept, known),)), settings).spmd

    def compiled(self, spmd: SpmdProgram, kept: SpmdProgram, donated: frozenset[int]) -> Executable:
        """The executable of a program, which recomputes more than ``spmd`` where the compiler exceeds the limit."""

        def make(program: SpmdProgram, donated: frozenset[int]) -> Executable:
            options = dict(self.compiler_options) or None
            return compile_spmd(program, donated, keep_unused=self.keep_unused, compiler_options=options)

        if self.memory_limit is None:
            return make(spmd, donated)
        return compiled_within(spmd, kept, self.memory_limit, self.machine or machine_of(self.mesh), donated, make)


@dataclasses.dataclass(frozen=True, eq=False)
class Options(_Kept):
    """The options of ``jit``, except the function and its static and donated arguments."""

    mesh: Mesh | None  # the devices; None takes the mesh that is set when the function is called
    in_shardings: Any = None  # in_shardings, out_shardings: marks on arguments and results
    out_shardings: Any = None
    collective_matmul: Any = None  # which contractions run part by part
    # what computing and sending take; None takes that of the mesh's devices, if there is a model of them
    machine: str | Machine | None = None

    @staticmethod
    def of(
        mesh: MeshLike, strict: bool | float, memory_limit: int | str | None, plan: Any, layout: Any, **others: Any
    ) -> Options:
        """Reads the options that ``jit`` and ``instead_of_jit`` take in several forms; others are as here."""
        return Options(
            None if mesh is None else Mesh.of(mesh), strict=strict is not False, budget=allowed_bytes(strict),
            memory_limit=None if memory_limit is None else bytes_of(memory_limit),
            recorded=SavedPlan.checked(plan), layout=Layout.checked(layout), **others,
        )  # fmt: skip

    @functools.cached_property
    def _key(self) -> Hashable:
        """The options as something that has a hash; equal to nothing else where what they hold has none."""
        trees = {"in_shardings", "out_shardings"}
        leaves, tree = jax.tree.flatten([getattr(self, name) for name in sorted(trees)], is_leaf=lambda x: x is None)
        rest = (getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in trees)
        key = *rest, self.mesh and self.mesh.given, tuple(leaves), tree
        try:
            hash(key)
        except TypeError:
            return object()
        return key

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Options) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def target(self) -> Target:
        """What is partitioned for, on the mesh that was given or is set now."""
        mesh = Mesh.of(self.mesh)
        if self.layout is not None:
            self.layout.check(mesh)
        machine = machine_to_plan_for(mesh) if self.machine is None else Machine.read(self.machine, mesh.size)
        if machine is not None:
            mesh = on_machine(mesh, machine)
        return Target(
            mesh,
            collective_matmul=CollectiveMatmul.of(self.collective_matmul, mesh, machine),
            faster=self.collective_matmul is None,
            machine=machine,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(_Kept)},
        )
