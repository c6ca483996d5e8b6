"""Data: everything the report shows, as plain lists and dictionaries; the page and ``--json`` read nothing else."""

from __future__ import annotations

import dataclasses
import linecache
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from gshard.analysis.advice import advice
from gshard.analysis.cost import Cost
from gshard.analysis.network import groups
from gshard.analysis.network import seconds as network_seconds
from gshard.analysis.proposal import proposal
from gshard.core.jax_adapter import user_place
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Equation, Value
from gshard.core.spmd import Collective, SpmdProgram
from gshard.passes.device_program import size

if TYPE_CHECKING:
    from gshard.analysis.explain import Explanation

CONTEXT = 3  # source lines shown around one that makes something
MOMENTS = 1500  # points of the curve of memory
PEAK_ROWS = 15
REPLANNED = 1000  # equations that are planned again, all in all, to find marks that would remove collectives


def report_data(explanation: Explanation, plan: Plan, spmd: SpmdProgram, found: Cost) -> dict[str, Any]:
    """The report as data that JSON can hold.

    Args:
        explanation: the tensors and totals.
        plan, spmd: what they were read from.
        found: the cost on a machine.
    """
    places = _Places()
    makers = {v: e for e in plan.program.block.walk() for v in e.outputs}
    mesh = plan.mesh
    budget = iter(range(REPLANNED // max(explanation.equations, 1)))
    return {
        "name": explanation.name,
        "jax": jax.__version__,
        "equations": explanation.equations,
        "mesh": {
            "axes": list(mesh.axes),
            "atoms": list(mesh.atom_sizes.items()),
            "size": mesh.size,
            "order": mesh.order,
        },
        "machine": {
            "name": found.machine.name,
            "text": str(found.machine),
            "memory": found.machine.memory,
            "measured": found.machine.measured,
        },
        "totals": {
            "seconds": found.seconds,
            "flops": found.flops,
            "sent": explanation.total_bytes,
            "peak": found.peak,
            "arguments": explanation.argument_bytes,
        },
        "collectives": [
            _collective(c, plan, makers, found, places)
            | {"proposal": _proposal(c, plan, explanation.total_bytes, budget)}
            for c in _merged(spmd.collectives)
        ],
        "tensors": _tensors(explanation, plan, makers, places),
        "memory": _memory(found, places),
        "time": _time(found),
        "gathered": list(explanation.gathered),
        "replicated": list(explanation.replicated),
        "layout": list(explanation.layout),
        "unused": list(explanation.unused),
        "searched": "",  # what a search tells of its plan
        "lines": (lines := _line_costs(found, places)),
        "files": sorted(places.files(), key=lambda f: -_sent_in(f["name"], lines)),
        "groups": {",".join(a): _groups(mesh, a) for a in {c.atoms for c in spmd.collectives}},
    }


class _Places:
    """Source lines by number; the text around them is read at the end."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], None] = {}
        self.short: dict[str, str] = {}

    def of(self, e: Equation | None) -> str:
        """``path:line`` of an equation, as the page names it; empty if unknown."""
        place = None if e is None else user_place(e.source_info)
        if place is None:
            return ""
        self.known[place] = None
        return f"{self._name(place[0])}:{place[1]}"

    def _name(self, path: str) -> str:
        """The shortest end of a path that names one file."""
        if path not in self.short:
            parts = path.split("/")
            count = 1
            while "/".join(parts[-count:]) in self.short.values() and count < len(parts):
                count += 1
            self.short[path] = "/".join(parts[-count:])
        return self.short[path]

    def files(self) -> list[dict[str, Any]]:
        """For each file its lines that are worth showing: number and text."""
        wanted: dict[str, set[int]] = {}
        for path, line in self.known:
            wanted.setdefault(path, set()).update(range(line - CONTEXT, line + CONTEXT + 1))
        shown = []
        for path, numbers in wanted.items():
            texts = linecache.getlines(path) if os.path.exists(path) else []
            lines = [[n, texts[n - 1].rstrip("\n")] for n in sorted(numbers) if 0 < n <= len(texts)]
            shown.append({"name": self._name(path), "lines": lines})
        return shown


def _merged(collectives: tuple[Collective, ...]) -> list[Collective]:
    """Collectives that differ in nothing but the value, once, with the times added up."""
    rows: dict[Any, Collective] = {}
    for c in collectives:
        key = (c.kind, c.atoms, c.bytes, c.shape, c.line, c.why)
        old = rows.get(key)
        rows[key] = c if old is None else dataclasses.replace(old, times=old.times + c.times)
    return sorted(rows.values(), key=lambda c: -c.total_bytes)


def _collective(
    c: Collective, plan: Plan, makers: dict[Value, Equation], found: Cost, places: _Places
) -> dict[str, Any]:
    mesh, value = plan.mesh, c.value
    moved = ""
    if value is not None and c.before is not None and c.after is not None:
        texts = [s.format(mesh, value.shape, value.dtype_name) for s in (c.before, c.after)]
        moved = f"{texts[0]} → {texts[1]}"
    return {
        "kind": c.kind,
        "axes": mesh.format_atoms(c.atoms),
        "group": ",".join(c.atoms),
        "bytes": c.total_bytes,
        "times": c.times,
        "seconds": c.times * _seconds_of(c, mesh, found),
        "shape": c.shape,
        "moved": moved,
        "line": c.line,
        "why": c.why,
        "advice": advice(c, plan, makers),
    }


def _proposal(c: Collective, plan: Plan, sent: int, budget: Iterator[int]) -> str:
    found = proposal(c, plan, sent, budget)
    return "" if found is None else str(found)


def _seconds_of(c: Collective, mesh: Mesh, found: Cost) -> float:
    """Of one run: what the costed kernel of the same kind, axes and bytes takes."""
    for k in found.kernels:
        if k.sent == c.bytes and k.name == c.kind and k.axes == c.atoms:
            return k.seconds
    g = mesh.count(c.atoms)
    operand = {"all_reduce": c.bytes * g // max(2 * (g - 1), 1), "all_gather": c.bytes // max(g - 1, 1)}
    return network_seconds(c.kind, operand.get(c.kind, c.bytes), mesh, found.machine, c.atoms)


def _groups(mesh: Mesh, atoms: tuple[str, ...]) -> str:
    """The groups of devices that talk to each other, as text."""
    found = groups(mesh, atoms)
    texts = [
        "{" + ",".join(map(str, g if len(g) <= 10 else g[:8])) + (",…}" if len(g) > 10 else "}") for g in found[:4]
    ]
    more = " …" if len(found) > 4 else ""
    return f"{len(found)} group{'s' if len(found) > 1 else ''} of {len(found[0])}: {' '.join(texts)}{more}"


def _tensors(
    explanation: Explanation, plan: Plan, makers: dict[Value, Equation], places: _Places
) -> list[dict[str, Any]]:
    """All arrays, largest first; a reason is [dimension, text, the row it came from or -1, its dimension]."""
    order = sorted(plan.shardings, key=lambda v: (-v.bytes, v.index))
    row_of = {v: i for i, v in enumerate(order)}
    rows = []
    for v, row in zip(order, explanation.tensors, strict=True):
        reasons = []
        for d, atoms in enumerate(plan.shardings[v].dims):
            if atoms and (reason := plan.reasons.get((v, d))):
                source = reason.source
                there = -1 if source is None else _dimension(plan, source, d, set(atoms))
                reasons.append([d, str(reason), row_of[source] if source is not None and there >= 0 else -1, there])
        rows.append(
            {
                "name": row.name,
                "sharding": row.sharding,
                "dims": [list(atoms) for atoms in plan.shardings[v].dims],
                "shape": list(v.shape),
                "bytes": row.bytes,
                "local": row.local_bytes,
                "argument": row.is_argument,
                "place": places.of(makers.get(v)),
                "note": row.note,
                "reason": row.reason if row.why else "",
                "reasons": reasons,
            }
        )
    return rows


def _dimension(plan: Plan, source: Value, dim: int, atoms: set[str]) -> int:
    """The dimension of ``source`` that the same atoms came from, as ``Plan.chain`` follows them."""
    dims = [d for d, own in enumerate(plan.shardings[source].dims) if atoms & set(own) and (source, d) in plan.reasons]
    return -1 if not dims else dim if dim in dims else dims[0]


def _memory(found: Cost, places: _Places) -> dict[str, Any]:
    """The curve of temporaries (thinned to its maxima where it is long) and what makes the peak."""
    memory = found.memory
    every = max(1, -(-len(memory.moments) // MOMENTS))
    kept = [max(memory.moments[i : i + every], key=lambda m: m.bytes) for i in range(0, len(memory.moments), every)]
    alive: dict[tuple[str, str, str], list[int]] = {}
    for v, e in memory.alive:
        row = alive.setdefault((f"{v.dtype_name}[{','.join(map(str, v.shape))}]", e.name, places.of(e)), [0, 0])
        row[0] += size(v)
        row[1] += 1
    pairs = sorted(alive.items(), key=lambda pair: -pair[1][0])
    rows: list[list[Any]] = [[what, total, name, at, count] for (what, name, at), (total, count) in pairs]
    return {
        "fixed": memory.arguments + memory.results - memory.shared,
        "arguments": memory.arguments,
        "results": memory.results,
        "shared": memory.shared,
        "temporaries": memory.temporaries,
        "curve": [[m.bytes, f"{m.equation.name} {places.of(m.equation)}"] for m in kept],
        "alive": rows[:PEAK_ROWS],
        "more": [sum(r[4] for r in rows[PEAK_ROWS:]), sum(r[1] for r in rows[PEAK_ROWS:])],
    }


def _time(found: Cost) -> list[dict[str, Any]]:
    """Seconds, FLOPs and bytes by operator class and by what bounds them."""
    rows: dict[str, dict[str, Any]] = {}
    for k in found.kernels:
        name = k.name if k.kind == "collective" else k.kind
        row = rows.setdefault(
            name, {"class": name, "compute": 0.0, "memory": 0.0, "network": 0.0, "flops": 0, "moved": 0, "sent": 0}
        )
        row[k.bound] += k.total_seconds
        for what in ("flops", "moved", "sent"):
            row[what] += getattr(k, what) * k.times
    return sorted(rows.values(), key=lambda r: -(r["compute"] + r["memory"] + r["network"]))


def _sent_in(file: str, lines: dict[str, list[float]]) -> float:
    """Bytes that the lines of a file send."""
    return sum(row[1] for at, row in lines.items() if at.rpartition(":")[0] == file)


def _line_costs(found: Cost, places: _Places) -> dict[str, list[float]]:
    """For each source line: seconds, bytes sent, FLOPs."""
    lines: dict[str, list[float]] = {}
    for k in found.kernels:
        row = lines.setdefault(places.of(k.equation), [0.0, 0, 0])
        row[0] += k.total_seconds
        row[1] += k.sent * k.times
        row[2] += k.flops * k.times
    lines.pop("", None)
    return lines
