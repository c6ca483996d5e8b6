"""Exported plan: a plan of gshard's as shardings and sharding constraints for ``jax.jit``, checked by compiling.

XLA's partitioner gets the plan's shardings of arguments and results; if it then sends more than the plan, or repeats
products that the plan splits, also constraints on values inside.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from gshard.emit.compile import named_sharding
from gshard.explanation.compiled_source import CompiledCost
from gshard.explanation.difference import Difference, LineChange
from gshard.explanation.explain import Explanation, read_compiled
from gshard.explanation.search_result import SearchResult
from gshard.language.mark_primitive import mark_p
from gshard.planning.added_marks import spec_of_cut, with_marks
from gshard.planning.demands import by_axes
from gshard.rewrite.rewrites import TRACE
from gshard.search.as_marks import FoundMark
from gshard.xla.peer import xla_function
from gshard.xla.tpu import topology_mesh

_ALONE, _OWN, _FEW = "shardings alone", "the function's marks", "few constraints"
NEAR = 1.05  # of the plan's bytes, and of its products: what XLA may take and is taken to follow the plan
_NO_HELP = frozenset(row.name for row in TRACE if not row.helps_xla)
_LINES = 8  # of the source that are printed


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
class ExportedPlan:
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
    def _given(self) -> tuple[Any, Any]:
        """Specs of the positional arguments, and of those by keyword."""
        specs = [spec_of_cut(s, self.mesh) for s in self.come[len(self.program.captured) :]]
        positional, named = jax.tree.unflatten(self.found.in_tree, specs)
        return positional, named

    @property
    def in_shardings(self) -> Any:
        """A ``PartitionSpec`` for each array of the positional arguments, in their structure."""
        return self._given[0]

    @property
    def out_shardings(self) -> Any:
        """The same for the results."""
        return jax.tree.unflatten(self.program.out_tree, [spec_of_cut(s, self.mesh) for s in self.leave])

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
        rows = []
        for i, (v, sharding) in enumerate(zip(program.block.inputs, self.come, strict=True)):
            spec = spec_of_cut(sharding, self.mesh)
            assert spec is not None, "it is split over whole axes"
            rows.append(ExportedArgument(names[v].text, v, spec, program.input_memory(i)))
        return tuple(rows[len(program.captured) :])

    @functools.cached_property
    def less_split(self) -> tuple[str, ...]:
        """Arrays that ``jax.jit`` cannot split as the plan does, with the reason.

        Their size does not divide evenly, or the plan splits over a part of an axis.
        """
        return tuple(less_split(self))

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

        def on(specs: Any, kinds: Sequence[str]) -> Any:
            flat, tree = jax.tree.flatten(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
            made = [in_memory(NamedSharding(mesh, s), kind) for s, kind in zip(flat, kinds, strict=False)]
            return jax.tree.unflatten(tree, made)

        program = self.program
        leaving = [program.output_memory(i) for i in range(len(program.block.outputs))]
        return on(self.in_shardings, [a.memory for a in self.arguments]), on(self.out_shardings, leaving)

    @functools.cached_property
    def difference(self) -> Difference:
        """What XLA's program takes more and less than the plan, by line of the source."""
        return self.compiled.difference(self.found.explain(), self.found.cost.machine)

    @property
    def worse(self) -> tuple[LineChange, ...]:
        """The lines at which XLA sends more (``after``) than the plan (``before``), the largest difference first.

        None if it does not send more in all: XLA and the plan may reduce the same array at different lines.
        """
        if self.compiled.total_bytes <= self.planned:
            return ()
        return self.difference.worse

    # JAX has no name for a part of an axis: what is exported, and compiled, is split over whole axes.
    @functools.cached_property
    def come(self) -> tuple[Sharding, ...]:
        """For each input how it enters."""
        return tuple(by_axes(Sharding(s.dims), self.mesh) for s in self.spmd.in_shardings)

    @functools.cached_property
    def leave(self) -> tuple[Sharding, ...]:
        """For each result how it leaves."""
        return tuple(by_axes(Sharding(s.dims), self.mesh) for s in self.spmd.out_shardings)

    @functools.cached_property
    def ins(self) -> tuple[NamedSharding, ...]:
        """The same for JAX, in the memories in which the inputs are."""
        return tuple(named_sharding(self.mesh, s, self.program.input_memory(i)) for i, s in enumerate(self.come))

    @functools.cached_property
    def outs(self) -> tuple[NamedSharding, ...]:
        """The same for the results."""
        return tuple(named_sharding(self.mesh, s, self.program.output_memory(i)) for i, s in enumerate(self.leave))

    @functools.cached_property
    def takes(self) -> tuple[Any, ...]:
        """For each input its shape and dtype."""
        return tuple(shape_in_memory(v.shape, v.dtype, on_host=v.on_host) for v in self.program.block.inputs)

    def try_way(self, way: str, constraints: Sequence[FoundMark]) -> None:
        """Compiles the program with constraints and without other marks of gshard's, if they can all be added.

        Without constraints it is the function as written, if that is known.
        """
        if self.found.function is not None and not constraints:
            compiled = self._compiled(jaxpr_as_fun(self.found.function.jaxpr()), len(self.program.captured))
            self._ways[way] = self._read(compiled, ())
            return
        wanted = {v: s for mark in constraints for v, s in mark.shardings.items()}
        own = {v for e in self.program.block.walk() if e.primitive is mark_p for v in e.outputs}
        added = {v: mark_of_cut(s.dims, self.mesh) for v, s in wanted.items() if v not in own}
        program = with_marks(self.program, added) if added else self.program
        if program is not None:
            compiled = self._compiled(xla_function(program, self.mesh, ignored=own - wanted.keys()))
            self._ways[way] = self._read(compiled, constraints)

    @property
    def is_far(self) -> bool:
        """Whether no way that was tried follows the plan."""
        return all(way.distance > NEAR for way in self._ways.values())

    def _compiled(self, function: Callable[..., Any], first: int = 0) -> Explanation:
        """Compiles a function of the inputs from the first on, and reads what XLA made of it."""
        jitted = jax.jit(function, in_shardings=list(self.ins[first:]), out_shardings=list(self.outs))
        return read_compiled(jitted.lower(*self.takes[first:]).compile(), Mesh.of(self.mesh.user_jax_mesh))

    def _read(self, compiled: Explanation, constraints: Sequence[FoundMark]) -> _Tried:
        cost = compiled.cost(self.found.cost.machine)
        assert isinstance(cost, CompiledCost), "XLA compiled it"
        planned = sum(k.flops * k.times for k in self.found.cost.kernels if k.kind == PRODUCT)

        def multiple(made: int, by_plan: int) -> float:
            return made / by_plan if by_plan else 1.0 + bool(made)

        ratio, products = multiple(compiled.total_bytes, self.planned), multiple(cost.products, planned)
        return _Tried(compiled, tuple(constraints), ratio, products)

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
        if has_explicit_axes(self.plan.mesh):
            lines.append("on a mesh with axes of type Auto: axes of type Explicit take other programs")
        if self._rewrites:
            fired = ", ".join(self._rewrites)
            lines.append(f"compiled with rewrites of gshard's, without which jax.jit may send more: {fired}")
        lines += [f"split less than by the plan: {line}" for line in self.less_split]
        lines += [f"  {_constraint_text(mark)}  {mark.at}" for mark in self.constraints]
        lines += [self.difference.format(_LINES)] if self.worse else []
        return "\n".join(lines)


@with_tables
def exported_plan(found: SearchResult) -> ExportedPlan:
    """Makes the shardings of a plan for ``jax.jit``, and compiles the program with them.

    If XLA does not follow the plan with these alone, it gets constraints: the marks of gshard's that the function has,
    which are the identity under ``jax.jit``, and then those that say the plan in few marks (``found.marks``).
    """
    program = found.plan.program
    if program.references:
        raise ArgumentError(
            "jax.jit has no shardings for references (jax.Ref) that a function writes, so its plan is not exported.",
            user_line(),
            hint="Run it by gshard.jit(f, mesh=found.mesh, plan=found.plan), or return the new values instead.",
        )
    made = ExportedPlan(found, found.explain().spmd, mesh_for_jit(found.plan.mesh, devices_for(found)))
    own = list(_own_marks(made))
    made.try_way(_ALONE, ())
    if made.is_far and own:
        made.try_way(_OWN, own)
    if made.is_far and (inside := _inside(found, program)):  # these take a while to find
        made.try_way(_FEW, [*own, *inside])
    return made


def _inside(found: SearchResult, program: Program) -> list[FoundMark]:
    """The marks that are about values inside: those of arguments are their shardings."""
    inputs = program.block.inputs
    return [mark for mark in found.marks.marks if not any(v in inputs for v in mark.shardings)]


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


def devices_for(found: SearchResult) -> Sequence[object]:
    """What a plan is compiled for: the mesh's devices, those of a TPU by libtpu, or the first that JAX has."""
    mesh, machine = found.plan.mesh, found.cost.machine
    on = topology_mesh(machine) if mesh.devices is None and machine.topology else mesh.on_first_devices()
    assert on.devices is not None, "both have devices"
    return on.devices


def has_explicit_axes(mesh: Mesh) -> bool:
    """Whether the mesh of JAX's that was given has axes that are not of type Auto."""
    return mesh.given is not None and any(kind != jax.sharding.AxisType.Auto for kind in mesh.given.axis_types)


def mesh_for_jit(mesh: Mesh, devices: Sequence[object]) -> Mesh:
    """The mesh for XLA's partitioner: with devices, and with axes of type Auto."""
    if mesh.devices is None:
        return dataclasses.replace(mesh, devices=tuple(devices), made_from=None)
    return dataclasses.replace(mesh, made_from=None) if has_explicit_axes(mesh) else mesh


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


def less_split(made: ExportedPlan) -> Iterator[str]:
    """Lists the arrays that ``jax.jit`` splits less at the boundary of the function than the plan does inside.

    JAX has no arrays in unequal parts, and no name for a part of an axis.
    """
    program, mesh = made.program, made.mesh
    results = jax.tree.unflatten(program.out_tree, range(program.out_tree.num_leaves))
    outs = [f"result {path_inside(keys)}".strip() for keys, _ in jax.tree_util.tree_leaves_with_path(results)]
    arrays = [
        *zip(program.names, program.block.inputs, made.come, strict=True),
        *zip(outs, program.block.outputs, made.leave, strict=False),
    ]
    for name, v, exported in arrays:
        if not isinstance(v, Value):
            continue
        planned = Sharding(made.plan.shardings[v].dims)
        uneven = [d for d, n in enumerate(v.shape) if n % mesh.count(planned.dims[d])]
        part = spec_of_cut(planned, mesh) is None
        if (uneven or part) and planned != exported:
            spec = spec_of_cut(exported, mesh)
            inside = planned.format(mesh, v.shape, v.dtype_name)
            reason = f"{v.shape[uneven[0]]} does not divide evenly" if uneven else "a part of an axis has no name"
            yield f"{name}: {inside} by the plan, {spec_text(spec) if spec is not None else ''} for jax.jit: {reason}"
