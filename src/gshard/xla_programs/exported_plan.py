"""Exported plan: a plan of gshard's as shardings and sharding constraints for ``jax.jit``, checked by compiling.

XLA's partitioner is given the plan's shardings of arguments and results. If what it compiles sends more than the plan,
sharding constraints on values inside are added: those that say the plan in few marks (``found.marks``), and if they do
not suffice one on every value. What sends least is kept, and the lines at which XLA still sends more than the plan are
listed with what they cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.mark import mark_of_cut
from gshard.core.memory_kinds import shape_in_memory
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program, format_bytes
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.emit.compile import named_sharding
from gshard.explanation.found import SearchResult
from gshard.planning.added_marks import spec_of_cut, with_marks
from gshard.planning.io_shardings import by_axes
from gshard.search.as_marks import FoundMark
from gshard.xla.peer import xla_function
from gshard.xla_programs.compiled_explanation import CompiledExplanation
from gshard.xla_programs.compiled_program import read_program
from gshard.xla_programs.program_memory import memory_figures

NEAR = 1.05  # of the plan's bytes: what XLA may send and is taken to follow the plan
_WORSE = 8  # lines at which XLA sends more that are printed


@dataclasses.dataclass(frozen=True, slots=True)
class WorseLine:
    """A line at which XLA sends more than the plan.

    Attributes:
        line: ``train.py:9``.
        planned, compiled: bytes that each device sends for it.
    """

    line: str
    planned: int
    compiled: int


@dataclasses.dataclass(frozen=True, eq=False)
class ExportedPlan:
    """A plan for ``jax.jit``, and what XLA makes of it.

    Attributes:
        in_shardings: a ``PartitionSpec`` for each array of the positional arguments, in their structure.
        out_shardings: the same for the results.
        constraints: values inside that need a sharding constraint, as found.
        everywhere: whether XLA was given a constraint on every value instead, which these do not say.
        planned: bytes that each device sends by the plan.
        compiled: the program that XLA compiles with these shardings and constraints.
        worse: the lines at which that sends more than the plan.
        tried: bytes that each device sends with the shardings alone, with few constraints, and with all; as tried.
        mesh: the devices.
    """

    in_shardings: Any
    out_shardings: Any
    constraints: tuple[FoundMark, ...]
    everywhere: bool
    planned: int
    compiled: CompiledExplanation
    worse: tuple[WorseLine, ...]
    tried: Mapping[str, int]
    mesh: Mesh

    @property
    def ratio(self) -> float:
        """Bytes that XLA sends, as a multiple of the plan's; 1 if neither sends anything."""
        return self.compiled.total_bytes / self.planned if self.planned else 1.0 + bool(self.compiled.total_bytes)

    @property
    def follows_plan(self) -> bool:
        """Whether XLA sends at most 5 % more than the plan."""
        return self.ratio <= NEAR

    def named(self, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
        """The shardings of arguments and results on a mesh, for ``jax.jit(in_shardings=..., out_shardings=...)``."""

        def on(specs: Any) -> Any:
            is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
            return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)

        return on(self.in_shardings), on(self.out_shardings)

    def __str__(self) -> str:
        sent = self.compiled.total_bytes
        lines = [
            f"for jax.jit on mesh ({self.mesh}): XLA sends {format_bytes(sent)}, {self.ratio:.2f} times the plan's "
            f"{format_bytes(self.planned)}",
            "tried: " + ", ".join(f"{what} {format_bytes(n)}" for what, n in self.tried.items()),
        ]
        lines += [f"in_shardings = {self.in_shardings}", f"out_shardings = {self.out_shardings}"]
        if self.everywhere:
            lines.append("with a constraint on every value, which few lines do not say: run the plan by gshard.jit")
        lines += [f"  {_constraint(mark)}  {mark.at}" for mark in self.constraints]
        if self.worse:
            lines.append("lines at which XLA sends more than the plan")
            lines += [
                f"  {format_bytes(row.compiled):>10} instead of {format_bytes(row.planned)}  {row.line or '(no line)'}"
                for row in self.worse[:_WORSE]
            ]
        return "\n".join(lines)


def _constraint(mark: FoundMark) -> str:
    """A mark as JAX writes it."""
    text = mark.text.replace("gshard.replicate(x)", "gshard.shard(x, P())")
    return text.replace("gshard.shard(", "jax.lax.with_sharding_constraint(")


@with_tables
def exported_plan(found: SearchResult, spmd: SpmdProgram, devices: Sequence[object]) -> ExportedPlan:
    """Makes the shardings of a plan for ``jax.jit``, and compiles the program with them.

    Args:
        found: the search.
        spmd: the per-device program of its plan.
        devices: what to compile for, as many as the mesh has.
    """
    plan = found.plan
    there = plan.mesh if plan.mesh.devices is not None else dataclasses.replace(plan.mesh, devices=tuple(devices))
    program = plan.program
    planned = sum(c.total_bytes for c in spmd.collectives)
    # JAX has no name for a part of an axis: what is exported, and compiled, is split over whole axes.
    come, leave = ([by_axes(Sharding(s.dims), there) for s in own] for own in (spmd.in_shardings, spmd.out_shardings))
    compiled = _Compiler(program, there, come, leave)
    tried: dict[str, tuple[CompiledExplanation, tuple[FoundMark, ...]]] = {}
    tried["shardings alone"] = compiled(xla_function(program, there)), ()
    if tried["shardings alone"][0].total_bytes > NEAR * planned:
        inside = tuple(_inside(found, program))
        marks = {v: mark_of_cut(s.dims, plan.mesh) for mark in inside for v, s in mark.shardings.items()}
        marked = with_marks(program, {v: mark for v, mark in marks.items() if v not in program.block.inputs})
        if inside and marked is not None:
            tried["few constraints"] = compiled(xla_function(marked, there)), inside
    if all(one.total_bytes > NEAR * planned for one, _ in tried.values()):
        tried["a constraint on every value"] = compiled(xla_function(program, there, plan)), ()
    best = min(tried, key=lambda what: tried[what][0].total_bytes)
    made, constraints = tried[best]
    ins, outs = ([spec_of_cut(s, there) for s in own] for own in (come[len(program.captured) :], leave))
    return ExportedPlan(
        jax.tree.unflatten(found.in_tree, ins)[0], jax.tree.unflatten(program.out_tree, outs),
        constraints, best == "a constraint on every value", planned, made, _worse(spmd, made),
        {what: one.total_bytes for what, (one, _) in tried.items()}, plan.mesh,
    )  # fmt: skip


def _inside(found: SearchResult, program: Program) -> Iterator[FoundMark]:
    """The marks that are about values inside: those of arguments are their shardings."""
    for mark in found.marks.marks:
        if not any(v in program.block.inputs for v in mark.shardings):
            yield mark


class _Compiler:
    """Compiles functions of a program's flat inputs, with shardings of these and of its results."""

    def __init__(self, program: Program, mesh: Mesh, come: Sequence[Sharding], leave: Sequence[Sharding]) -> None:
        self._mesh = mesh
        self._ins = [named_sharding(mesh, s, program.input_memory(i)) for i, s in enumerate(come)]
        self._outs = [named_sharding(mesh, s, program.output_memory(i)) for i, s in enumerate(leave)]
        self._takes = [shape_in_memory(v.shape, v.dtype, on_host=v.on_host) for v in program.block.inputs]

    def __call__(self, function: Callable[..., Any]) -> CompiledExplanation:
        jitted = jax.jit(function, in_shardings=self._ins, out_shardings=self._outs)
        made = jitted.lower(*self._takes).compile()
        mesh = Mesh.of(self._mesh.user_jax_mesh)
        return CompiledExplanation(read_program(str(made.as_text()), mesh, memory=memory_figures(made)))


def _worse(spmd: SpmdProgram, made: CompiledExplanation) -> tuple[WorseLine, ...]:
    """The lines at which XLA sends more than the plan, the largest difference first."""
    planned: dict[str, int] = {}
    for c in spmd.collectives:
        line = c.line.partition(" (")[0].rpartition("/")[2]
        planned[line] = planned.get(line, 0) + c.total_bytes
    compiled: dict[str, int] = {}
    for row in made.collectives:
        compiled[row.line] = compiled.get(row.line, 0) + row.bytes
    rows = [WorseLine(line, planned.get(line, 0), n) for line, n in compiled.items() if n > planned.get(line, 0)]
    return tuple(sorted(rows, key=lambda row: row.planned - row.compiled))
