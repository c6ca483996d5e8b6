"""Compiled report: everything that the page and ``--json`` show of a compiled program, with the user's lines."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gshard.core.mark import text_of_spec
from gshard.device.cost import BOUNDS
from gshard.device.fusion_model import COLLECTIVE, FUSED, OPERATOR
from gshard.device.network import groups
from gshard.explanation.compiled_cost import CompiledCost, CompiledVerdict
from gshard.explanation.compiled_program import CompiledArgument, CompiledProgram
from gshard.explanation.compiled_rows import CompiledRow, Part, Regathered, atoms_of, regathered_lines, whole_lines
from gshard.explanation.difference import FORMAT
from gshard.explanation.report.data import (
    LISTS,
    Places,
    groups_text,
    layers_data,
    machine_data,
    memory_data,
    mesh_data,
    time_data,
    timeline_data,
)
from gshard.explanation.timeline import COMPUTE, NETWORK, Event, Loop, Run, Timeline, complete_event, trace_events
from gshard.naming.argument_names import equal_layers
from gshard.tracing.trace import names_of_files
from gshard.xla.dataflow import Array
from gshard.xla.hlo_collectives import pairs_of
from gshard.xla.hlo_parser import Instruction, Origin, arrays_of, origin_of
from gshard.xla.kernels import Elapsed, Ran

# Compiled places: the user's lines of the instructions of a compiled program, and what the instructions are called.


class CompiledPlaces:
    """The lines of one program; those that were named are what the page shows of its files."""

    def __init__(self, program: CompiledProgram) -> None:
        self.program = program
        self.named = Places()
        self._origins: dict[str, Origin] = {}

    def short(self, place: str) -> str:
        """A line, given with the whole path of its file, as the page names it; empty if none is given."""
        path, _, line = place.rpartition(":")
        return self.named.at(path, int(line), self._names.get(path, "")) if path and line.isdigit() else ""

    def line(self, made: Instruction) -> str:
        """The line of an instruction, as the page names it."""
        return self.short(self.program.module.place_of(self.told(made)))

    def line_near(self, computation: str, made: Instruction) -> str:
        """The same; of a copy that the compiler made, the line of what is copied, or else of what reads the copy."""
        if line := self.line(made):
            return line
        array, flow = Array(computation, made.name), self.program.flow
        copied = flow.made(flow.source(array))
        if copied is not None and (line := self.line(copied)):
            return line
        reader = next(flow.readers(array), None)
        return "" if reader is None else self.line(reader[1])

    def origin(self, made: Instruction) -> Origin:
        """The operator that an instruction comes from."""
        name = self.told(made).op_name
        if name not in self._origins:
            self._origins[name] = origin_of(name)
        return self._origins[name]

    def called(self, made: Instruction) -> str:
        """What an instruction computes: the operator, or what XLA calls it."""
        return self.origin(made).operation or self.told(made).opcode

    def described(self, computation: str, name: str, folded: Mapping[str, str] | None = None) -> tuple[str, str]:
        """What an instruction computes, with its module; and its line."""
        made = self.program.module.computations[computation].instructions[name]
        what, module = self.called(made), self.origin(made).module
        module = (folded or {}).get(module, module)
        return f"{what} in {module}" if module else what, self.line(made)

    def folded(self, arrays: Iterable[Array]) -> dict[str, str]:
        """The modules of what makes arrays, those of equal layers under one name: ``layers_*/mlp``."""
        computations = self.program.module.computations
        modules = (self.origin(computations[a.computation].instructions[a.name]).module for a in arrays)
        # A layer is one if something is inside: here the array.
        paths = {(*module.split("/"), "array"): None for module in modules if module}
        return {"/".join(own[:-1]): "/".join(one[:-1]) for own, one in equal_layers(paths, same_inside=False).items()}

    def told(self, made: Instruction) -> Instruction:
        """The instruction whose metadata tell of one: of a fusion without any the first inside that has some."""
        if self.program.module.place_of(made) or not made.opcode.startswith("fusion"):
            return made
        inside = (
            part
            for name in made.called("calls")
            for part in self.program.module.computations[name].instructions.values()
            if self.program.module.place_of(part)
        )
        return next(inside, made)

    @functools.cached_property
    def _names(self) -> Mapping[str, str]:
        """What each file is called."""
        numbers = {
            int(found[1])
            for computation in self.program.module.computations.values()
            for made in computation.instructions.values()
            if (found := re.search(r"\bstack_frame_id=(\d+)", made.attributes)) is not None
        }
        places = {self.program.module.places.get(number, "") for number in numbers}
        return names_of_files(place.rpartition(":")[0] for place in sorted(places))


NO_MACHINE = (
    'No machine is named, so that no times are modelled. Name one: machine="h100:1x8", '
    "on the command line --machine h100:1x8."
)
_HIDDEN = 0.005  # of the network's time: less is nothing
_READERS = 40  # lines that read an argument, at most


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """What is shown of a compiled program."""

    program: CompiledProgram  # what was read
    rows: Sequence[CompiledRow]  # its collectives, most bytes first;
    parts: Sequence[Part]  # and the arrays that they move, one by one
    arguments: Sequence[CompiledArgument]  # largest first
    whole: Sequence[CompiledArgument]  # those that every device holds whole
    regathered: Sequence[Regathered]  # what is gathered only to be cut again
    cost: CompiledCost  # what it takes
    # what bounds a call; None without a machine: then the seconds of ``cost`` are those of no device
    verdict: CompiledVerdict | None

    def data(self) -> dict[str, Any]:
        """The report as data that JSON can hold."""
        program, found, is_timed = self.program, self.cost, self.verdict is not None
        sizes = [a.bytes for a in self.arguments]
        whole = None if None in sizes else sum(size for size in sizes if size is not None)
        lines = self._lines()
        return {
            "format": FORMAT,
            "name": program.name,
            "jax": "",
            "instructions": program.instructions,
            "words": self._words(),
            "mesh": mesh_data(program.mesh),
            "machine": machine_data(found.machine) if is_timed else None,
            "totals": {
                "seconds": found.seconds if is_timed else 0.0,
                "flops": found.flops,
                "sent": sum(sent.collective.total_bytes for sent in program.sent),
                "peak": program.peak,
                "arguments": [whole, sum(a.local_bytes for a in self.arguments)],
            },
            "verdict": self._verdict(),
            "collectives": [self._collective(row) for row in self.rows],
            "timeline": self._timeline() if is_timed else {"events": [], "loops": [], "texts": []},
            "tensors": [self._argument(a) for a in self.arguments],
            "memory": self._memory(),
            "time": time_data((self._class_of(k), k) for k in found.kernels) if is_timed else [],
            "notes": self._notes(),
            **{name: [] for name in LISTS},
            "searched": "",
            "lines": lines,
            "groups": dict(map(self._groups, self.rows)),
            "files": self._places.named.files(lines),
        }

    def _words(self) -> dict[str, str]:
        """What the page says where a compiled program differs from one that gshard partitions."""
        program, taken = self.program, sum(row.seconds for row in self.rows)
        overlap = "modelled"
        if taken:
            hidden = 1 - sum(row.exposed for row in self.rows) / taken
            part = f"{100 * hidden:.0f} % of the network's time passes while kernels run"
            overlap += f"; {part}" if hidden > _HIDDEN else "; kernels wait for all collectives"
        return {
            "program": f"{program.instructions:,} instructions, compiled by XLA"
            + (f" for {program.platform}" if program.platform else ""),
            "by": "",
            "overlap": overlap,
            "reason": "on a device",
            "whole": "",
            "no line": "no known line",
            "memory": "The curve, and what is alive, are read from the schedule"
            + (", the totals are those that the compiler reports." if program.memory is not None else "."),
        }

    def _verdict(self) -> dict[str, Any]:
        if self.verdict is None:
            shares = dict.fromkeys(BOUNDS, 0.0)
            return {"headline": NO_MACHINE, "sentences": [], "shares": shares, "share": 0.0, "work": 1.0}
        return self.verdict.data() | {"work": 1.0}

    def _notes(self) -> list[tuple[str, list[str]]]:
        """The lists that stand below the totals: as the text has them, a title and its lines."""
        found = (whole_lines(self.whole), regathered_lines(self.regathered))
        return [
            (title[0].upper() + title[1:], [row.strip() for row in rows]) for _, title, *rows in filter(None, found)
        ]

    def _collective(self, row: CompiledRow) -> dict[str, Any]:
        sent, mesh = row.parts[0].sent, self.program.mesh
        atoms = atoms_of(self.program, sent)
        is_permutation = row.kind == "collective_permute"
        place = self._places.short(row.place)
        each = [(part, part.sent.collective.executions) for part in row.parts]
        return {
            "kind": row.kind,
            "axes": row.axes,
            "group": self._groups(row)[0],
            "bytes": row.bytes,
            "times": row.times,
            "seconds": row.seconds if self.verdict is not None else 0.0,
            "hidden": 1 - row.exposed / row.seconds if row.seconds and self.verdict is not None else 0.0,
            "shape": row.shape,
            "array": row.array,
            "module": row.module,
            "layers": layers_data((p.array.text, p.origin.module, times, p.bytes * times) for p, times in each),
            "moved": "",
            "line": row.line,
            "cause": place,
            "emitted": place,
            "why": row.why,
            "advice": "",
            "proposal": "",
            "pairs": pairs_of(sent.itself) if is_permutation else [],
            "over": list(mesh.atoms) if is_permutation else [],
            "groups": list(map(list, sent.collective.groups)) if atoms is None else [],
        }

    def _groups(self, row: CompiledRow) -> tuple[str, str]:
        """The name of the groups of devices that communicate, and the groups as text."""
        sent, mesh = row.parts[0].sent, self.program.mesh
        atoms = atoms_of(self.program, sent)
        if atoms is not None:
            return ",".join(atoms), groups_text(groups(mesh, atoms))
        return row.axes, groups_text(sent.collective.groups)

    @functools.cached_property
    def _places(self) -> CompiledPlaces:
        return CompiledPlaces(self.program)

    @functools.cached_property
    def _kernel_places(self) -> tuple[str, ...]:
        """The line of each kernel of ``cost``; of a collective that of the first array that it moves."""
        first: dict[int, str] = {}
        for part in self.parts:
            first.setdefault(id(part.sent.itself), part.place)
        return tuple(
            self._places.line_near(k.computation, k.made)
            if k.collective is None
            else self._places.short(first.get(id(k.collective.itself), ""))
            for k in self.cost.kernels
        )

    def _lines(self) -> dict[str, list[float]]:
        """For each source line the seconds, bytes sent and FLOPs that it causes."""
        lines: dict[str, list[float]] = {}

        def row(place: str) -> list[float]:
            return lines.setdefault(place, [0.0, 0, 0])

        for k, place in zip(self.cost.kernels, self._kernel_places, strict=True):
            if k.collective is None:
                at = row(place)
                at[0] += k.seconds * k.times
                at[2] += k.flops * k.times
        waited = {id(k.collective.itself): k.seconds for k in self.cost.kernels if k.collective is not None}
        for part in self.parts:
            read, at = part.sent.collective, row(self._places.short(part.place))
            at[1] += part.bytes * read.executions
            # What a call waits for one message is shared by its arrays as its bytes are.
            share = part.bytes / read.bytes_moved if read.bytes_moved else 0.0
            at[0] += share * waited.get(id(part.sent.itself), 0.0) * read.executions
        lines.pop("", None)
        return lines if self.verdict is not None else {place: [0.0, *row[1:]] for place, row in lines.items()}

    def _kernel_name(self, k: Ran) -> str:
        sent = k.collective
        first = self._places.called(k.made) if sent is None else sent.collective.kind
        kept = arrays_of((k.made if sent is None else sent.itself).type)
        return f"{first} {kept[0]}" if kept else first

    @functools.cached_property
    def _laid(self) -> Timeline:
        """One call in time; what the network does may run beside kernels."""
        numbers = {id(k): i for i, k in enumerate(self.cost.kernels)}
        names = [self._kernel_name(k) for k in self.cost.kernels]

        def run(calls: Iterable[Elapsed]) -> Run:
            at, events = 0.0, list[Event | Loop]()
            for call in calls:
                for one in call.in_order():
                    if isinstance(one, Ran):
                        number = numbers[id(one)]
                        events.append(Event(at + one.start, one.duration, number, names[number]))
                    else:
                        line = self.program.module.line_of(one.made)
                        events.append(Loop(at + one.start, one.rounds, run(one.bodies), one.made.opcode, line))
                at += call.seconds
            return Run(at, events)

        laid = Timeline.of(run([self.cost.elapsed]))
        kernels, loops = (tuple(sorted(own, key=lambda e: e.start)) for own in (laid.kernels, laid.loops))
        return Timeline(kernels, loops)

    def _track(self, event: Event) -> str:
        """Where an event is drawn: what the network does has a lane of its own."""
        is_sent = event.kernel >= 0 and self.cost.kernels[event.kernel].collective is not None
        return NETWORK if is_sent else COMPUTE

    @functools.cached_property
    def _row_of(self) -> Mapping[int, int]:
        """The number of the row of each collective, of one that moves several arrays the first."""
        found: dict[int, int] = {}
        for i, row in enumerate(self.rows):
            for part in row.parts:
                found.setdefault(id(part.sent.itself), i)
        return found

    def trace(self) -> dict[str, Any]:
        """One call in the Trace Event Format that Perfetto and chrome://tracing read."""
        rows = []
        for event in self._laid.kernels:
            bound = "rounds" if event.kernel < 0 else self.cost.kernels[event.kernel].bound
            rows.append(complete_event(event, self._track(event), bound, self._details(event.kernel)))
        return trace_events(self.program.name, self.cost.machine, self._laid.loops, rows)

    def _details(self, number: int) -> dict[str, Any]:
        """What is shown of an event that is selected."""
        if number < 0:
            return {}
        k = self.cost.kernels[number]
        told: dict[str, Any] = {
            "line": self._kernel_places[number],
            "instruction": k.made.name,
            "bound by": k.bound,
        }
        if k.collective is None:
            return told | {"FLOPs": k.flops, "bytes read and written": k.moved}
        row = self.rows[self._row_of[id(k.collective.itself)]]
        hidden = {"of it beside kernels, in µs": k.overlapped * 1e6} if k.overlapped else {}
        return told | {"array": row.array, "over": row.axes, "needed for": row.why, "bytes sent": k.sent, **hidden}

    def _timeline(self) -> dict[str, Any]:
        def told(x: Event) -> tuple[str, str, int]:
            sent = self.cost.kernels[x.kernel].collective
            row = -1 if sent is None else self._row_of.get(id(sent.itself), -1)
            return x.name, self._kernel_places[x.kernel], row

        lanes = [[e for e in self._laid.kernels if self._track(e) == track] for track in (COMPUTE, NETWORK)]
        return timeline_data(lanes, self._laid.loops, self.cost, told)

    def _argument(self, a: CompiledArgument) -> dict[str, Any]:
        local = arrays_of(a.type)[0] if arrays_of(a.type) else None
        shape = [] if local is None else list(local.shape)
        parts = a.parts if len(a.parts) == len(shape) else (1,) * len(shape)
        spec = self.program.mesh.spec_of(a.dims) if a.dims is not None and len(a.dims) == len(shape) else None
        is_whole = a.bytes is not None and a.is_whole
        dims = [list(atoms) for atoms in a.dims] if a.dims and len(a.dims) == len(shape) else None
        pieces = 1 if a.bytes is None or not a.local_bytes else round(a.bytes / a.local_bytes)
        note = "all of it" if is_whole else f"one of {pieces} parts" if pieces > 1 else "the program does not tell"
        return {
            "name": a.name,
            "short": a.short.text,
            "sharding": f"{a.type} {a.sharding}".strip(),
            "dtype": "" if local is None else local.dtype,
            "spec": "P()" if is_whole else "" if spec is None else text_of_spec(spec),
            "dims": [[] for _ in shape] if is_whole else dims,
            "shape": [n * k for n, k in zip(shape, parts, strict=True)],
            "bytes": a.local_bytes if a.bytes is None else a.bytes,
            "local": a.local_bytes,
            "argument": True,
            "place": "",
            "read": self._read.get(a.name, []),
            "note": note,
            "reason": "",
            "reasons": [],
        }

    @functools.cached_property
    def _read(self) -> dict[str, list[str]]:
        """The lines that read each argument."""
        program = self.program
        entry = program.module.computations[program.module.entry]
        number_of = {made.number: made for made in entry.instructions.values() if made.opcode == "parameter"}
        found: dict[str, list[str]] = {}
        for number, a in enumerate(program.arguments):
            lines: dict[str, None] = {}
            if number in number_of:
                for made in self._readers(number_of[number].name):
                    lines[self._places.line(made)] = None
            found[a.name] = [line for line in lines if line]
        return found

    def _readers(self, name: str) -> Iterator[Instruction]:
        readers = self.program.flow.readers(Array(self.program.module.entry, name))
        for (_, made), _ in zip(readers, range(_READERS)):
            yield made

    def _memory(self) -> dict[str, Any]:
        """What a device holds: the compiler's totals where it tells, and the curve as read from the schedule."""
        places, held = self._places, self.program.held
        sizes, counts = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
        folded = places.folded(one.array for one in held.alive)
        for one in held.alive:
            key = (one.type, *places.described(one.array.computation, one.array.name, folded))
            sizes[key] += one.bytes
            counts[key] += 1
        rows = [
            [kind, size, what, place, counts[kind, what, place]] for (kind, what, place), size in sizes.most_common()
        ]
        return memory_data(
            self.program.totals, held.moments, lambda m: " ".join(places.described(m.computation, m.name)).strip(), rows
        )

    def _class_of(self, k: Ran) -> str:
        if k.kind == COLLECTIVE and k.collective is not None:
            return k.collective.collective.kind
        return FUSED if k.kind == OPERATOR and k.made.opcode.startswith("fusion") else k.kind
