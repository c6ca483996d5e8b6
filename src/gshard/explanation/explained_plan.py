"""Computes the rows and lists of an explanation from a plan and its per-device program."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from gshard.core.errors import PlanError, counted
from gshard.core.jax_adapter import is_transposed
from gshard.core.layout import Named
from gshard.core.memory_kinds import is_host_kind
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan, local_bytes
from gshard.core.planning_tables import with_tables
from gshard.core.program import Block, Constant, Equation, Program, Value, format_bytes, itemsize, type_text
from gshard.core.sharding import Sharding
from gshard.core.spmd import Collective, SpmdProgram
from gshard.device.fusion_model import device_program, is_product
from gshard.explanation.difference import Comparable
from gshard.explanation.rows import (
    CollectiveRow,
    TensorRow,
    rows_of_collectives,
    rows_of_equal_layers,
    rows_of_tensors,
)
from gshard.explanation.warnings import (
    Replicated,
    idle_devices,
    notes_of_whole_values,
    replicated_work,
    returned_in_fewer_shards,
)
from gshard.language.mark_primitive import bound_text
from gshard.language.transfer import Transfer, changes_memory, transfers_of
from gshard.naming.array_names import UPDATE, ArrayNames
from gshard.planning.demands import demands

# Host memory: the arrays that a program keeps in host memory, and the transfers of a call.

_SHOWN = 12  # rows of what moves


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """What of a program is in the memory of the host."""

    arguments: tuple[int, int]  # bytes of the arguments there, whole and for each device
    results: tuple[int, int]  # the same of the results
    transfers: tuple[Transfer, ...]  # what moves between the memory of a device and that of the host
    # constraints that name the memory of the host; JAX and gshard read their shardings alone
    without_effect: tuple[str, ...] = ()

    @property
    def to_host(self) -> int:
        """Bytes that each device sends to the host in one call."""
        return sum(t.total_bytes for t in self.transfers if t.to_host)

    @property
    def from_host(self) -> int:
        """Bytes that each device fetches from the host in one call."""
        return sum(t.total_bytes for t in self.transfers if not t.to_host)

    @functools.cached_property
    def lines(self) -> list[str]:
        """The report as text; no line where nothing is on the host."""
        if not (self.transfers or self.arguments[0] or self.results[0] or self.without_effect):
            return []
        (whole, local), (left, left_local) = self.arguments, self.results
        lines = ["", "host memory"]
        for what, every, own in (("arguments", whole, local), ("results", left, left_local)):
            lines.append(f"  {what}: {format_bytes(every)} in all, {format_bytes(own)} for each device")
        moved = f"fetches {format_bytes(self.from_host)} from the host and sends {format_bytes(self.to_host)} to it"
        lines.append(f"  each device {moved} in one call")
        rows: dict[tuple[str, str, str, str], tuple[int, int]] = {}
        for t in self.transfers:
            key = ("to host" if t.to_host else "from host", t.shape, t.array, t.line)
            times, sent = rows.get(key, (0, 0))
            rows[key] = times + t.times, sent + t.total_bytes
        ordered = sorted(rows.items(), key=lambda row: -row[1][1])
        wide = max((len(array) for (*_, array, _), _ in ordered[:_SHOWN]), default=0)
        for (way, shape, array, line), (times, sent) in ordered[:_SHOWN]:
            lines.append(f"  {way:<18} x{times:<4} {format_bytes(sent):>10}  {shape:<24} {array:<{wide}}  {line}")
        if rest := ordered[_SHOWN:]:
            lines.append(f"  ... and {len(rest)} more rows with {format_bytes(sum(sent for _, (_, sent) in rest))}")
        return lines + [f"  {text}" for text in self.without_effect]


def host_memory(spmd: SpmdProgram, names: ArrayNames) -> HostMemory:
    """Reads off a per-device program what it keeps on the host."""
    program, mesh = spmd.program, spmd.mesh
    inputs, results = program.block.inputs, program.block.outputs
    come = [i for i in range(len(inputs)) if is_host_kind(program.input_memory(i))]
    leave = [i for i in range(len(results)) if is_host_kind(program.output_memory(i))]
    arguments = [(inputs[i], spmd.in_shardings[i]) for i in come]
    left = [(results[i], spmd.out_shardings[i]) for i in leave]
    moved = tuple(transfers_of(spmd.jaxpr))
    if moved:
        block = device_program(spmd).block
        own = ArrayNames.of_devices(block, program, names)
        values = [v for e in block.walk() if changes_memory(e) for v in e.inputs[:1] if isinstance(v, Value)]
        if [type_text(v) for v in values] == [t.shape for t in moved]:
            moved = tuple(dataclasses.replace(t, array=own.array(v).alike) for t, v in zip(moved, values, strict=True))
    return HostMemory(_bytes(arguments, mesh), _bytes(left, mesh), moved, tuple(_without_effect(program.block)))


def _without_effect(block: Block) -> Iterator[str]:
    """The constraints of JAX's that name a memory in which their value is not."""
    for e in block.walk():
        kind = getattr(e.params.get("sharding"), "memory_kind", None)
        if e.mark is not None and is_host_kind(kind) and not e.outputs[0].on_host:
            yield (
                f"{e.name} at {e.line} names memory {kind!r}, which has no effect, as in JAX: move the value with "
                "jax.device_put"
            )


def _bytes(arrays: Sequence[tuple[Value | Constant, Sharding]], mesh: Mesh) -> tuple[int, int]:
    """Bytes of some arrays, whole and of one device's parts."""
    whole = sum(math.prod(v.shape) * itemsize(v.dtype) for v, _ in arrays)
    return whole, sum(math.prod(s.local_shape(mesh, v.shape)) * itemsize(v.dtype) for v, s in arrays)


# Layout usage: the values that each row of a layout applies to, and the rows that are unused.

SHOWN = 8  # names


def uses_of_layout(program: Program) -> tuple[str, ...]:
    """How many values each row of the layout applies to, and which names are open."""
    layout = program.layout
    if layout is None:
        return ()
    used: Counter[str] = Counter()
    left: dict[str, None] = {}
    for named in _under(program):
        rows = layout.rows_of(named.names)
        used.update(dict.fromkeys((str(row) for row in rows if row is not None), 1))
        left |= dict.fromkeys(n for n, row in zip(named.names.dims, rows, strict=True) if n is not None and row is None)
    lines = [f"{row}: {counted(used[row], 'value')}" for row in dict.fromkeys(map(str, layout.rows)) if used[row]]
    if left:
        rest = ", ..." if len(left) > SHOWN else ""
        lines.append(f"open, since no row mentions them: {', '.join(list(left)[:SHOWN])}{rest}")
    return tuple(lines)


def unused_of_layout(program: Program, mesh: Mesh) -> tuple[str, ...]:
    """Rows that apply to nothing, and axes of the mesh that neither the layout nor any mark uses."""
    layout = program.layout
    if layout is None:
        return ()
    names = {name for named in _under(program) for name in named.names.dims}
    used = {row for named in _under(program) for row in layout.rows_of(named.names) if row is not None}
    found = []
    for row in dict.fromkeys(layout.rows):
        if row.name not in names:
            found.append(f"{row}: nothing is called {row.name!r}")
        elif row not in used:
            where = f"no argument below {row.at!r} has that name" if row.at else "another row goes before it everywhere"
            found.append(f"{row}: never applies, {where}")
    asked = {atom for _, demand, _ in demands(program, mesh) for atoms in demand.dims for atom in atoms}
    for axis, atoms in mesh.atoms_of.items():
        if mesh.count(atoms) > 1 and not asked & set(atoms):
            found.append(f"axis {axis!r} of the mesh: no row and no mark of this program uses it")
    return tuple(dict.fromkeys(found))


def refuse_unused(program: Program, mesh: Mesh) -> None:
    """Refuses a program that does not use all of its marks and all of its layout."""
    if program.unread_marks:
        where, _, what = program.unread_marks[0].partition(": ")
        hint = "A mark is about the value that it returns. Use that value, or allow it with strict=False."
        raise PlanError(f"a mark of {program.name} has no effect.", where, what, hint)
    if found := unused_of_layout(program, mesh):
        raise PlanError(
            f"{program.name} does not use all of its layout.",
            None,
            "\n  ".join([*found, f"mesh: {mesh}; {program.layout}"]),
            "Correct the names, leave out the rows, or allow it with strict=False.",
        )


def _under(program: Program) -> list[Named]:
    """The values for which the program's own layout says what their names mean."""
    return [named for named in program.named if named.layout == program.layout]


# Lists the marked arrays that devices send in low precision, with the error bound (``send=`` of the marks).


def sent_narrow(program: Program, names: ArrayNames) -> tuple[str, ...]:
    """For each line of a mark with ``send`` the arrays that it rounds, the dtype, and the error bound."""
    arrays: dict[tuple[str, str], dict[str, None]] = {}
    for e in program.block.walk():
        if e.mark is None or not e.mark.send or not isinstance(e.inputs[0], Value):
            continue
        send = e.mark.send
        scales = ", with a float32 scale for each row" if send == "int8" else ""
        bound = f"{send}{scales}: the error is at most {bound_text(e.mark.wide, send)}"
        name = names.array(e.inputs[0]).alike if names.is_named(e.inputs[0]) else ""
        arrays.setdefault((e.line, bound), {}).setdefault(name or e.mark.leaf or "an array", None)
    return tuple(f"{line}: {', '.join(called)} as {bound}" for (line, bound), called in arrays.items())


# Purposes: what the collectives of a program are for, in the terms of data, fully sharded and tensor parallelism.

_PRODUCT = "sums partial results of products (tensor parallelism: row-parallel forward, column-parallel backward)"
_SCATTERED = f"{_PRODUCT[:-1]}, with sequence parallelism)"
_OTHER = {
    "all_gather": "gathers an array",
    "all_reduce": "combines partial results of a reduction (a norm, a loss, a maximum)",
    "reduce_scatter": "combines partial results of a reduction, and splits the result",
    "all_to_all": "moves a split from one dimension of an activation to another",
    "collective_permute": "sends shards or edges of shards to other devices",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Purpose:
    """Collectives of one kind over the same axes with one purpose."""

    kind: str  # kind, axes: as of a row of ``Explanation.collectives``
    axes: str
    times: int  # how many run in one call of the program
    bytes: int  # what each device sends in all of them
    purpose: str  # what they are for

    def __str__(self) -> str:
        return f"{self.kind:<18} over {self.axes:<12} x{self.times:<4} {format_bytes(self.bytes):>10}  {self.purpose}"


class Purposes(tuple[Purpose, ...]):
    """All purposes, most bytes first; prints as lines."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


def purposes_of(plan: Plan, collectives: tuple[Collective, ...], names: ArrayNames) -> Purposes:
    """What the collectives of a plan's per-device program are for."""
    program = plan.program
    state = {i for i, _ in program.state(range(len(program.block.inputs)))}
    data = {names.arguments[v].text: v for i, v in enumerate(program.block.inputs) if i not in state}
    atoms_of_data = {a for v in data.values() for a in plan.shardings[v].atoms}
    producers = {v: e for e in program.block.walk() for v in e.outputs}
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for c in collectives:
        key = c.kind, plan.mesh.format_atoms(c.atoms), _purpose(c, names, plan, producers, data, atoms_of_data)
        times, sent = sums.get(key, (0, 0))
        sums[key] = times + c.times, sent + c.total_bytes
    rows = [Purpose(kind, axes, times, sent, purpose) for (kind, axes, purpose), (times, sent) in sums.items()]
    return Purposes(sorted(rows, key=lambda row: -row.bytes))


def _purpose(
    c: Collective,
    names: ArrayNames,
    plan: Plan,
    producers: Mapping[Value, Equation],
    data: Collection[str],
    atoms_of_data: set[str],
) -> str:
    name = names.array(c.value).text
    if names.is_gradient(c.value):
        if c.kind == "reduce_scatter" and atoms_of_data.isdisjoint(c.atoms):
            return "sums gradients of weights that products gathered over an axis that splits no input"
        if c.kind == "reduce_scatter":
            return "sums gradients of weights, one shard for each device (FSDP, ZeRO)"
        if c.kind == "all_reduce":
            return "sums gradients of weights (data parallelism)"
        return "moves gradients of weights"
    if name.startswith(UPDATE):
        return "gathers updated weights (ZeRO-1)" if c.kind == "all_gather" else "moves updated weights"
    is_read = c.cause is not None and c.cause.rule is not None and is_product(c.cause.rule)
    if c.kind == "all_gather":
        if name in data:
            return "gathers an input"
        if names.is_named(c.value):
            if atoms_of_data.isdisjoint(c.atoms):
                return "gathers weights over an axis that splits no input: this costs less than moving activations"
            return "gathers weights for products (FSDP, ZeRO-3)" if is_read else "gathers weights"
        return "gathers activations for products (sequence parallelism)" if is_read else "gathers activations"
    if c.kind in ("all_reduce", "reduce_scatter") and c.value is not None and _sums_product(c.value, plan, producers):
        if atoms_of_data.isdisjoint(c.atoms):
            return _PRODUCT if c.kind == "all_reduce" else _SCATTERED
        if c.cause is not None and is_transposed(c.cause.source_info):
            return "sums gradients over the batch (data parallelism)"
        return "sums partial results of products whose summed dimension is split"
    if c.kind == "all_to_all" and c.value is None and c.cause is not None:
        return f"sends elements to other devices inside {c.cause.name}"
    return _OTHER[c.kind]


def _sums_product(v: Value, plan: Plan, producers: Mapping[Value, Equation]) -> bool:
    """Whether a value is made of partial results of a product, through equations that keep parts of sums."""
    open_values, seen = [v], set[Value]()
    while open_values:
        value = open_values.pop()
        e = producers.get(value)
        if value in seen or e is None:
            continue
        seen.add(value)
        if e.rule is not None and is_product(e.rule):
            return True
        open_values += [x for x in e.inputs if isinstance(x, Value) and plan.shardings[x].unreduced]
    return False


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class ExplainedPlan(Comparable):
    """A plan and its per-device program, with the rows and lists that explain them."""

    plan: Plan  # the sharding of every value
    spmd: SpmdProgram  # the per-device program
    donated: frozenset[int] = frozenset()  # arguments whose memory results may take

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.plan.program.name

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.plan.mesh

    @property
    def equations(self) -> int:
        """Number of equations, bodies included."""
        return sum(1 for _ in self.plan.program.block.walk())

    @functools.cached_property
    def names(self) -> ArrayNames:
        """What its arrays are called, and in which module each operation is."""
        return ArrayNames(self.plan.program)

    @functools.cached_property
    def tensors(self) -> tuple[TensorRow, ...]:
        """All arrays, largest first."""
        return rows_of_tensors(self.plan, self.names, notes_of_whole_values(self.plan, self._replicated_work))

    @functools.cached_property
    def collectives(self) -> tuple[CollectiveRow, ...]:
        """All collectives, most bytes first; those of equal layers in one row."""
        return rows_of_equal_layers(self.spmd.collectives, self.mesh, self.names)

    @functools.cached_property
    def all_rows(self) -> tuple[CollectiveRow, ...]:
        """The same with each layer by itself."""
        return rows_of_collectives(self.spmd.collectives, self.mesh, self.names)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that each device sends in one call, by kind of collective."""
        total: Counter[str] = Counter()
        for row in self.collectives:
            total[row.kind] += row.bytes
        return dict(total)

    @property
    def purposes(self) -> Purposes:
        """What the collectives are for, in the terms of data, fully sharded and tensor parallelism; prints as lines.

        >>> import gshard, jax.numpy as jnp
        >>> f = lambda x, w: gshard.split(x, 1, 8) @ w
        >>> found = gshard.explain(f, jnp.ones((64, 512)), jnp.ones((512, 32)), mesh=gshard.Mesh.abstract(devices=8))
        >>> [(row.kind, row.purpose) for row in found.purposes]
        [('all_reduce', 'sums partial results of products whose summed dimension is split')]
        """
        return purposes_of(self.plan, self.spmd.collectives, self.names)

    @property
    def argument_bytes(self) -> tuple[int, int]:
        """Bytes of all arguments in the memory of the devices, whole and on one device."""
        program = self.plan.program
        held = [v for i, v in enumerate(program.block.inputs) if not is_host_kind(program.input_memory(i))]
        return sum(v.bytes for v in held), sum(local_bytes(v, self.plan.shardings[v], self.mesh) for v in held)

    @functools.cached_property
    def host(self) -> HostMemory:
        """What is in the memory of the host, and what moves between host and device in one call."""
        return host_memory(self.spmd, self.names)

    @functools.cached_property
    @with_tables
    def _replicated_work(self) -> tuple[Replicated, ...]:
        return replicated_work(self.plan)

    @functools.cached_property
    def replicated(self) -> tuple[str, ...]:
        """Work that devices repeat.

        Axes whose devices repeat each other's work, dimensions with too few elements for their devices; operations that
        every device computes whole although an operand is split: line, how many times its share, bytes spared, the mark
        that forbids it.
        """
        return (*idle_devices(self.plan, self.names), *map(str, self._replicated_work))

    @property
    def lists(self) -> tuple[tuple[str, str, str, tuple[str, ...]], ...]:
        """The lists of lines: key in the data, title in the text, title on the page if it is another, and the lines."""
        program = self.plan.program
        return (
            ("replicated", "work that every device repeats, and devices without work", "", self.replicated),
            ("pipelines", "loops that run as pipelines", "", program.pipelines),
            ("batches", "equal functions of separate arrays, computed in one batch", "", program.batches),
            (
                "returned",
                "results returned in fewer shards than they have inside: a jax.Array cannot have these",
                "Results returned in fewer shards than they have inside",
                self.returned,
            ),
            ("low_precision", "arrays in low precision, by marks with send=", "", self.low_precision),
            ("layout", "layout", "", self.layout),
            (
                "unused",
                "marks and rows of the layout without effect, probably by mistake (strict=True refuses them)",
                "Marks and rows of the layout without effect",
                self.unused,
            ),
            (
                "gathered",
                "operators without a rule: gshard gathers their operands, and every device repeats the work",
                "No rule, so operands are gathered",
                self.gathered,
            ),
            (
                "dropped",
                "features of the program that gshard drops (strict=True refuses them)",
                "Said by the program and not kept",
                self.dropped,
            ),
        )

    @property
    def gathered(self) -> tuple[str, ...]:
        """Operations without a rule: line, operation, operands, bytes gathered on every device."""
        return tuple(self.plan.gathered_text())

    @property
    def dropped(self) -> tuple[str, ...]:
        """Features of the program that gshard does not keep: line, parameter, value, what gshard does instead."""
        return tuple(map(str, self.plan.program.dropped))

    @property
    def layout(self) -> tuple[str, ...]:
        """How many values each row of the layout applies to, which names are open, where the order of rules decided."""
        return uses_of_layout(self.plan.program)

    @property
    def unused(self) -> tuple[str, ...]:
        """Marks whose results nothing reads, and parts of the layout that apply to nothing."""
        program = self.plan.program
        return (*program.unread_marks, *unused_of_layout(program, self.mesh))

    @functools.cached_property
    def returned(self) -> tuple[str, ...]:
        """Results that a ``jax.Array`` cannot hold in the shards of the plan.

        Each with these shards, those that are returned, the bytes of both on a device, and the way out.
        """
        return returned_in_fewer_shards(self.plan, self.names)

    @property
    def low_precision(self) -> tuple[str, ...]:
        """Arrays that marks with ``send`` round: line, arrays, dtype, error bound."""
        return sent_narrow(self.plan.program, self.names)
