"""Exported plan: a plan of gshard's as shardings and sharding constraints for ``jax.jit``, checked by compiling.

XLA's partitioner is given the plan's shardings of arguments and results. If what it compiles sends more than the plan,
or repeats products that the plan splits, sharding constraints on values inside are added: the marks of gshard's that
the function has, which are the identity under ``jax.jit``; those that say the plan in few marks (``found.marks``); and
if they do not suffice one on every value. The nearest to the plan is kept, and the lines at which XLA still sends more
than the plan are listed with what they cost.

The same plan is written as a StableHLO module.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.mark import mark_of_cut, resolve
from gshard.core.memory_kinds import in_memory
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program, Value, format_bytes
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.explanation.compiled_explanation import CompiledExplanation
from gshard.explanation.search_result import SearchResult
from gshard.language.mark_primitive import mark_p
from gshard.planning.added_marks import spec_of_cut, with_marks
from gshard.search.as_marks import FoundMark
from gshard.xla.peer import xla_function
from gshard.xla_programs.plan_compiler import (
    NEAR,
    ExportedArgument,
    PlanCompiler,
    WorseLine,
    arguments_of,
    exported_module,
    has_explicit_axes,
    less_split,
    mesh_for_jit,
    worse_text,
)

_ALONE, _OWN, _FEW, _EVERYWHERE = (
    "shardings alone",
    "the function's marks",
    "few constraints",
    "a constraint on every value",
)
_WIDE, _SHOWN = 600, 24  # characters of shardings, and arguments, that are printed


@dataclasses.dataclass(frozen=True, slots=True)
class _Tried:
    """A way to say the plan to XLA's partitioner, and what that compiles of it."""

    compiled: CompiledExplanation
    function: Callable[..., Any]
    constraints: tuple[FoundMark, ...]
    distance: float

    @property
    def rank(self) -> tuple[float, int]:
        """Orders ways, the nearest to the plan first."""
        return self.distance, self.compiled.total_bytes


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, eq=False)
class ExportedPlan:
    """A plan for ``jax.jit``, and what XLA makes of it.

    Attributes:
        in_shardings: a ``PartitionSpec`` for each array of the positional arguments, in their structure.
        out_shardings: the same for the results.
        keywords: the same for the arguments that were given by keyword, by their names. ``jax.jit`` takes no
            ``in_shardings`` for these: pass them by position, or place them with ``jax.device_put``.
        arguments: a row for each array that the function takes.
        constraints: values inside that need a sharding constraint, as found.
        everywhere: whether XLA was given a constraint on every value instead, which these do not say.
        planned: bytes that each device sends by the plan.
        compiled: the program that XLA compiles with these shardings and constraints.
        worse: the lines at which that sends more than the plan.
        less_split: arrays that ``jax.jit`` cannot split as the plan does, with the reason: their size does not divide
            evenly, or the plan splits over a part of an axis.
        tried: bytes that each device sends with the shardings alone, with the function's own marks as constraints, with
            few more constraints, and with one on every value; as far as it was tried.
        mesh: the devices.
    """

    in_shardings: Any
    out_shardings: Any
    keywords: Mapping[str, Any]
    arguments: tuple[ExportedArgument, ...]
    less_split: tuple[str, ...]
    mesh: Mesh
    _made: PlanCompiler = dataclasses.field(repr=False)
    _ways: Mapping[str, _Tried] = dataclasses.field(repr=False)

    @property
    def _best(self) -> str:
        return min(self._ways, key=lambda way: self._ways[way].rank)

    @property
    def compiled(self) -> CompiledExplanation:
        """The program that XLA compiles with these shardings and constraints."""
        return self._ways[self._best].compiled

    @property
    def constraints(self) -> tuple[FoundMark, ...]:
        """Values inside that need a sharding constraint."""
        return self._ways[self._best].constraints

    @property
    def everywhere(self) -> bool:
        """Whether XLA was given a constraint on every value, which ``constraints`` do not say."""
        return self._best == _EVERYWHERE

    @property
    def planned(self) -> int:
        """Bytes that each device sends by the plan."""
        return self._made.planned_bytes

    @property
    def tried(self) -> dict[str, int]:
        """Bytes that each device sends in each of the ways that were tried."""
        return {way: tried.compiled.total_bytes for way, tried in self._ways.items()}

    @functools.cached_property
    def worse(self) -> tuple[WorseLine, ...]:
        """The lines at which XLA sends more than the plan, the largest difference first."""
        return self._made.worse(self.compiled)

    @property
    def ratio(self) -> float:
        """Bytes that XLA sends, as a multiple of the plan's; 1 if neither sends anything."""
        return self._made.ratio(self.compiled)

    @property
    def follows_plan(self) -> bool:
        """Whether XLA sends at most 5 % more than the plan, and computes at most 5 % more products.

        If the compiled program contains rewrites by gshard, the same holds for the function as written.
        """
        written = self._made.as_written
        is_near = self._ways[self._best].distance <= NEAR
        return is_near and (written is None or self._made.distance(written) <= NEAR)

    def named(self, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
        """The shardings of arguments and results on a mesh, for ``jax.jit(in_shardings=..., out_shardings=...)``.

        Those of arrays in the memory of the host have its memory kind.
        """

        def on(specs: Any, kinds: Sequence[str]) -> Any:
            flat, tree = jax.tree.flatten(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
            made = [in_memory(NamedSharding(mesh, s), kind) for s, kind in zip(flat, kinds, strict=False)]
            return jax.tree.unflatten(tree, made)

        program = self._made.program
        leaving = [program.output_memory(i) for i in range(len(program.block.outputs))]
        return on(self.in_shardings, [a.memory for a in self.arguments]), on(self.out_shardings, leaving)

    @functools.cached_property
    def _module(self) -> export.Exported:
        return exported_module(self._made, self._ways[self._best].function, self.compiled)

    def jax_export(self) -> export.Exported:
        """The program of all devices as ``jax.export`` makes it, with these shardings and constraints.

        It takes the arguments of the function, and holds the arrays that the function closes over. Call it in
        ``jax.jit`` on as many devices, or write ``serialize()`` to a file.

        Raises:
            PlanError: compiled again, it does not send what ``compiled`` sends.
        """
        return self._module

    def stablehlo(self) -> str:
        """The same as text: a StableHLO module with ``sdy`` shardings, for XLA's partitioner (Shardy).

        Raises:
            PlanError: as ``jax_export``.
        """
        return str(self._module.mlir_module())

    def _shown(self) -> list[str]:
        """The shardings as Python prints them; of many arguments the rows of those that are split."""
        specs = [f"in_shardings = {self.in_shardings}", f"out_shardings = {self.out_shardings}"]
        if max(map(len, specs)) <= _WIDE and "\n" not in "".join(specs):
            return specs
        split = [argument for argument in self.arguments if any(argument.axes)]
        title = f"in_shardings split {len(split)} of {len(self.arguments)} arrays"
        more = [f"  and {len(split) - _SHOWN} more"] * (len(split) > _SHOWN)
        return [title, *(f"  {argument}" for argument in split[:_SHOWN]), *more]

    def __str__(self) -> str:
        lines = [
            f"for jax.jit on mesh ({self.mesh}): {self._made.told(self.compiled)}",
            "tried: " + ", ".join(f"{what} {format_bytes(n)}" for what, n in self.tried.items()),
        ]
        lines += self._shown()
        if self.keywords:
            lines.append(f"by keyword, which have no in_shardings: {dict(self.keywords)}")
        if on_host := [a.path for a in self.arguments if a.memory != "device"]:
            lines.append(
                f"in the memory of the host, with its memory kind in exported.named(mesh): {', '.join(on_host)}"
            )
        if has_explicit_axes(self.mesh):
            lines.append("on a mesh with axes of type Auto: axes of type Explicit take other programs")
        lines += self._made.rewritten
        lines += [f"split less than by the plan: {line}" for line in self.less_split]
        if self.everywhere:
            lines.append("with a constraint on every value, which few lines do not say: run the plan by gshard.jit")
        lines += [f"  {_constraint_text(mark)}  {mark.at}" for mark in self.constraints]
        return "\n".join([*lines, *worse_text(self.worse)])


@with_tables
def exported_plan(found: SearchResult, spmd: SpmdProgram, devices: Sequence[object]) -> ExportedPlan:
    """Makes the shardings of a plan for ``jax.jit``, and compiles the program with them."""
    plan = found.plan
    program = plan.program
    if program.references:
        raise ArgumentError(
            "jax.jit has no shardings for references (jax.Ref) that a function writes, so its plan is not exported.",
            user_line(),
            hint="Run it by gshard.jit(f, mesh=found.mesh, plan=found.plan), or return the new values instead.",
        )
    there = mesh_for_jit(plan.mesh, devices)
    made = PlanCompiler(found, spmd, there)
    ways: dict[str, _Tried] = {}

    def is_far() -> bool:
        return all(tried.distance > NEAR for tried in ways.values())

    def try_way(way: str, function: Callable[..., Any] | None, constraints: Sequence[FoundMark] = ()) -> None:
        if function is not None and is_far():
            compiled = made.compiled(function)
            ways[way] = _Tried(compiled, function, tuple(constraints), made.distance(compiled))

    try_way(_ALONE, _constrained(made, ()))
    if own := list(_own_marks(made)):
        try_way(_OWN, _constrained(made, own), own)
    if is_far() and (inside := _inside(found, program)):  # these take a while to find
        try_way(_FEW, _constrained(made, [*own, *inside]), [*own, *inside])
    try_way(_EVERYWHERE, xla_function(program, there, plan))
    ins, outs = ([spec_of_cut(s, there) for s in own] for own in (made.come[len(program.captured) :], made.leave))
    positional, named = jax.tree.unflatten(found.in_tree, ins)
    return ExportedPlan(
        positional, jax.tree.unflatten(program.out_tree, outs), named, arguments_of(made), tuple(less_split(made)),
        plan.mesh, made, ways,
    )  # fmt: skip


def _inside(found: SearchResult, program: Program) -> list[FoundMark]:
    """The marks that are about values inside: those of arguments are their shardings."""
    inputs = program.block.inputs
    return [mark for mark in found.marks.marks if not any(v in inputs for v in mark.shardings)]


def _constraint_text(mark: FoundMark) -> str:
    """A mark as JAX writes it."""
    text = mark.text.replace("gshard.replicate(x)", "gshard.shard(x, P())")
    return text.replace("gshard.shard(", "jax.lax.with_sharding_constraint(")


def _own_marks(made: PlanCompiler) -> Iterator[FoundMark]:
    """The marks of gshard's that the function has inside, as far as they split over whole axes.

    Under ``jax.jit`` such a mark is the identity, so they are constraints that a plan for it may need. A mark without
    a line is none of the function's text: ``out_shardings`` of ``gshard.jit`` are such marks.
    """
    for e in made.program.block.walk():
        if e.primitive is not mark_p or e.mark is None or e.mark.unreduced or not e.line:
            continue
        demand = resolve(e.mark, made.mesh, e.outputs[0].shape, e.line)
        spec = spec_of_cut(Sharding(demand.dims), made.mesh)
        if spec is None or all(demand.open):
            continue
        entries = ["P.UNCONSTRAINED" if is_open else repr(n) for n, is_open in zip(spec, demand.open, strict=True)]
        text = f"gshard.shard(x, P({', '.join(entries)}))"
        yield FoundMark(f"mark at {e.line}", text, 0.0, {e.outputs[0]: Sharding(demand.dims)})


def _constrained(made: PlanCompiler, constraints: Sequence[FoundMark]) -> Callable[..., list[Any]] | None:
    """The program with these constraints and without other marks of gshard's; None where one cannot be added."""
    wanted = {v: s for mark in constraints for v, s in mark.shardings.items()}
    own = _marked_values(made.program)
    added = {v: mark_of_cut(s.dims, made.mesh) for v, s in wanted.items() if v not in own}
    program = with_marks(made.program, added) if added else made.program
    return None if program is None else xla_function(program, made.mesh, ignored=own - wanted.keys())


def _marked_values(program: Program) -> set[Value]:
    return {v for e in program.block.walk() if e.primitive is mark_p for v in e.outputs}
