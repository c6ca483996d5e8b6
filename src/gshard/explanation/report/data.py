"""Report data: everything that the page and ``--json`` show, as plain lists and dicts."""

from __future__ import annotations

import linecache
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from gshard.core.jax_adapter import user_place
from gshard.core.mark import text_of_spec
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Equation, Value
from gshard.core.spmd import Collective, SpmdProgram
from gshard.device.cost import BOUNDS, CallTotals, Cost, PricedKernel, cause_of, origins
from gshard.device.fusion_model import COLLECTIVE
from gshard.device.machine import Machine
from gshard.device.memory import MemoryTotals, held_at_peak
from gshard.device.network import groups
from gshard.explanation.advice import advice
from gshard.explanation.difference import FORMAT
from gshard.explanation.explained_plan import ExplainedPlan
from gshard.explanation.rows import MergedCollective, TensorRow, called
from gshard.explanation.timeline import Event, thinned, timeline
from gshard.explanation.verdict import Verdict
from gshard.naming.array_names import ArrayNames

# Places: short names and surrounding text of the user's source lines.

CONTEXT = 3  # source lines shown around one that makes something


class Places:
    """Source lines by number; the text around them is read at the end."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], None] = {}
        self.short: dict[str, str] = {}

    def of(self, e: Equation | None) -> str:
        """``path:line`` of an equation, as the page names it; empty if unknown."""
        place = None if e is None else user_place(e.source_info)
        return "" if e is None or place is None else self.at(*place, e.file)

    def at(self, path: str, line: int, file: str = "") -> str:
        """The same of a line of a file, which the program calls ``file`` where its own name is not enough."""
        self.known[path, line] = None
        return f"{self._name(path, file)}:{line}"

    def _name(self, path: str, file: str = "") -> str:
        """The shortest end of a path that names one file, as lines of the program call it."""
        if path not in self.short:
            parts = path.split("/")
            count = file.count("/") + 1
            while "/".join(parts[-count:]) in self.short.values() and count < len(parts):
                count += 1
            self.short[path] = "/".join(parts[-count:])
        return self.short[path]

    def files(self, costs: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
        """For each file its lines that are worth showing: number and text. The files that send most come first.

        Of a file that cannot be read here, such as one of a program that was compiled elsewhere, the lines that make
        something, without text.
        """
        wanted: dict[str, set[int]] = {}
        for path, line in self.known:
            wanted.setdefault(path, set()).update(range(line - CONTEXT, line + CONTEXT + 1))
        shown = []
        for path, numbers in wanted.items():
            # A cell of a notebook is no file, but its text is known.
            texts = linecache.getlines(path) if os.path.exists(path) or path in linecache.cache else []
            lines = [[n, texts[n - 1].rstrip("\n")] for n in sorted(numbers) if 0 < n <= len(texts)]
            lines = lines or [[n, ""] for n in sorted(n for known, n in self.known if known == path)]
            shown.append({"name": self._name(path), "lines": lines})
        sent: Counter[str] = Counter()
        for place, row in costs.items():
            sent[place.rpartition(":")[0]] += int(row[1])
        return sorted(shown, key=lambda f: -sent[f["name"]])


# Report tensors: all arrays of a program as rows of the report, linked by their reasons.


def tensor_rows(
    told: Sequence[TensorRow], plan: Plan, producers: Mapping[Value, Equation], places: Places
) -> list[dict[str, Any]]:
    """All arrays, largest first; a reason is [dimension, text, the row it came from or -1, its dimension]."""
    order = sorted(plan.shardings, key=lambda v: (-v.bytes, v.index))
    row_of = {v: i for i, v in enumerate(order)}
    read: dict[Value, dict[str, None]] = {v: {} for v in plan.program.block.inputs}
    for e in plan.program.block.walk():
        for v in e.inputs:
            if isinstance(v, Value) and v in read:
                read[v][places.of(e)] = None
    rows = []
    for v, row in zip(order, told, strict=True):
        reasons = []
        for d, atoms in enumerate(plan.shardings[v].dims):
            if atoms and (reason := plan.reasons.get((v, d))):
                source = plan.sources[v, d]
                reasons.append([d, str(reason), *((-1, -1) if source is None else (row_of[source[0]], source[1]))])
        rows.append(
            {
                "name": row.name,
                "short": row.short,
                "sharding": row.sharding,
                "dtype": v.dtype_name,
                "spec": _spec(plan, v) if row.is_argument else "",
                "dims": [list(atoms) for atoms in plan.shardings[v].dims],
                "shape": list(v.shape),
                "bytes": row.bytes,
                "local": row.local_bytes,
                "argument": row.is_argument,
                "place": places.of(producers.get(v)),
                "read": list(read.get(v, ())),  # of an argument: the lines that read it
                "note": row.note,
                "reason": row.reason if reasons else "",
                "reasons": reasons,
            }
        )
    return rows


def _spec(plan: Plan, v: Value) -> str:
    """How an argument is split as JAX writes it, where that can say it."""
    spec = plan.mesh.spec_of(plan.shardings[v].dims)
    return "" if spec is None else text_of_spec(spec)


MOMENTS = 1500  # points of the curve of memory
EVENTS = 3000  # stretches of time that are drawn
PEAK_ROWS = 15


# The lists of lines of a report (``ExplainedPlan.lists``). A report of XLA's program has them empty.
LISTS = (
    "replicated", "pipelines", "batches", "returned", "low_precision", "layout", "unused", "gathered", "dropped",
)  # fmt: skip


def report_data(
    explanation: ExplainedPlan,
    found: Cost,
    rows: Sequence[MergedCollective],
    verdict: Verdict,
) -> dict[str, Any]:
    """The report as data that JSON can hold."""
    places, plan, mesh = Places(), explanation.plan, explanation.mesh
    producers = {v: e for e in plan.program.block.walk() for v in e.outputs}
    owners = origins(explanation.spmd, found)
    lines = _line_costs(explanation.spmd, found, owners, places)
    laid, row_of = timeline(found), {kernel: i for i, row in enumerate(rows) for kernel in row.kernels}

    def told(x: Event) -> tuple[str, str, int]:
        k = found.kernels[x.kernel]
        return f"{k.name} {k.result}", places.of(cause_of(k, owners[x.kernel])), row_of.get(x.kernel, -1)

    return {
        "format": FORMAT,
        "name": explanation.name,
        "jax": jax.__version__,
        "equations": explanation.equations,
        "words": _words(explanation.equations),
        "mesh": mesh_data(mesh),
        "machine": machine_data(found.machine),
        "totals": {
            "seconds": found.seconds,
            "flops": found.flops,
            "sent": explanation.total_bytes,
            "peak": found.peak,
            "arguments": explanation.argument_bytes,
        },
        "verdict": verdict.data() | {"work": verdict.work},
        "collectives": [
            _collective(row, plan, producers, places, explanation.names) | {"proposal": "" if p is None else str(p)}
            for row, p in zip(rows, verdict.proposals, strict=True)
        ],
        "timeline": timeline_data([laid.kernels], laid.loops, found, told),
        "tensors": tensor_rows(explanation.tensors, plan, producers, places),
        "memory": memory_data(
            found.memory,
            found.memory.moments,
            lambda m: f"{m.equation.name} {places.of(m.equation)}",
            [
                [h.type, h.bytes, h.name, places.of(h.equation), h.count]
                for h in held_at_peak(found.memory, found.program.block, plan.program, explanation.names)
            ],
        ),
        "time": time_data((k.name if k.kind == COLLECTIVE else k.kind, k) for k in found.kernels),
        "notes": _notes(explanation),
        **{name: list(lines) for name, _, _, lines in explanation.lists},
        "searched": "",  # what a search tells of its plan
        "lines": lines,
        "files": places.files(lines),
        "groups": {",".join(a): groups_text(groups(mesh, a)) for a in {c.atoms for c in explanation.spmd.collectives}},
    }


def mesh_data(mesh: Mesh) -> dict[str, Any]:
    """The devices."""
    return {
        "axes": list(mesh.axes),
        "atoms": list(mesh.atom_sizes.items()),
        "size": mesh.size,
        "order": mesh.order,
    }


def machine_data(machine: Machine) -> dict[str, Any]:
    """What times are modelled on."""
    return {
        "name": machine.name,
        "kind": machine.kind or machine.name,
        "text": str(machine),
        "memory": machine.memory,
        "measured": machine.measured,
    }


def _words(equations: int) -> dict[str, str]:
    """What the page says of every program that gshard partitions."""
    return {
        "program": f"{equations:,} equations",
        "by": f"jax {jax.__version__}",
        "overlap": "modelled; nothing overlaps",
        "reason": "reason",
        "whole": "No mark and no neighbour asks to split it: every device holds all of it.",
        "no line": "the border",
        "memory": "",
    }


def _notes(explanation: ExplainedPlan) -> list[tuple[str, list[str]]]:
    """Lists that stand below the totals where they are not empty, with their titles."""
    notes = [("What the collectives are for", tuple(map(str, explanation.purposes)))]
    notes += [(heading or title[0].upper() + title[1:], lines) for _, title, heading, lines in explanation.lists]
    return [(title, list(lines)) for title, lines in notes if lines]


def _collective(
    row: MergedCollective, plan: Plan, producers: Mapping[Value, Equation], places: Places, names: ArrayNames
) -> dict[str, Any]:
    mesh, c = plan.mesh, row.collective
    array, module, why = called(row.every, names)
    moved = ""
    if c.value is not None and c.before is not None and c.after is not None:
        texts = [s.format(mesh, c.value.shape, c.value.dtype_name) for s in (c.before, c.after)]
        moved = f"{texts[0]} → {texts[1]}"
    return {
        "kind": c.kind,
        "axes": mesh.format_atoms(c.atoms),
        "group": ",".join(c.atoms),
        "bytes": c.total_bytes,
        "times": c.times,
        "seconds": row.seconds,
        "shape": c.shape,
        "array": array,
        "module": module,
        "layers": layers_data(
            (names.moved(one).text, names.module(one.cause).text, one.times, one.total_bytes) for one in row.every
        ),
        "moved": moved,
        "line": c.line,
        "cause": places.of(c.cause),
        "emitted": places.of(c.emitted),
        "why": why,
        "advice": advice(c, plan, producers),
        "pairs": row.pairs,
        "over": row.over,
        "groups": [],  # of devices, where they lie along no axes
        "hidden": 0.0,  # the part of its seconds that passes while kernels run
    }


def layers_data(collectives: Iterable[tuple[str, str, int, int]]) -> list[list[Any]]:
    """Times and bytes of the collectives of each array in each module, where there are several."""
    layers: dict[tuple[str, str], list[int]] = {}
    for array, module, times, sent in collectives:
        sums = layers.setdefault((array, module), [0, 0])
        sums[:] = sums[0] + times, sums[1] + sent
    return [[*key, *sums] for key, sums in layers.items()] if len(layers) > 1 else []


def groups_text(found: Sequence[Sequence[int]]) -> str:
    """Groups of devices that communicate, as text."""
    texts = [
        "{" + ",".join(map(str, g if len(g) <= 10 else g[:8])) + (",…}" if len(g) > 10 else "}") for g in found[:4]
    ]
    more = " …" if len(found) > 4 else ""
    return f"{len(found)} group{'s' if len(found) > 1 else ''} of {len(found[0])}: {' '.join(texts)}{more}"


def timeline_data(
    lanes: Iterable[Sequence[Event]],
    loops: Iterable[Event],
    found: CallTotals,
    told: Callable[[Event], tuple[str, str, int]],
) -> dict[str, Any]:
    """Events as [start, length, what bounds it, name, place, row of its collective, kernels]; times in µs.

    Names and places are numbers in ``texts``. What bounds an event counts in ``BOUNDS``; the number after the last is
    for rounds that are not drawn.
    """
    texts: dict[str, int] = {}

    def text(t: str) -> int:
        return texts.setdefault(t, len(texts))

    def event(x: Event, count: int) -> list[Any]:
        bound, (name, place, row) = len(BOUNDS), (x.name, "", -1)
        if x.kernel >= 0:
            bound, (name, place, row) = BOUNDS.index(found.kernels[x.kernel].bound), told(x)
        return [*_when(x), bound, text(name), text(place), row, count]

    events = [event(x, n) for lane in lanes for x, n in thinned(lane, EVENTS)]
    shown = [[*_when(x), x.depth, text(x.name)] for x in loops if x.seconds * EVENTS > found.seconds]
    return {"events": sorted(events, key=lambda e: e[0]), "loops": shown, "texts": list(texts)}


def _when(x: Event) -> tuple[float, float]:
    return float(f"{x.start * 1e6:.7g}"), float(f"{x.seconds * 1e6:.4g}")


def memory_data(
    totals: MemoryTotals, moments: Sequence[Any], told: Callable[[Any], str], rows: Sequence[list[Any]]
) -> dict[str, Any]:
    """The curve of temporaries (thinned to its maxima where it is long) and what makes the peak."""
    every = max(1, -(-len(moments) // MOMENTS))
    kept = [max(moments[i : i + every], key=lambda m: m.bytes) for i in range(0, len(moments), every)]
    return {
        "fixed": totals.fixed,
        "arguments": totals.arguments,
        "results": totals.results,
        "shared": totals.shared,
        "temporaries": totals.temporaries,
        "curve": [[m.bytes, told(m)] for m in kept],
        "alive": rows[:PEAK_ROWS],
        "more": [sum(r[4] for r in rows[PEAK_ROWS:]), sum(r[1] for r in rows[PEAK_ROWS:])],
    }


def time_data(kernels: Iterable[tuple[str, PricedKernel]]) -> list[dict[str, Any]]:
    """Seconds, FLOPs and bytes by class of operator and by what bounds them."""
    rows: dict[str, dict[str, Any]] = {}
    for name, k in kernels:
        row = rows.setdefault(name, {"class": name, **dict.fromkeys(BOUNDS, 0.0), "flops": 0, "moved": 0, "sent": 0})
        for what, spent in k.parts:
            row[what] += spent * k.times
        for what in ("flops", "moved", "sent"):
            row[what] += getattr(k, what) * k.times
    return sorted(rows.values(), key=lambda r: -math.fsum(r[what] for what in BOUNDS))


def _line_costs(
    spmd: SpmdProgram, found: Cost, owners: Sequence[Collective | None], places: Places
) -> dict[str, list[float]]:
    """For each source line the seconds, bytes sent and FLOPs that it causes."""
    lines: dict[str, list[float]] = {}
    for k, c in zip(found.kernels, owners, strict=True):
        row = lines.setdefault(places.of(cause_of(k, c)), [0.0, 0, 0])
        row[0] += k.total_seconds
        row[2] += k.flops * k.times
    for c in spmd.collectives:
        lines.setdefault(places.of(c.cause), [0.0, 0, 0])[1] += c.total_bytes
    lines.pop("", None)
    return lines
