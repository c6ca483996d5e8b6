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
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import ArgumentError, PlanError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.mark import axes_of_entry, mark_of_cut, resolve, text_of_spec
from gshard.core.memory_kinds import in_memory, is_host_kind, is_in_host_space, shape_in_memory
from gshard.core.mesh import Mesh
from gshard.core.paths import path_inside, path_of
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program, Value, format_bytes
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.device.fusion_model import PRODUCT
from gshard.emit.compile import named_sharding
from gshard.explanation.compiled_source import CompiledCost
from gshard.explanation.explain import Explanation, read_compiled
from gshard.explanation.search_result import SearchResult
from gshard.language.mark_primitive import mark_p
from gshard.planning.added_marks import spec_of_cut, with_marks
from gshard.planning.demands import by_axes
from gshard.rewrite.rewrites import TRACE
from gshard.search.as_marks import FoundMark
from gshard.xla.peer import xla_function

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

    compiled: Explanation
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
    def compiled(self) -> Explanation:
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
    own = {v for e in made.program.block.walk() if e.primitive is mark_p for v in e.outputs}
    added = {v: mark_of_cut(s.dims, made.mesh) for v, s in wanted.items() if v not in own}
    program = with_marks(made.program, added) if added else made.program
    return None if program is None else xla_function(program, made.mesh, ignored=own - wanted.keys())


# Compiles the program of a plan with XLA's partitioner, and exports it with sdy shardings.

NEAR = 1.05  # of the plan's bytes, and of its products: what XLA may take and is taken to follow the plan
_NO_HELP = frozenset(row.name for row in TRACE if not row.helps_xla)
_WORSE_LINES = 8  # lines at which XLA sends more that are printed


@dataclasses.dataclass(frozen=True, slots=True)
class WorseLine:
    """A line at which XLA sends more than the plan."""

    line: str  # ``train.py:9``
    planned: int  # planned, compiled: bytes that each device sends for it
    compiled: int

    def __str__(self) -> str:
        return f"{format_bytes(self.compiled):>10} instead of {format_bytes(self.planned)}  {self.line or '(no line)'}"


@dataclasses.dataclass(frozen=True, eq=False)
class PlanCompiler:
    """Compiles functions of a program's flat inputs, captured arrays first, for the devices of a mesh."""

    found: SearchResult  # the search whose plan is exported
    spmd: SpmdProgram  # the per-device program of the plan
    mesh: Mesh  # the mesh of the plan, with devices

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.found.plan

    @property
    def program(self) -> Program:
        """The traced function."""
        return self.found.plan.program

    @property
    def jax_mesh(self) -> jax.sharding.Mesh:
        """The mesh with the names of its axes, as users write it."""
        found = self.mesh.user_jax_mesh
        assert isinstance(found, jax.sharding.Mesh), "it has devices"
        return found

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

    @functools.cached_property
    def planned_bytes(self) -> int:
        """Bytes that each device sends by the plan."""
        return sum(c.total_bytes for c in self.spmd.collectives)

    def on_mesh(self, spec: PartitionSpec, i: int) -> NamedSharding:
        """A spec for one input, in the memory in which it is."""
        return in_memory(NamedSharding(self.jax_mesh, spec), self.program.input_memory(i))

    def compiled(
        self,
        function: Callable[..., Any] | None = None,
        ins: Sequence[NamedSharding] | None = None,
        outs: Sequence[NamedSharding | None] | None = None,
    ) -> Explanation:
        """Compiles a function, and reads what XLA made of it."""
        function = xla_function(self.program, self.mesh) if function is None else function
        jitted = jax.jit(
            function,
            in_shardings=list(self.ins if ins is None else ins),
            out_shardings=list(self.outs if outs is None else outs),
        )
        return self.read(jitted.lower(*self.takes).compile())

    def read(self, made: Any) -> Explanation:
        """What a compiled program (``jax.stages.Compiled``) sends and holds."""
        return read_compiled(made, Mesh.of(self.jax_mesh))

    def ratio(self, made: Explanation) -> float:
        """Bytes that a compiled program sends, as a multiple of the plan's; 1 if neither sends anything."""
        planned = self.planned_bytes
        return made.total_bytes / planned if planned else 1.0 + bool(made.total_bytes)

    def products_ratio(self, made: Explanation) -> float:
        """Operations of products that each device computes, as a multiple of the plan's; 1 if neither has any.

        It is above 1 where XLA repeats on several devices what the plan splits, which sends nothing.
        """
        cost = made.cost(self.found.cost.machine)
        assert isinstance(cost, CompiledCost), "XLA compiled it"
        compiled = cost.products
        return compiled / self._planned_products if self._planned_products else 1.0 + bool(compiled)

    @functools.cached_property
    def _planned_products(self) -> int:
        return sum(k.flops * k.times for k in self.found.cost.kernels if k.kind == PRODUCT)

    def distance(self, made: Explanation) -> float:
        """The larger of both ratios, and 1 if neither is larger."""
        return max(1.0, self.ratio(made), self.products_ratio(made))

    def told(self, made: Explanation) -> str:
        """What a compiled program sends beside the plan, and how much more it computes, in half a line."""
        planned, products = format_bytes(self.planned_bytes), self.products_ratio(made)
        more = f", and computes {products:.2f} times its products" if products > NEAR else ""
        return f"XLA sends {format_bytes(made.total_bytes)}, {self.ratio(made):.2f} times the plan's {planned}{more}"

    @functools.cached_property
    def as_written(self) -> Explanation | None:
        """What XLA compiles from the function as written, with the shardings alone; None if that is known already.

        Otherwise the compiled program contains gshard's rewrites that move less.
        """
        function = self.found.function
        if function is None or not self._rewrites:
            return None
        first = len(self.program.captured)
        jitted = jax.jit(
            jaxpr_as_fun(function.jaxpr()), in_shardings=list(self.ins[first:]), out_shardings=list(self.outs)
        )
        return self.read(jitted.lower(*self.takes[first:]).compile())

    @property
    def _rewrites(self) -> list[str]:
        others = [one for one in self.program.fired if one.rewrite not in _NO_HELP]
        return list(dict.fromkeys(f"{one.rewrite}{' at ' * bool(one.line)}{one.line}" for one in others))

    @property
    def rewritten(self) -> list[str]:
        """Lines on rewrites of gshard's, which are in what is compiled and not in what ``jax.jit`` is given."""
        if not self._rewrites:
            return []
        fired = ", ".join(self._rewrites)
        if self.as_written is None:
            return [f"compiled with rewrites of gshard's, without which jax.jit may send more: {fired}"]
        return [f"without gshard's rewrites ({fired}), with the shardings alone: {self.told(self.as_written)}"]

    def worse(self, made: Explanation) -> tuple[WorseLine, ...]:
        """The lines at which a compiled program sends more than the plan, the largest difference first.

        None if it does not send more in all: XLA and the plan may reduce the same array at different lines.
        """
        if made.total_bytes <= self.planned_bytes:
            return ()
        planned: dict[str, int] = {}
        for c in self.spmd.collectives:
            line = c.line.partition(" (")[0].rpartition("/")[2]
            planned[line] = planned.get(line, 0) + c.total_bytes
        compiled: dict[str, int] = {}
        for row in made.collectives:
            compiled[row.line] = compiled.get(row.line, 0) + row.bytes
        rows = [WorseLine(line, planned.get(line, 0), n) for line, n in compiled.items() if n > planned.get(line, 0)]
        return tuple(sorted(rows, key=lambda row: row.planned - row.compiled))


def has_explicit_axes(mesh: Mesh) -> bool:
    """Whether the mesh of JAX's that was given has axes that are not of type Auto."""
    return mesh.given is not None and any(kind != jax.sharding.AxisType.Auto for kind in mesh.given.axis_types)


def mesh_for_jit(mesh: Mesh, devices: Sequence[object]) -> Mesh:
    """The mesh for XLA's partitioner: with devices, and with axes of type Auto."""
    if mesh.devices is None:
        return dataclasses.replace(mesh, devices=tuple(devices), made_from=None)
    return dataclasses.replace(mesh, made_from=None) if has_explicit_axes(mesh) else mesh


def worse_text(worse: Sequence[WorseLine]) -> list[str]:
    """The lines at which XLA sends more, for people; nothing if there are none."""
    title = "lines at which XLA sends more than the plan"
    return [title, *(f"  {row}" for row in worse[:_WORSE_LINES])] if worse else []


def spec_text(spec: PartitionSpec) -> str:
    """A spec as users write it, without what stands for nothing at its end.

    >>> spec_text(PartitionSpec(None, ("data", "model"), None)), spec_text(PartitionSpec(None))
    ('P(None, ("data", "model"))', 'P()')
    """
    entries = list(spec)
    while entries and not entries[-1]:
        entries.pop()
    return text_of_spec(entries).replace("'", '"')


def mesh_text(axes: Mapping[str, int] | Sequence[tuple[str, int]]) -> str:
    """The source text that makes a mesh of JAX's with these axes.

    >>> mesh_text({"data": 8})
    "jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,) * 1)"
    """
    sizes, names = tuple(dict(axes).values()), tuple(dict(axes))
    return f"jax.make_mesh({sizes}, {names}, axis_types=(jax.sharding.AxisType.Auto,) * {len(names)})"


# Exported arguments: a row for each array that a function takes, with its path and how the plan splits it.


@dataclasses.dataclass(frozen=True, slots=True)
class ExportedArgument:
    """One array that a function takes, and its sharding."""

    path: str  # ``params/up/kernel``; a node of Flax's that only holds the array and its metadata has no part in it
    value: Value  # its shape and dtype
    spec: PartitionSpec  # its sharding, an entry for each dimension
    memory: str  # the memory kind in which it is

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension the mesh axes that split it."""
        return tuple(map(axes_of_entry, self.spec))

    def __str__(self) -> str:
        shape = ",".join(map(str, self.value.shape))
        return f"{self.path}: {self.value.dtype_name}[{shape}] {spec_text(self.spec)}"


def arguments_of(made: PlanCompiler) -> tuple[ExportedArgument, ...]:
    """The rows of all arguments, those that were given by keyword last."""
    program, tree = made.program, made.found.in_tree
    first, inputs = len(program.captured), program.block.inputs
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    flat = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(numbered)]
    rows = []
    for keys, node in jax.tree_util.tree_leaves_with_path(numbered, is_leaf=_is_box):
        (i,) = jax.tree.leaves(node)
        v, name = inputs[first + i], program.names[first + i]
        parameter = name.removesuffix(jax.tree_util.keystr(flat[i][2:]))
        spec = spec_of_cut(made.come[first + i], made.mesh)
        assert spec is not None, "it is split over whole axes"
        memory = program.input_memory(first + i)
        rows.append(ExportedArgument(path_of(parameter, keys[2:]), v, spec, memory))
    return tuple(rows)


def _is_box(x: Any) -> bool:
    """Whether a node of a pytree is one array with metadata: a box of Linen or a variable of NNX."""
    return hasattr(type(x), "get_metadata") or (hasattr(x, "names") and hasattr(x, "value") and hasattr(x, "unbox"))


def less_split(made: PlanCompiler) -> Iterator[str]:
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


# Exported module: the program of a plan as StableHLO with ``sdy`` shardings, through ``jax.export``.


def exported_module(made: PlanCompiler, function: Callable[..., Any], compiled: Explanation) -> export.Exported:
    """The program as ``jax.export`` makes it, checked."""
    program, tree = made.program, made.found.in_tree
    first = len(program.captured)

    def called(*args: Any, **kwargs: Any) -> Any:
        # Captured arrays become constants of the module, which have no sharding but by a constraint.
        constants = [
            x if is_host_kind(s.memory_kind) else jax.lax.with_sharding_constraint(x, s)
            for x, s in zip(program.captured, made.ins, strict=False)
        ]
        return jax.tree.unflatten(program.out_tree, function(*constants, *jax.tree.leaves((args, kwargs))))

    called.__name__ = called.__qualname__ = program.name if program.name.isidentifier() else "f"
    args, kwargs = jax.tree.unflatten(tree, _shapes(made, first))
    options: dict[str, Any] = {"out_shardings": jax.tree.unflatten(program.out_tree, made.outs)}
    if not kwargs:
        options["in_shardings"] = jax.tree.unflatten(tree, made.ins[first:])[0]
    platform = made.jax_mesh.devices.flat[0].platform
    found = export.export(jax.jit(called, **options), platforms=[platform])(*args, **kwargs)
    again = jax.jit(lambda *args, **kwargs: found.call(*args, **kwargs), **options)
    sent = made.read(again.lower(*args, **kwargs).compile()).bytes_by_kind
    if sent != compiled.bytes_by_kind:
        raise PlanError(
            "the module that jax.export makes of this program sends other bytes than jax.jit's.",
            got=f"{sent}, and jax.jit: {compiled.bytes_by_kind}",
            hint="Export the function with exported.named(mesh) yourself: jax.export.export(jax.jit(f, ...)).",
        )
    return found


def _shapes(made: PlanCompiler, first: int) -> list[Any]:
    """For each argument its shape and dtype; with its sharding if ``in_shardings`` cannot give it that."""
    program = made.program
    by_keyword = bool(jax.tree.unflatten(made.found.in_tree, range(made.found.in_tree.num_leaves))[1])
    if not by_keyword:
        return list(made.takes[first:])
    for i, v in enumerate(program.block.inputs[first:], first):
        if v.on_host != is_in_host_space(program.input_memory(i)):
            raise PlanError(
                f"{program.names[i]} is in the memory {program.input_memory(i)!r}, and its type is of another one.",
                hint="Give arguments by position: jax.jit takes no in_shardings for arguments by keyword.",
            )
    inputs = zip(program.block.inputs[first:], made.ins[first:], strict=True)
    return [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s) for v, s in inputs]
