"""Exported plan: a plan of gshard's as shardings and sharding constraints for ``jax.jit``, checked by compiling.

XLA's partitioner gets the plan's shardings of arguments and results; if it then sends more than the plan, or repeats
products that the plan splits, also constraints on values inside.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.mark import mark_of_cut, resolve, text_of_spec
from gshard.core.memory_kinds import in_memory, shape_in_memory
from gshard.core.mesh import Mesh
from gshard.core.paths import path_inside
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program, Value, format_bytes
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.device.fusion_model import PRODUCT
from gshard.explanation.compiled_source import CompiledCost
from gshard.explanation.difference import Difference, LineChange
from gshard.explanation.explain import Explanation, read_compiled
from gshard.explanation.report.page import InNotebooks
from gshard.explanation.search_result import SearchResult
from gshard.language.mark_primitive import mark_p
from gshard.planning.added_marks import spec_of_cut, with_marks
from gshard.planning.demands import by_axes
from gshard.rewrite.rewrites import TRACE
from gshard.search.as_marks import FoundMark
from gshard.xla.described import described_mesh
from gshard.xla.peer import xla_function

NEAR = 1.05  # of the plan's bytes, and of its products: what XLA may take and is taken to follow the plan
_NO_HELP = frozenset(row.name for row in TRACE if not row.helps_xla)


@dataclasses.dataclass(frozen=True, slots=True)
class _Tried:
    """A way to say the plan to XLA's partitioner, and what that compiles of it."""

    compiled: Explanation
    constraints: tuple[FoundMark, ...]
    # ratio, products: bytes that XLA sends, and operations of products that each device computes, as a multiple of the
    # plan's. ``products`` is above 1 where XLA repeats on several devices what the plan splits, which sends nothing.
    ratio: float
    products: float

    @property
    def distance(self) -> float:
        """The larger of both ratios, and 1 if neither is larger."""
        return max(1.0, self.ratio, self.products)


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, eq=False)
class ExportedPlan(InNotebooks):
    """A plan for ``jax.jit``, and what XLA makes of it.

    Attributes:
        found: the search whose plan is exported.
        spmd: the per-device program of the plan.
        mesh: the devices for which it is compiled.
    """

    found: SearchResult
    spmd: SpmdProgram = dataclasses.field(repr=False)
    mesh: Mesh
    _ways: dict[str, _Tried] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.found.plan

    @property
    def program(self) -> Program:
        """The traced function."""
        return self.plan.program

    @functools.cached_property
    def _ends(self) -> tuple[list[Sharding], list[Sharding]]:
        """How inputs enter and results leave: over whole axes, because JAX has no name for a part of one."""
        ends = self.spmd.in_shardings, self.spmd.out_shardings
        entering, leaving = ([by_axes(Sharding(s.dims), self.mesh) for s in end] for end in ends)
        return entering, leaving

    def _spec(self, sharding: Sharding) -> PartitionSpec:
        """One of ``_ends`` for JAX."""
        spec = spec_of_cut(sharding, self.mesh)
        assert spec is not None, "it is split over whole axes"
        return spec

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
        return jax.tree.unflatten(self.program.out_tree, list(map(self._spec, self._ends[1])))

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
            ExportedArgument(names[v].text, v, self._spec(sharding), program.input_memory(i))
            for i, (v, sharding) in enumerate(zip(program.block.inputs, self._ends[0], strict=True))
        ]
        return tuple(rows[len(program.captured) :])

    @functools.cached_property
    def less_split(self) -> tuple[str, ...]:
        """Arrays that ``jax.jit`` cannot split as the plan does, with the reason.

        Their size does not divide evenly, or the plan splits over a part of an axis.
        """
        program, mesh, found = self.program, self.mesh, list[str]()
        results = jax.tree.unflatten(program.out_tree, range(program.out_tree.num_leaves))
        paths = [path_inside(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(results)]
        names = [*program.names, *(f"result {path}".strip() for path in paths)]
        arrays = (*program.block.inputs, *program.block.outputs)
        for name, v, exported in zip(names, arrays, (*self._ends[0], *self._ends[1]), strict=False):
            if not isinstance(v, Value):
                continue
            planned = Sharding(self.plan.shardings[v].dims)
            uneven = [n for n, atoms in zip(v.shape, planned.dims, strict=True) if n % mesh.count(atoms)]
            if planned != exported and (uneven or spec_of_cut(planned, mesh) is None):
                inside = planned.format(mesh, v.shape, v.dtype_name)
                reason = f"{uneven[0]} does not divide evenly" if uneven else "a part of an axis has no name"
                spec = spec_text(self._spec(exported))
                found.append(f"{name}: {inside} by the plan, {spec} for jax.jit: {reason}")
        return tuple(found)

    @property
    def _best(self) -> _Tried:
        return min(self._ways.values(), key=lambda way: (way.distance, way.compiled.total_bytes))

    @property
    def compiled(self) -> Explanation:
        """The program that XLA compiles with these shardings and constraints."""
        return self._best.compiled

    @property
    def constraints(self) -> tuple[FoundMark, ...]:
        """Values inside that need a sharding constraint, as found."""
        return self._best.constraints

    @property
    def tried(self) -> dict[str, int]:
        """Bytes that each device sends in each of the ways that were tried.

        With the shardings alone, with the function's own marks as constraints, and with few more constraints.
        """
        return {way: tried.compiled.total_bytes for way, tried in self._ways.items()}

    @functools.cached_property
    def planned(self) -> int:
        """Bytes that each device sends by the plan."""
        return sum(c.total_bytes for c in self.spmd.collectives)

    @property
    def ratio(self) -> float:
        """Bytes that XLA sends, as a multiple of the plan's; 1 if neither sends anything."""
        return self._best.ratio

    @property
    def follows_plan(self) -> bool:
        """Whether XLA sends at most 5 % more than the plan, and computes at most 5 % more products.

        False if it does so only with rewrites by gshard, which the function as written does not have.
        """
        return self._best.distance <= NEAR and not (self._rewrites and self.found.function is not None)

    def named(self, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
        """The shardings of arguments and results on a mesh, for ``jax.jit(in_shardings=..., out_shardings=...)``.

        Those of arrays in the memory of the host have its memory kind.
        """
        entering, leaving = self._on(mesh)
        positional, _ = jax.tree.unflatten(self.found.in_tree, entering[len(self.program.captured) :])
        return positional, jax.tree.unflatten(self.program.out_tree, leaving)

    def _on(self, mesh: jax.sharding.Mesh) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """The shardings of all inputs and results on a mesh of JAX's, in the memories in which they are."""
        entering, leaving = (
            [in_memory(NamedSharding(mesh, self._spec(s)), memory(i)) for i, s in enumerate(end)]
            for end, memory in zip(self._ends, (self.program.input_memory, self.program.output_memory), strict=True)
        )
        return entering, leaving

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

    def _try(self, way: str, constraints: Sequence[FoundMark]) -> None:
        """Compiles the program with constraints and without other marks of gshard's, if they can all be added.

        Without constraints it is the function as written, if that is known.
        """
        program, first = self.program, 0
        if self.found.function is not None and not constraints:
            function, first = jaxpr_as_fun(self.found.function.jaxpr()), len(program.captured)
        else:
            wanted = {v: s for mark in constraints for v, s in mark.shardings.items()}
            own = {v for e in program.block.walk() if e.primitive is mark_p for v in e.outputs}
            added = {v: mark_of_cut(s.dims, self.mesh) for v, s in wanted.items() if v not in own}
            marked = with_marks(program, added) if added else program
            if marked is None:
                return
            function = xla_function(marked, self.mesh, ignored=own - wanted.keys())
        mesh: Any = self.mesh.user_jax_mesh
        entering, leaving = self._on(mesh)
        takes = [shape_in_memory(v.shape, v.dtype, on_host=v.on_host) for v in program.block.inputs[first:]]
        jitted = jax.jit(function, in_shardings=entering[first:], out_shardings=leaving)
        compiled = read_compiled(jitted.lower(*takes).compile(), Mesh.of(mesh))
        cost = compiled.cost(self.found.cost.machine)
        assert isinstance(cost, CompiledCost), "XLA compiled it"
        products = sum(k.flops * k.times for k in self.found.cost.kernels if k.kind == PRODUCT)
        pairs = (compiled.total_bytes, self.planned), (cost.products, products)
        ratios = (made / by_plan if by_plan else 1.0 + bool(made) for made, by_plan in pairs)
        self._ways[way] = _Tried(compiled, tuple(constraints), *ratios)

    @property
    def _rewrites(self) -> list[str]:
        """The rewrites of gshard's that are in what is compiled, and not in what ``jax.jit`` is given."""
        if self.found.function is not None and not self.constraints:
            return []
        others = [one for one in self.program.fired if one.rewrite not in _NO_HELP]
        return list(dict.fromkeys(f"{one.rewrite}{' at ' * bool(one.line)}{one.line}" for one in others))

    def __str__(self) -> str:
        sent, planned, products = self.compiled.total_bytes, self.planned, self._best.products
        times = f"XLA sends {format_bytes(sent)}, {self.ratio:.2f} times the plan's {format_bytes(planned)}"
        more = f", and computes {products:.2f} times its products" if products > NEAR else ""
        lines = [
            f"for jax.jit on mesh ({self.plan.mesh}): {times}{more}",
            "tried: " + ", ".join(f"{what} {format_bytes(n)}" for what, n in self.tried.items()),
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
        if self._rewrites:
            fired = ", ".join(self._rewrites)
            lines.append(f"compiled with rewrites of gshard's, without which jax.jit may send more: {fired}")
        lines += [f"split less than by the plan: {line}" for line in self.less_split]
        lines += [f"  {_constraint_text(mark)}  {mark.at}" for mark in self.constraints]
        lines += [self.difference.format(lines=8)] if self.worse else []
        return "\n".join(lines)


@with_tables
def exported_plan(found: SearchResult) -> ExportedPlan:
    """Makes the shardings of a plan for ``jax.jit``, and compiles the program with them.

    If XLA does not follow the plan with these alone, it gets constraints: the marks of gshard's that the function has,
    which are the identity under ``jax.jit``, and then those that say the plan in few marks (``found.marks``). It is
    compiled for the mesh's devices with axes of type Auto, for a TPU as libtpu describes it, or for the first devices.
    """
    program, mesh, machine = found.plan.program, found.plan.mesh, found.cost.machine
    if program.references:
        raise ArgumentError(
            "jax.jit has no shardings for references (jax.Ref) that a function writes, so its plan is not exported.",
            user_line(),
            hint="Run it by gshard.jit(f, mesh=found.mesh, plan=found.plan), or return the new values instead.",
        )
    on = described_mesh(machine) if mesh.devices is None and machine.topology else mesh.on_first_devices()
    made = ExportedPlan(found, found.explain().spmd, dataclasses.replace(mesh, devices=on.devices, made_from=None))
    for way, constraints in _ways_to_try(made):
        made._try(way, constraints)
        if made._best.distance <= NEAR:
            break
    return made


def _ways_to_try(made: ExportedPlan) -> Iterator[tuple[str, Sequence[FoundMark]]]:
    """Constraints to give to XLA's partitioner, fewer ones first."""
    yield "shardings alone", ()
    if own := list(_own_marks(made)):
        yield "the function's marks", own
    # These take a while to find. Those that are about arguments are their shardings.
    inputs = made.program.block.inputs
    if inside := [mark for mark in made.found.marks.marks if not any(v in inputs for v in mark.shardings)]:
        yield "few constraints", [*own, *inside]


def _constraint_text(mark: FoundMark) -> str:
    """A mark as JAX writes it."""
    text = mark.text.replace("gshard.replicate(x)", "gshard.shard(x, P())")
    return text.replace("gshard.shard(", "jax.lax.with_sharding_constraint(")


def _own_marks(made: ExportedPlan) -> Iterator[FoundMark]:
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
