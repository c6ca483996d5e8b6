"""Plan source: the rows, kernels and lists of an explanation, read from a plan and its per-device program."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax

from gshard.core.errors import ArgumentError, PlanError, counted, known_names
from gshard.core.jax_adapter import Frame, scan_counts, user_frames
from gshard.core.mark import text_of_spec
from gshard.core.memory_kinds import is_host_kind
from gshard.core.mesh import Mesh
from gshard.core.number_text import format_ms, significant
from gshard.core.plan import Plan, local_bytes
from gshard.core.planning_tables import with_tables
from gshard.core.program import Block, Equation, Program, Value, format_bytes, type_text
from gshard.core.spmd import Collective, SpmdProgram
from gshard.device.cost import Cost, KernelCost, cost, origins
from gshard.device.fusion_model import COLLECTIVE, device_program, is_product
from gshard.device.machine import Machine, machine_of, unknown_devices
from gshard.device.memory import held_at_peak
from gshard.device.network import groups
from gshard.explanation.advice import advice
from gshard.explanation.places import Place, Places, helpers_of, place_in
from gshard.explanation.rows import (
    ArrayRow,
    CollectiveRow,
    HeldRows,
    Listed,
    Moved,
    TimedKernel,
    collective_lines,
    collective_rows,
    sent_by,
)
from gshard.explanation.trials import trials
from gshard.explanation.verdict import (
    Verdict,
    does_not_pay,
    hint,
    how_chosen,
    ragged_products,
    sentences_of,
    work_of_plan,
)
from gshard.explanation.warnings import (
    idle_devices,
    notes_of_whole_values,
    replicated_work,
    returned_in_fewer_shards,
)
from gshard.language.mark_primitive import bound_text
from gshard.language.transfer import changes_memory
from gshard.naming.argument_names import ArrayName
from gshard.naming.array_names import ArrayNames
from gshard.planning.demands import demands

_TO, _FROM = "to_host", "from_host"
_SHOWN = 12  # names, or rows of what moves, in a list

# Host memory: the arrays that a program keeps in host memory, and the transfers of a call.


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """What of a program is in the memory of the host."""

    arguments: tuple[int, int]  # bytes of the arguments there, whole and for each device
    results: tuple[int, int]  # the same of the results
    # what moves from the memory of the host to that of a device (``from_host``), and back (``to_host``)
    transfers: tuple[Moved, ...]
    # constraints that name the memory of the host; JAX and gshard read their shardings alone
    without_effect: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The report as text; no line where nothing is on the host."""
        if not (self.transfers or self.arguments[0] or self.results[0] or self.without_effect):
            return ()
        lines = [
            f"{what}: {format_bytes(whole)} in all, {format_bytes(local)} for each device"
            for what, (whole, local) in (("arguments", self.arguments), ("results", self.results))
        ]
        moved = sent_by((t.kind, t) for t in self.transfers)
        fetched, sent = (format_bytes(moved.get(kind, (0, 0))[1]) for kind in (_FROM, _TO))
        lines.append(f"each device fetches {fetched} from the host and sends {sent} to it in one call")
        lines += (line[2:] for line in collective_lines(collective_rows(self.transfers, {}), _SHOWN))
        return (*lines, *self.without_effect)


def host_memory(spmd: SpmdProgram, names: ArrayNames) -> HostMemory:
    """Reads off a per-device program what it keeps on the host."""
    program, block, transfers = spmd.program, spmd.program.block, list[Moved]()
    if any(v.on_host for v in block.values()):
        inside = device_program(spmd).block
        own = ArrayNames.of_devices(inside, program, names)
        for e, times in inside.runs():
            if changes_memory(e) and isinstance(v := e.inputs[0], Value):
                (result,) = e.outputs
                one = Moved(
                    kind=_TO if result.on_host else _FROM, axes="host link", times=times, bytes=result.bytes * times,
                    shape=type_text(result), line=e.line, cause=None, array=own.array(v), module=ArrayName(),
                    why=ArrayName(e.name, e.name), source=e, key=id(e),
                )  # fmt: skip
                transfers.append(one)
    held = [
        [(v, s) for i, (v, s) in enumerate(zip(arrays, shardings, strict=True)) if is_host_kind(memory(i))]
        for arrays, shardings, memory in (
            (block.inputs, spmd.in_shardings, program.input_memory),
            (block.outputs, spmd.out_shardings, program.output_memory),
        )
    ]
    arguments, results = (
        (sum(v.bytes for v, _ in end), sum(local_bytes(v, s, spmd.mesh) for v, s in end)) for end in held
    )
    return HostMemory(arguments, results, tuple(transfers), tuple(_without_effect(block)))


def _without_effect(block: Block) -> Iterator[str]:
    """The constraints of JAX's that name a memory in which their value is not."""
    for e in block.walk():
        kind = getattr(e.params.get("sharding"), "memory_kind", None)
        if e.mark is not None and is_host_kind(kind) and not e.outputs[0].on_host:
            yield (
                f"{e.name} at {e.line} names memory {kind!r}, which has no effect, as in JAX: move the value with "
                "jax.device_put"
            )


# Layout usage: the rows that are unused.


def unused_of_layout(program: Program, mesh: Mesh) -> tuple[str, ...]:
    """Rows that apply to nothing, and axes of the mesh that neither the layout nor any mark uses."""
    layout = program.layout
    if layout is None:
        return ()
    of_layout = (named for named in program.named if named.layout == layout)  # not of a layout of a function inside
    names = {name for named in of_layout for name in named.names.dims}
    found = []
    for row in layout.rows:
        if row.name not in names:
            found.append(f"{row}: nothing is called {row.name!r}")
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


# Arrays: a row for each, with the reasons for its sharding.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow(ArrayRow):
    """One array of a plan."""

    plan: Plan = dataclasses.field(repr=False)  # the plan
    value: Value = dataclasses.field(repr=False)  # the value in the plan

    @property
    def why(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension that is split, the reasons from here back to a mark."""
        return tuple((nearest, *self.plan.chain(self.value, d)[1:]) for d, nearest in self._nearest().items())

    def _nearest(self) -> dict[int, str]:
        """The nearest reason for each dimension that is split."""
        split = [d for d in range(len(self.value.shape)) if (self.value, d) in self.plan.sources]
        return {d: f"dimension {d}: {self.plan.reasons[self.value, d]}" for d in split}

    @property
    def reason(self) -> str:
        """For each dimension the nearest reason and the mark where the chain ends, in one line."""
        texts = []
        for d, nearest in self._nearest().items():
            root = str(self.plan.roots[self.value, d])
            texts.append(nearest if root in nearest else f"{nearest} <- {root}")
        return "; ".join(texts) or self.note or "replicated: no mark splits it"


def rows_of_tensors(plan: Plan, names: ArrayNames, notes: Mapping[Value, str]) -> tuple[TensorRow, ...]:
    """All arrays of a plan, largest first."""
    program = plan.program
    called, notes = dict(zip(program.block.inputs, program.names, strict=True)), dict(notes)
    for e in program.block.walk():
        at = f" at {e.line}" if e.line else ""
        for v in e.outputs:
            called.setdefault(v, f"%{v.index} {e.name}{at}")
        for block in e.blocks:
            for v in block.inputs:
                called.setdefault(v, f"%{v.index} in {e.name}")
        if e.rule is not None and e.rule.fixed is not None:
            note = f"{e.name}{at} says how it is sharded there"
            notes |= {v: note for v in (*e.inputs, *e.outputs) if isinstance(v, Value)}
    return tuple(
        TensorRow(
            name=called[v], short=names.arguments.get(v, ArrayName()), sharding=plan.format(v), bytes=v.bytes,
            local_bytes=local_bytes(v, plan.shardings[v], plan.mesh), is_argument=v in names.arguments,
            note=notes.get(v, ""), plan=plan, value=v,
        )
        for v in sorted(plan.shardings, key=lambda v: (-v.bytes, v.index))
    )  # fmt: skip


# Collectives: what each moves, and what it is called.


def _moved(c: Collective, cause: Place | None, mesh: Mesh, names: ArrayNames) -> Moved:
    """What a collective of a per-device program moves."""
    array, module, alike = names.moved(c), names.module(c.cause), c.why
    if names.is_named(c.value) and array.alike != array.text:  # else only its position tells a layer apart
        module = ArrayName(module.text, re.sub(r"\d+", "*", module.text))
        if c.cause is not None and c.cause.blocks:  # equal layers are different operands of a loop
            alike = re.sub(r"^(operand|result) \d+ of", r"\1 of", c.why)
    if not names.is_named(c.value) and c.cause is not None:
        module = names.module_or_weight(c.cause)
    loops = ", which loops over the split dimension: split another" * _is_looped(c)
    return Moved(
        kind=c.kind, axes=mesh.format_atoms(c.atoms), times=c.times, bytes=c.total_bytes, shape=c.shape,
        line=c.line if cause is None or cause.via is None else cause.text, cause=cause, array=array, module=module,
        why=ArrayName(c.why + loops, alike + loops), source=c, key=id(c),
    )  # fmt: skip


def _is_looped(c: Collective) -> bool:
    """Whether it moves what a scan reads a slice of in each iteration, because the dimension of the slices is split."""
    position = re.match(r"operand (\d+) of scan$", c.why)
    if position is None or c.cause is None or c.before is None:
        return False
    is_sliced = int(position[1]) >= sum(scan_counts(c.cause.params))
    return is_sliced and not set(c.atoms).isdisjoint(c.before.dims[0])


def text_of_rings(plan: Plan) -> tuple[str, ...]:
    """What collective matmuls were chosen for: seconds of a call without them and with them, on a machine."""
    if plan.spared is None:
        return ()
    without, taken, machine = plan.spared
    times = f"a call on {machine} takes {significant(taken * 1e3, 4)} instead of {format_ms(without)}"
    return (f"{counted(len(plan.rings), 'product')}: {times}; collective_matmul=False prevents that",)


@dataclasses.dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class PlanSource:
    """A plan and its per-device program, as an explanation reads them."""

    jax: ClassVar[str] = jax.__version__  # what traced it
    plan: Plan  # the sharding of every value
    spmd: SpmdProgram  # the per-device program
    donated: frozenset[int] = frozenset()  # arguments whose memory results may take
    # what all devices would run if the program had other marks, also planned by bytes
    marked: Callable[..., SpmdProgram]
    by_bytes: bool = False  # whether it is the plan that sends least
    # what planning took, and with other marks takes about again; 0 if not measured
    planning_seconds: float = 0.0

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.plan.program.name

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.plan.mesh

    @functools.cached_property
    def size(self) -> str:
        """How many equations it has, bodies included; and that there is no model of the devices, if so."""
        unknown = unknown_devices(self.mesh) if self.by_bytes else None
        by_bytes = "" if unknown is None else f"; no model of {unknown}: planned by bytes"
        return f"{sum(1 for _ in self.plan.program.block.walk()):,} equations{by_bytes}"

    @functools.cached_property
    def names(self) -> ArrayNames:
        """What its arrays are called, and in which module each operation is."""
        return ArrayNames(self.plan.program)

    @functools.cached_property
    def arrays(self) -> tuple[TensorRow, ...]:
        """All arrays, largest first."""
        return rows_of_tensors(self.plan, self.names, notes_of_whole_values(self.plan))

    @functools.cached_property
    def moved(self) -> tuple[Moved, ...]:
        """The arrays that collectives move."""
        return tuple(_moved(c, self._place_of(c.cause), self.mesh, self.names) for c in self.spmd.collectives)

    @functools.cached_property
    def _helpers(self) -> frozenset[tuple[str, str]]:
        """The user's functions for layers, whose lines do not tell what is computed."""
        products, others = list[tuple[Frame, ...]](), list[tuple[Frame, ...]]()
        for e in self.plan.program.block.walk():
            (products if e.rule is not None and is_product(e.rule) else others).append(user_frames(e.source_info))
        return helpers_of(products, others)

    def _place_of(self, e: Equation | None) -> Place | None:
        """The user's line of an equation; None if JAX kept none."""
        return None if e is None else place_in(user_frames(e.source_info), self._helpers, e.file)

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
    def lists(self) -> tuple[Listed, ...]:
        """The lists of lines; some may be empty."""
        plan, program, recomputed = self.plan, self.plan.program, self.spmd.recomputed
        repeated = *idle_devices(plan, self.names), *replicated_work(plan)
        unused = *program.unread_marks, *unused_of_layout(program, self.mesh)
        rows: tuple[tuple[str, str, Iterable[str]], ...] = (
            ("host", "host memory", self.host.lines),
            ("collective_matmuls", "collective matmuls: parts of products are computed while others are sent",
             text_of_rings(plan)),
            ("recomputed", "values that are recomputed", () if recomputed is None else str(recomputed).splitlines()),
            ("replicated", "work that every device repeats, and devices without work", repeated),
            ("pipelines", "loops that run as pipelines", program.pipelines),
            ("batches", "equal functions of separate arrays, computed in one batch", program.batches),
            ("returned", "results returned in fewer shards than they have inside: a jax.Array cannot have these",
             returned_in_fewer_shards(plan, self.names)),
            ("low_precision", "arrays in low precision, by marks with send=", sent_narrow(program, self.names)),
            ("unused", "marks and rows of the layout without effect, probably by mistake (strict=True refuses them)",
             unused),
            ("gathered", "operators without a rule: gshard gathers their operands, and every device repeats the work",
             plan.gathered_text()),
            ("dropped", "features of the program that gshard drops (strict=True refuses them)",
             map(str, program.dropped)),
        )  # fmt: skip
        return tuple(Listed(key, title, tuple(lines)) for key, title, lines in rows)

    def machine(self) -> Machine | None:
        """The devices of the mesh, and CPUs for an abstract one."""
        return machine_of(self.mesh)

    def cost(self, machine: Machine) -> Cost:
        """What a call takes."""
        return cost(self.spmd, machine, self.donated)

    def kernels(self, found: Cost) -> tuple[TimedKernel, ...]:
        """The kernels of a cost, in order."""
        rows = []
        for k, c in zip(found.kernels, origins(self.spmd, found), strict=True):
            cause = k.equation if c is None or c.cause is None else c.cause
            kind, key = k.name if k.kind == COLLECTIVE else k.kind, None if c is None else id(c)
            rows.append(TimedKernel(k, f"{k.name} {k.result}", kind, self._place_of(cause), key))
        return tuple(rows)

    def held(self, found: Cost) -> HeldRows:
        """What a device holds."""
        rows = held_at_peak(found.memory, found.program.block, self.plan.program, self.names)
        alive = [(h.type, h.bytes, h.name, self._place_of(h.equation), h.count) for h in rows]

        def named(moment: Any) -> tuple[str, Place | None]:
            return moment.equation.name, self._place_of(moment.equation)

        return HeldRows(found.memory, "as modelled", found.memory.moments, named, alive)

    def verdict(
        self, found: Cost, rows: Sequence[CollectiveRow], planned_for: Machine | None, seconds: float
    ) -> Verdict:
        """What bounds a call, with the marks that would lower what is sent, found in so many seconds."""
        moved = [[one.source for one in row.moved] for row in rows]
        tried = trials(moved, self.plan, self.marked, found, seconds=seconds, one=self.planning_seconds)
        ideal, work, text = work_of_plan(self.plan, found)
        of_work = does_not_pay(self.plan, found), text, ragged_products(found)
        of_choice = hint(tried), how_chosen(self.plan, found, self.by_bytes, planned_for, tried.best())
        proposals = tuple(map(tried.best, range(len(rows))))
        return Verdict(found, ideal, sentences_of(found, rows, of_work, of_choice), work, tried, proposals)

    def details_of_row(self, row: CollectiveRow, kernels: Sequence[TimedKernel], places: Places) -> dict[str, Any]:
        """What the page alone shows of a row of collectives, which has these kernels (``report.data``)."""
        c, mesh = row.moved[0].source, self.mesh
        costed = [k.cost for k in kernels if isinstance(k.cost, KernelCost)]
        over = costed[0].axes if costed else c.atoms
        pairs = {(int(a), int(b)) for k in costed if k.axes == over for a, b in k.equation.params.get("perm", ())}
        resharded = ""
        if c.value is not None and c.before is not None and c.after is not None:
            resharded = " → ".join(s.format(mesh, c.value.shape, c.value.dtype_name) for s in (c.before, c.after))
        return {
            "atoms": c.atoms, "groups": groups(mesh, c.atoms), "emitted": places.of(self._place_of(c.emitted)),
            "moved": resharded, "advice": advice(c, self.plan), "pairs": sorted(pairs), "over": over,
        }  # fmt: skip

    def details_of_arrays(self, places: Places) -> list[dict[str, Any]]:
        """What the page alone shows of each array (``report.data``)."""
        plan = self.plan
        number = {row.value: i for i, row in enumerate(self.arrays)}
        read: dict[Value, dict[str, None]] = {v: {} for v in plan.program.block.inputs}
        for e in plan.program.block.walk():
            for v in e.inputs:
                if isinstance(v, Value) and v in read and (place := places.of(self._place_of(e))):
                    read[v][place] = None
        rows = []
        for row in self.arrays:
            v, dims, reasons = row.value, plan.shardings[row.value].dims, []
            for d, atoms in enumerate(dims):
                if atoms and (reason := plan.reasons.get((v, d))):
                    source = plan.sources[v, d]
                    reasons.append((d, str(reason), *((-1, -1) if source is None else (number[source[0]], source[1]))))
            spec = plan.mesh.spec_of(dims) if row.is_argument else None
            place = places.of(self._place_of(plan.program.producers.get(v)))
            rows.append({
                "dtype": v.dtype_name, "shape": list(v.shape), "dims": list(map(list, dims)),
                "spec": "" if spec is None else text_of_spec(spec), "place": place,
                "read": list(read.get(v, ())), "reason": row.reason if reasons else "", "reasons": reasons,
            })  # fmt: skip
        return rows

    def row_called(self, name: str) -> TensorRow:
        """The first row with a printed name."""

        def is_called(row: TensorRow) -> bool:
            if row.is_argument:
                return name in (row.name, row.short.text)
            return row.name == name or row.name.startswith(f"{name} ") or f" at {name} (" in row.name

        rows = self.arrays
        moved = {one.source.value for one in self.moved if name in (one.array.text, one.array.alike)} - {None}
        if row := next(filter(is_called, rows), None) or next((row for row in rows if row.value in moved), None):
            return row
        arguments = [row.short.text for row in rows if row.is_argument][:24]
        raise ArgumentError(
            f"no tensor is called {name!r}.",
            hint=known_names(name, arguments, "Arguments are")
            + " The printed tables have the others: %2, train.py:9 for a line, or the array of a collective.",
        )
