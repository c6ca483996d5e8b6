"""Exported plan: a plan of gshard's as shardings and sharding constraints for ``jax.jit``, checked by compiling.

XLA's partitioner gets the plan's shardings of arguments and results. If it then sends more than the plan, or repeats
products that the plan splits, it gets constraints on values inside (``tried_changes``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.mark import text_of_spec
from gshard.core.memory_kinds import in_memory
from gshard.core.paths import path_inside
from gshard.core.plan import Plan
from gshard.core.program import Program, Value, format_bytes
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.device.fusion_model import PRODUCT
from gshard.explanation.compiled_source import CompiledCost
from gshard.explanation.difference import Difference, LineChange
from gshard.explanation.explain import Explanation
from gshard.explanation.report.page import InNotebooks
from gshard.explanation.search_result import SearchResult
from gshard.explanation.tried_changes import Advice
from gshard.planning.added_marks import spec_of_cut
from gshard.planning.demands import by_axes

NEAR = 1.05  # of the plan's bytes, and of its products: what XLA may take and is taken to follow the plan


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, eq=False)
class ExportedPlan(InNotebooks):
    """A plan for ``jax.jit``, and what XLA makes of it.

    Attributes:
        found: the search whose plan is exported.
        spmd: the per-device program of the plan.
        compiled: the program that XLA compiles with these shardings.
        advice: the constraints that XLA needs besides, where it does not follow the plan; None if it does.
    """

    found: SearchResult
    spmd: SpmdProgram = dataclasses.field(repr=False)
    compiled: Explanation = dataclasses.field(repr=False)
    advice: Advice | None = None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.found.plan

    @property
    def program(self) -> Program:
        """The traced function."""
        return self.plan.program

    @functools.cached_property
    def _given(self) -> tuple[Any, Any]:
        """Specs of the positional arguments, and of those by keyword."""
        specs = [argument.spec for argument in self.arguments]
        positional, named = jax.tree.unflatten(self.found.in_tree, specs)
        return positional, named

    @property
    def in_shardings(self) -> Any:
        """A ``PartitionSpec`` for each array of the positional arguments, in their structure."""
        return self._given[0]

    @property
    def out_shardings(self) -> Any:
        """The same for the results."""
        return jax.tree.unflatten(self.program.out_tree, ends_of(self.spmd)[1])

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The same for the arguments that were given by keyword, by their names.

        ``jax.jit`` takes no ``in_shardings`` for these: pass them by position, or place them with ``jax.device_put``.
        """
        found: Mapping[str, Any] = self._given[1]
        return found

    @functools.cached_property
    def arguments(self) -> tuple[ExportedArgument, ...]:
        """A row for each array that the function takes."""
        program, names = self.program, self.found.names.arguments
        rows = [
            ExportedArgument(names[v].text, v, spec, program.input_memory(i))
            for i, (v, spec) in enumerate(zip(program.block.inputs, ends_of(self.spmd)[0], strict=True))
        ]
        return tuple(rows[len(program.captured) :])

    @functools.cached_property
    def less_split(self) -> tuple[str, ...]:
        """Arrays that ``jax.jit`` cannot split as the plan does, with the reason.

        Their size does not divide evenly, or the plan splits over a part of an axis.
        """
        program, mesh, found = self.program, self.plan.mesh, list[str]()
        results = jax.tree.unflatten(program.out_tree, range(program.out_tree.num_leaves))
        paths = [path_inside(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(results)]
        names = [*program.names, *(f"result {path}".strip() for path in paths)]
        arrays = (*program.block.inputs, *program.block.outputs)
        for name, v, spec in zip(names, arrays, itertools.chain(*ends_of(self.spmd)), strict=False):
            if not isinstance(v, Value):
                continue
            planned = Sharding(self.plan.shardings[v].dims)
            uneven = [n for n, atoms in zip(v.shape, planned.dims, strict=True) if n % mesh.count(atoms)]
            if (own := spec_of_cut(planned, mesh)) != spec and (uneven or own is None):
                inside = planned.format(mesh, v.shape, v.dtype_name)
                reason = f"{uneven[0]} does not divide evenly" if uneven else "a part of an axis has no name"
                found.append(f"{name}: {inside} by the plan, {spec_text(spec)} for jax.jit: {reason}")
        return tuple(found)

    @functools.cached_property
    def planned(self) -> int:
        """Bytes that each device sends by the plan."""
        return sum(c.total_bytes for c in self.spmd.collectives)

    @property
    def sent(self) -> int:
        """Bytes that each device sends if XLA compiles it with the shardings and the constraints of the advice."""
        return self.compiled.total_bytes if self.advice is None else self.advice.after.sent

    @property
    def ratio(self) -> float:
        """Bytes that XLA sends, as a multiple of the plan's; 1 if neither sends anything."""
        return _ratio(self.sent, self.planned)

    @functools.cached_property
    def products(self) -> float:
        """Operations of products that each device computes without advice, as a multiple of the plan's."""
        cost = self.compiled.cost(self.found.cost.machine)
        assert isinstance(cost, CompiledCost), "XLA compiled it"
        return _ratio(cost.products, sum(k.flops * k.times for k in self.found.cost.kernels if k.kind == PRODUCT))

    @property
    def follows_plan(self) -> bool:
        """Whether XLA sends at most 5 % more than the plan, and computes at most 5 % more products."""
        return max(self.ratio, self.products) <= NEAR

    def named(self, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
        """The shardings of arguments and results on a mesh, for ``jax.jit(in_shardings=..., out_shardings=...)``.

        Those of arrays in the memory of the host have its memory kind.
        """
        entering, leaving = shardings_on(mesh, self.program, self.spmd)
        positional, _ = jax.tree.unflatten(self.found.in_tree, entering[len(self.program.captured) :])
        return positional, jax.tree.unflatten(self.program.out_tree, leaving)

    @functools.cached_property
    def difference(self) -> Difference:
        """What XLA's program takes more and less than the plan, by line of the source."""
        return self.compiled.difference(self.found.explain(), self.found.cost.machine)

    @property
    def worse(self) -> tuple[LineChange, ...]:
        """The lines at which XLA sends more (``after``) than the plan (``before``), the largest difference first.

        None if it does not send more in all: XLA and the plan may reduce the same array at different lines.
        """
        return () if self.compiled.total_bytes <= self.planned else self.difference.worse

    def __str__(self) -> str:
        sent, planned = self.compiled.total_bytes, self.planned
        times = f"XLA sends {format_bytes(sent)}, {_ratio(sent, planned):.2f} times the plan's {format_bytes(planned)}"
        more = f", and computes {self.products:.2f} times its products" if self.products > NEAR else ""
        lines = [
            f"for jax.jit on mesh ({self.plan.mesh}): {times}{more}",
            f"in_shardings = {self.in_shardings}",
            f"out_shardings = {self.out_shardings}",
        ]
        if self.keywords:
            lines.append(f"by keyword, which have no in_shardings: {dict(self.keywords)}")
        if on_host := [a.path for a in self.arguments if a.memory != "device"]:
            lines.append(
                f"in the memory of the host, with its memory kind in exported.named(mesh): {', '.join(on_host)}"
            )
        given = self.plan.mesh.given
        if given is not None and any(kind != jax.sharding.AxisType.Auto for kind in given.axis_types):
            lines.append("on a mesh with axes of type Auto: axes of type Explicit take other programs")
        lines += [f"split less than by the plan: {line}" for line in self.less_split]
        lines += [] if self.advice is None else [str(self.advice)]
        lines += [self.difference.format(lines=8)] if self.worse else []
        return "\n".join(lines)


def _ratio(made: int, by_plan: int) -> float:
    return made / by_plan if by_plan else 1.0 + bool(made)


def ends_of(spmd: SpmdProgram) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
    """How inputs enter and results leave: over whole axes, because JAX has no name for a part of one."""
    mesh = spmd.mesh
    entering, leaving = (
        [spec_of_cut(by_axes(Sharding(s.dims), mesh), mesh) or PartitionSpec() for s in end]
        for end in (spmd.in_shardings, spmd.out_shardings)
    )
    return entering, leaving


def shardings_on(
    mesh: jax.sharding.Mesh, program: Program, spmd: SpmdProgram
) -> tuple[list[NamedSharding], list[NamedSharding]]:
    """The shardings of all inputs and results on a mesh of JAX's, in the memories in which they are."""
    memories = program.input_memory, program.output_memory
    entering, leaving = (
        [in_memory(NamedSharding(mesh, spec), memory(i)) for i, spec in enumerate(end)]
        for end, memory in zip(ends_of(spmd), memories, strict=True)
    )
    return entering, leaving


def spec_text(spec: PartitionSpec) -> str:
    """A spec as users write it, without what stands for nothing at its end.

    >>> spec_text(PartitionSpec(None, ("data", "model"), None)), spec_text(PartitionSpec(None))
    ('P(None, ("data", "model"))', 'P()')
    """
    entries = list(spec)
    while entries and not entries[-1]:
        entries.pop()
    return text_of_spec(entries).replace("'", '"')


# Exported arguments: a row for each array that a function takes, with its path and how the plan splits it.


@dataclasses.dataclass(frozen=True, slots=True)
class ExportedArgument:
    """One array that a function takes, and its sharding."""

    path: str  # ``params/up/kernel``
    value: Value  # its shape and dtype
    spec: PartitionSpec  # its sharding, an entry for each dimension
    memory: str  # the memory kind in which it is

    def __str__(self) -> str:
        shape = ",".join(map(str, self.value.shape))
        return f"{self.path}: {self.value.dtype_name}[{shape}] {spec_text(self.spec)}"
