"""Compiled source: the rows, kernels and lists of an explanation, read from a program that XLA compiled.

Everything is read from the text of the compiled program, so it is the same for programs of XLA's partitioner, of
``jax.shard_map`` and of gshard, and for CPU, GPU and TPU.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import NamedSharding

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.mark import text_of_spec
from gshard.core.mesh import Mesh
from gshard.core.number_text import format_seconds
from gshard.core.paths import path_of
from gshard.core.time_budget import Progress
from gshard.device.cost import WORTH, CallTotals, Run
from gshard.device.fusion_model import COLLECTIVE, FUSED, OPERATOR
from gshard.device.machine import Machine, MachineError
from gshard.device.network import groups, permutation_seconds, seconds, seconds_among
from gshard.explanation.compiled_program import (
    CompiledArgument,
    CompiledProgram,
    memory_figures,
    parameter_shardings,
    read_program,
)
from gshard.explanation.compiled_rows import (
    atoms_of,
    counted_listed,
    moved_by,
    whole_arguments,
    whole_arguments_listed,
)
from gshard.explanation.places import Place, Places
from gshard.explanation.rows import (
    CollectiveRow,
    HeldRows,
    Listed,
    Moved,
    TimedKernel,
)
from gshard.explanation.traced_expressions import Constraint, TracedProgram
from gshard.explanation.tried_changes import (
    SECONDS,
    Advice,
    Change,
    Figures,
    Planned,
    Specs,
    Trials,
    advised,
    constraints_to_try,
    sharding_changes,
)
from gshard.explanation.verdict import Verdict, sentences_of
from gshard.naming.argument_names import equal_modules
from gshard.xla.dataflow import Array
from gshard.xla.hlo_collectives import CompiledCollective, pairs_of
from gshard.xla.hlo_parser import Instruction, Origin, arrays_of, origin_of
from gshard.xla.kernels import Ran, elapsed

# The cost of a compiled program: the modelled time, FLOPs, bytes and memory of one call.


@dataclasses.dataclass(frozen=True)
class CompiledCost(CallTotals):
    """What one call of a compiled program takes on each device, as modelled."""

    machine: Machine  # what was assumed
    kernels: tuple[Ran, ...]  # the instructions that take time, in order
    peak: int  # the most bytes that a device holds
    unknown: tuple[str, ...] = ()  # custom calls whose operations the text does not tell: they count by their bytes
    # one call in time; what the network does may run beside kernels
    call: Run = dataclasses.field(default=Run(0.0), repr=False)

    @property
    def products(self) -> int:
        """Operations of products in one call."""
        return sum(k.work.products * k.times for k in self.kernels if k.work is not None)


def _network_seconds(program: CompiledProgram, machine: Machine, sent: CompiledCollective, size: int) -> float:
    """Seconds of one run of a collective whose operands have these bytes, by the links of its groups."""
    mesh = program.mesh
    # A ragged exchange is priced as a full one, and a broadcast as a gather.
    kind = "all_to_all" if sent.kind.endswith("all_to_all") else sent.kind.replace("collective_broadcast", "all_gather")
    order = mesh.order or range(mesh.size)
    if kind == "collective_permute":
        pairs = [(order[a], order[b]) for a, b in pairs_of(sent.itself) if a != b]
        return permutation_seconds(min(size, sent.bytes_moved), pairs, machine) if pairs else 0.0
    if sent.group_size < 2:
        return 0.0
    if (atoms := atoms_of(program, sent)) is not None:
        return seconds(kind, size, mesh, machine, atoms)
    return max(seconds_among(kind, size, sorted(order[d] for d in group), machine) for group in sent.groups)


# Source.

# What JAX and XLA raise for a program with a sharding that they do not support, or that jax.jit was given otherwise.
REFUSED = (jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError)


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledAgain:
    """What compiles an explained function once more, with other shardings or constraints."""

    # for each argument of the program the array that the user gives, as ``jax.ShapeDtypeStruct`` with its sharding;
    # None if it is not known
    leaves: tuple[Any, ...]
    traced: Callable[[], Any]  # the jaxpr of the function
    # compiles and explains a jaxpr in its place, with other shardings of some arguments
    instead: Callable[[Any, Specs], CompiledSource]
    # what gshard plans for the function; it takes the seconds after which it gives up
    planned: Callable[[float], Planned | None]

    def compiled(self, specs: Specs, changed: Callable[[Any], Any] = lambda jaxpr: jaxpr) -> CompiledSource | None:
        """Compiles the function with other shardings and a changed jaxpr; None if JAX or XLA refuses it."""
        jaxpr = self.traced()
        try:
            return self.instead(changed(jaxpr), specs)
        except REFUSED:
            return None


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class CompiledSource:
    """A compiled program, as an explanation reads it."""

    program: CompiledProgram  # what was read
    # what compiles the function again, with other shardings or constraints; None for a program compiled elsewhere
    again: CompiledAgain | None = None
    not_for: tuple[str, ...] = ()  # why it is not compiled for the machine that was named, and what to do

    @property
    def name(self) -> str:
        """The function."""
        return self.program.name

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.program.mesh

    @property
    def size(self) -> str:
        """How many instructions it has, and what they are for."""
        by = f" for {self.program.platform}" if self.program.platform else ""
        return f"{self.program.instructions:,} instructions, compiled by XLA{by}"

    @functools.cached_property
    def arrays(self) -> tuple[CompiledArgument, ...]:
        """The arguments, largest first."""
        return tuple(sorted(self.program.arguments, key=lambda a: -(a.bytes or a.local_bytes)))

    @functools.cached_property
    def moved(self) -> tuple[Moved, ...]:
        """The arrays that collectives move, one by one, in the order of the program."""
        return moved_by(self.program)

    @property
    def argument_bytes(self) -> tuple[int | None, int]:
        """Bytes of all arguments, whole (None if the program does not tell) and on one device."""
        sizes = [a.bytes for a in self.program.arguments]
        whole = None if None in sizes else sum(size for size in sizes if size is not None)
        return whole, sum(a.local_bytes for a in self.program.arguments)

    @functools.cached_property
    def lists(self) -> tuple[Listed, ...]:
        """The lists of lines; some may be empty."""
        whole = whole_arguments_listed(whole_arguments(self.program))
        return counted_listed(self.program, self.not_for), whole

    jax: ClassVar[str] = ""  # what traced it: a text does not tell

    def machine(self) -> None:
        """None: the text alone does not tell on which devices it runs."""

    def cost(self, machine: Machine) -> CompiledCost:
        """What a call takes."""
        program = self.program
        if machine.size != program.mesh.size:
            raise MachineError(
                f"{machine.name} has {machine.size} devices, and the program runs on {program.mesh.size}.",
                got=f"mesh: {program.mesh}",
            )
        network = functools.partial(_network_seconds, program, machine)
        call = elapsed(program.module, machine, network, program.sent)
        kernels = tuple(row for row in call.kernels() if isinstance(row, Ran))
        unknown = {
            row.made.attributes.partition('custom_call_target="')[2].partition('"')[0]
            for row in kernels
            if row.work is not None and not row.work.is_known
        }
        return CompiledCost(machine, kernels, program.peak, tuple(sorted(unknown)), call)

    def kernels(self, found: CompiledCost) -> tuple[TimedKernel, ...]:
        """The kernels of a cost, in order; a collective has the line of the first array that it moves."""
        first: dict[int, Place | None] = {}
        for one in self.moved:
            first.setdefault(one.key, one.cause)
        rows = []
        for k in found.kernels:
            sent, kind = k.collective, k.kind
            name, made = (self._called(k.made), k.made) if sent is None else (sent.kind, sent.itself)
            result = arrays_of(made.type)
            place = self._line_near(k.computation, k.made) if sent is None else first.get(sent.key)
            if kind == COLLECTIVE and sent is not None:
                kind = sent.kind
            elif kind == OPERATOR and k.made.opcode.startswith("fusion"):
                kind = FUSED
            key = None if sent is None else sent.key
            rows.append(TimedKernel(k, f"{name} {result[0]}" if result else name, kind, place, key))
        return tuple(rows)

    def held(self, found: CompiledCost | None = None) -> HeldRows:
        """What a device holds, on any machine: the compiler's totals if it gives them, the rest from the schedule."""
        held = self.program.held
        modules = [self._origin(one.made).module for one in held.alive]
        folded = equal_modules((module, "array") for module in modules)
        sizes, counts = Counter[tuple[str, str, Place | None]](), Counter[tuple[str, str, Place | None]]()
        for one, module in zip(held.alive, modules, strict=True):
            key = one.type, self._described(one.made, folded.get(module, module)), self._place(one.made)
            sizes[key] += one.bytes
            counts[key] += 1
        alive = [(kind, size, what, at, counts[kind, what, at]) for (kind, what, at), size in sizes.most_common()]

        def named(moment: Any) -> tuple[str, Place | None]:
            return self._described(moment.made, self._origin(moment.made).module), self._place(moment.made)

        by = "as read from the schedule" if self.program.memory is None else "as the compiler reports"
        return HeldRows(self.program.totals, by, held.moments, named, alive)

    def verdict(
        self, found: CompiledCost, rows: Sequence[CollectiveRow], planned_for: Machine | None, seconds: float
    ) -> Verdict:
        """What bounds a call. No other shardings are tried, whatever the seconds: ``advise`` does that."""
        works = ((k.work, k.times) for k in found.kernels)
        ideal = sum(w.products * times / found.machine.peak(w.dtype) for w, times in works if w is not None)
        share = 100 * ideal / found.seconds if found.seconds else 0.0
        products = (
            f"The products of a device would take {format_seconds(ideal)} at the peak rate: {share:.0f} % of the call."
            if ideal
            else "There is no matrix product whose operations are known."
        )
        unknown = ", ".join(found.unknown)
        others = f"Kernels whose operations are not known count by their bytes only: {unknown}." if unknown else ""
        of_work, of_choice = (products, others), (self._compiled_for_others(found.machine),)
        return Verdict(found, ideal, sentences_of(found, rows, of_work, of_choice))

    def _compiled_for_others(self, machine: Machine) -> str:
        platform = self.program.platform
        if platform in ("", machine.compiler.platform):
            return ""
        return (
            f"XLA compiled this program for {platform}. For {machine.kind or machine.name} it fuses and combines "
            "otherwise, and may choose other collectives: explain the function with machine= to see its program."
        )

    def details_of_row(self, row: CollectiveRow, kernels: Sequence[TimedKernel], places: Places) -> dict[str, Any]:
        """What the page alone shows of a row of collectives (``report.data``)."""
        sent, atoms = row.moved[0].source, atoms_of(self.program, row.moved[0].source)
        is_permutation = row.kind == "collective_permute"
        return {
            "atoms": atoms, "groups": sent.groups if atoms is None else groups(self.mesh, atoms),
            "emitted": places.of(row.moved[0].cause), "moved": "", "advice": "",
            "pairs": pairs_of(sent.itself) if is_permutation else [], "over": self.mesh.atoms if is_permutation else (),
        }  # fmt: skip

    def details_of_arrays(self, places: Places) -> list[dict[str, Any]]:
        """What the page alone shows of each argument (``report.data``)."""
        program = self.program
        entry = program.module.computations[program.module.entry]
        names = {made.number: made.name for made in entry.instructions.values() if made.opcode == "parameter"}
        number_of = {id(a): number for number, a in enumerate(program.arguments)}
        rows = []
        for a in self.arrays:
            local = next(iter(arrays_of(a.type)), None)
            shape = () if local is None else local.shape
            parts, dims = ((), None) if a.cut is None else (a.cut.parts, a.cut.dims)
            parts = parts if len(parts) == len(shape) else (1,) * len(shape)
            dims = ((),) * len(shape) if a.is_whole else dims if dims and len(dims) == len(shape) else None
            spec = None if dims is None else self.mesh.spec_of(dims)
            readers = program.flow.readers(Array(program.module.entry, names[number_of[id(a)]]))
            read = (places.of(self._place(made)) for _, made in itertools.islice(readers, 40))
            rows.append({
                "dtype": "" if local is None else local.dtype, "dims": None if dims is None else list(map(list, dims)),
                "shape": [n * k for n, k in zip(shape, parts, strict=True)],
                "spec": "P()" if a.is_whole else "" if spec is None else text_of_spec(spec), "place": "",
                "read": list(dict.fromkeys(filter(None, read))), "reason": "", "reasons": [],
            })  # fmt: skip
        return rows

    # What instructions compute, and their lines.

    def _told(self, made: Instruction) -> Instruction:
        """The instruction whose metadata tell of one: of a fusion without any the first inside that has some."""
        if self.program.place_of(made) or not made.opcode.startswith("fusion"):
            return made
        inside = (
            part
            for name in made.called("calls")
            for part in self.program.module.computations[name].instructions.values()
            if self.program.place_of(part)
        )
        return next(inside, made)

    def _place(self, made: Instruction) -> Place | None:
        """The line of an instruction, or of what is inside of a fusion."""
        return self.program.place_of(self._told(made))

    def _line_near(self, computation: str, made: Instruction) -> Place | None:
        """The line of an instruction; of a copy that the compiler made, of what is copied, or else of what reads it."""
        array, flow = Array(computation, made.name), self.program.flow

        def near() -> Iterator[Instruction]:
            yield made
            if (copied := flow.made(flow.source(array))) is not None:
                yield copied
            yield from (reader for _, reader in itertools.islice(flow.readers(array), 1))

        return next(filter(None, map(self._place, near())), None)

    def _origin(self, made: Instruction) -> Origin:
        """The operator that an instruction comes from."""
        return origin_of(self._told(made).op_name)

    def _called(self, made: Instruction) -> str:
        """What an instruction computes: the operator, or what XLA calls it."""
        return self._origin(made).operation or self._told(made).opcode

    def _described(self, made: Instruction, module: str) -> str:
        return f"{self._called(made)} in {module}" if module else self._called(made)

    # Compiles the function again with changes.

    def advise(
        self, machine: Machine | None, seconds: float, progress: bool | Callable[[str], object] | None
    ) -> Advice:
        """Compiles the function with constraints and with other shardings of its arguments, and tells which help."""
        if (again := self.again) is None:
            raise ArgumentError(
                "a program that was compiled elsewhere cannot be compiled with changes.",
                hint="Give gshard.explain the function from jax.jit and its arguments.",
            )
        mesh, before, began = self.mesh.user_jax_mesh, self.figures(machine), time.monotonic()
        assert isinstance(mesh, jax.sharding.Mesh), "it was compiled for devices"
        program = TracedProgram(again.traced())
        shown = dataclasses.replace(Progress.of(progress), name="gshard.explain")
        shown.step("planning with gshard")
        planned = again.planned(max(seconds, SECONDS) / 4)
        is_worth = planned is not None and planned.sent < WORTH * before.sent
        constraints = constraints_to_try(self.moved, program, mesh, planned) if planned and is_worth else []
        removed = [Constraint(e, None) for e in program.expressions if e.spec is not None and before.sent]

        def compiled(some: Sequence[Change]) -> Figures | None:
            what = some[0].text if len(some) == 1 else f"{len(some)} changes"
            shown.step(f"compiling with {what}")
            specs = {i: change.spec for change in some for i in change.arguments if change.spec is not None}
            added = [change.constraint for change in some if change.constraint is not None]
            made = again.compiled(specs, lambda _: program.with_constraints(added, mesh))
            return None if made is None else made.figures(machine)

        inside = [Change(f"{c.text}  ({c.expression.type})", c.spec, constraint=c) for c in (*constraints, *removed)]
        others = sharding_changes(self.program, self.moved, again.leaves)
        trials = Trials(before, compiled, min(seconds, max(seconds - time.monotonic() + began, 1e-3)))
        return advised(trials, inside, [*others], None if planned is None else planned.sent)

    def figures(self, machine: Machine | None) -> Figures:
        """What the program takes; without a machine its operations and no time."""
        found = self.cost(Machine.read("cpu", self.mesh.size) if machine is None else machine)
        return Figures(found.sent, found.flops, 0.0 if machine is None else found.seconds, found.peak)


# Reads compiled programs with what JAX tells of them.


def source_of(
    compiled: jax.stages.Compiled,
    mesh: Mesh | None = None,
    out_tree: Any = None,
    names: Mapping[str, str] | None = None,
) -> CompiledSource:
    """Reads what JAX compiled; the default mesh is that of the shardings, the default tree of results its own."""
    text = compiled.as_text()
    if not text:
        raise ArgumentError("this compiled program has no text.", user_line(), hint="Its backend does not give one.")
    shardings = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda s: isinstance(s, jax.sharding.Sharding))
    on = mesh or _mesh_of([*shardings, *jax.tree.leaves(compiled.output_shardings)])
    return CompiledSource(
        read_program(
            text, on, results=_results(compiled.out_tree if out_tree is None else out_tree),
            platform=str(on.devices[0].platform) if on is not None and on.devices else "",
            memory=memory_figures(compiled), names=names, cuts=parameter_shardings(compiled),
        )
    )  # fmt: skip


def _mesh_of(shardings: Sequence[Any]) -> Mesh | None:
    """The mesh of shardings: the largest, with the names of its axes; else the devices in their order."""
    named = [s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, jax.sharding.Mesh)]
    if named:
        return Mesh.of(max(named, key=lambda mesh: mesh.size))
    devices = max((getattr(s, "_device_assignment", ()) for s in shardings), key=len, default=())
    return Mesh.of(list(devices)) if devices else None


def _results(tree: Any) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))[0]
    return [path_of("result", path) for path, _ in paths]
