"""Report data: everything that the page and ``--json`` show, as plain lists and dicts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gshard.device.cost import BOUNDS, CallTotals, Loop, Run
from gshard.device.fusion_model import COLLECTIVE
from gshard.device.machine import Machine
from gshard.explanation.compiled_source import CompiledSource
from gshard.explanation.difference import FORMAT
from gshard.explanation.places import Place, Places
from gshard.explanation.plan_source import PlanSource
from gshard.explanation.rows import (
    HIDDEN,
    ArrayRow,
    CollectiveRow,
    HeldRows,
    Moved,
    TimedKernel,
    seconds_of,
    sent_by,
    spent_by,
)
from gshard.explanation.verdict import Verdict

NO_MACHINE = (
    'No machine is named, so that no times are modelled. Name one: machine="h100:1x8", '
    "on the command line --machine h100:1x8."
)


def report_data(
    source: PlanSource | CompiledSource, found: Any, rows: Sequence[CollectiveRow], verdict: Verdict | None
) -> dict[str, Any]:
    """The report of a source and its cost as JSON can hold it; without a verdict no machine and no time is known."""
    places, mesh, is_timed, kernels = Places(), source.mesh, verdict is not None, source.kernels(found)
    proposals = verdict.proposals if verdict is not None and verdict.proposals else [None] * len(rows)
    of_key: dict[int | None, list[TimedKernel]] = {}
    for k in kernels:
        of_key.setdefault(k.key, []).append(k)
    collectives: list[dict[str, Any]] = []
    groups: dict[str, str] = {}
    for row, proposal in zip(rows, proposals, strict=True):
        of = source.details_of_row(row, [k for one in row.moved for k in of_key.get(one.key, ())], places)
        atoms, devices = of.pop("atoms"), of.pop("groups")
        group = row.axes if atoms is None else ",".join(atoms)
        groups[group] = groups_text(devices)
        of |= {"group": group, "groups": list(map(list, devices)) if atoms is None else []}
        collectives.append({"proposal": "" if proposal is None else str(proposal), **_collective(row, places), **of})
    lines = _line_costs(source.moved, kernels, places, is_timed)
    data = {
        "format": FORMAT,
        "name": source.name,
        "program": source.size,
        "jax": source.jax,
        "overlap": _overlap(rows),
        "mesh": {
            "axes": list(mesh.axes),
            "atoms": list(mesh.atom_sizes.items()),
            "size": mesh.size,
            "order": mesh.order,
        },
        "machine": machine_data(found.machine) if is_timed else None,
        "totals": {
            "seconds": found.seconds if is_timed else 0.0,
            "flops": found.flops,
            "sent": sum(row.bytes for row in rows),
            "messages": sum(times for times, _ in sent_by(("", one) for one in source.moved).values()),
            "peak": found.peak,
            "arguments": source.argument_bytes,
        },
        "verdict": _NO_VERDICT if verdict is None else verdict.data(),
        # number and bytes of the collectives of a kind, and of those that move one array
        "sent": sent_by((of, one) for row in rows for of in (row.kind, row.what) for one in row.moved),
        "collectives": collectives,
        "timeline": _timeline(timeline(found), kernels, rows, found, places) if is_timed else _NO_TIMELINE,
        "tensors": [_array(row) | of for row, of in zip(source.arrays, source.details_of_arrays(places), strict=True)],
        "memory": _memory(source.held(found), places),
        "time": _times(kernels) if is_timed else [],
        # those that are not empty: a name, a title and the lines
        "lists": [(one.key, one.title, list(one.lines)) for one in source.lists if one.lines],
        "searched": "",  # what a search tells of its plan
        "lines": lines,
        "groups": groups,
    }
    return data | {"files": places.files(lines)}


_NO_VERDICT = {
    "headline": NO_MACHINE, "sentences": [], "shares": dict.fromkeys(BOUNDS, 0.0), "share": 0.0, "work": 1.0,
}  # fmt: skip
_NO_TIMELINE: dict[str, Any] = {"events": [], "loops": [], "texts": []}


def machine_data(machine: Machine) -> dict[str, Any]:
    """What times are modelled on."""
    return {
        "name": machine.name,
        "kind": machine.kind or machine.name,
        "text": str(machine),
        "memory": machine.memory,
    }


def _overlap(rows: Sequence[CollectiveRow]) -> str:
    """How much of the network's time passes while kernels run."""
    taken = sum(row.seconds for row in rows)
    if not taken:
        return "modelled"
    hidden = 1 - sum(row.exposed for row in rows) / taken
    part = f"{100 * hidden:.0f} % of the network's time passes while kernels run"
    return f"modelled; {part if hidden > HIDDEN else 'kernels wait for all collectives'}"


def _collective(row: CollectiveRow, places: Places) -> dict[str, Any]:
    layers: dict[tuple[str, str], list[int]] = {}
    for one in row.moved:
        sums = layers.setdefault((one.array.text, one.module.text), [0, 0])
        sums[:] = sums[0] + one.times, sums[1] + one.bytes
    shown = ("kind", "axes", "bytes", "times", "seconds", "shape", "array", "module", "line", "why")
    return {name: getattr(row, name) for name in shown} | {
        "hidden": 1 - row.exposed / row.seconds if row.seconds else 0.0,  # the part that passes while kernels run
        "layers": [[*key, *sums] for key, sums in layers.items()] if len(layers) > 1 else [],
        "cause": places.of(row.moved[0].cause),
    }


def groups_text(found: Sequence[Sequence[int]]) -> str:
    """Groups of devices that communicate, as text."""
    texts = [
        "{" + ",".join(map(str, g if len(g) <= 10 else g[:8])) + (",…}" if len(g) > 10 else "}") for g in found[:4]
    ]
    more = " …" if len(found) > 4 else ""
    return f"{len(found)} group{'s' if len(found) > 1 else ''} of {len(found[0])}: {' '.join(texts)}{more}"


def _array(row: ArrayRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "short": row.short.text,
        "sharding": row.sharding,
        "bytes": row.local_bytes if row.bytes is None else row.bytes,
        "local": row.local_bytes,
        "argument": row.is_argument,
        "note": row.note,
    }


def _line_costs(
    moved: Sequence[Moved], kernels: Sequence[TimedKernel], places: Places, is_timed: bool
) -> dict[str, list[float]]:
    """For each source line the seconds, bytes sent and FLOPs that it causes."""
    lines: dict[str, list[float]] = {}

    def add(place: Place | None, seconds: float, sent: int, flops: int) -> None:
        row = lines.setdefault(places.of(place), [0.0, 0, 0])
        row[:] = row[0] + (seconds if is_timed else 0.0), row[1] + sent, row[2] + flops

    for k in kernels:
        if k.key is None:
            add(k.place, k.cost.total_seconds, 0, k.cost.flops * k.cost.times)
    for one, (_, waited) in zip(moved, seconds_of(moved, spent_by(kernels)), strict=True):
        add(one.cause, waited, one.bytes, 0)
    lines.pop("", None)
    return lines


def _timeline(
    laid: Timeline, kernels: Sequence[TimedKernel], rows: Sequence[CollectiveRow], found: CallTotals, places: Places
) -> dict[str, Any]:
    """Events as [start, length, what bounds it, name, place, row of its collective, kernels]; times in µs.

    Names and places are numbers in ``texts``. What bounds an event counts in ``BOUNDS``; the number after the last is
    for rounds that are not drawn.
    """
    texts: dict[str, int] = {}
    row_of: dict[int | None, int] = {}
    for i, row in enumerate(rows):
        for one in row.moved:
            row_of.setdefault(one.key, i)

    def text(t: str) -> int:
        return texts.setdefault(t, len(texts))

    def event(x: Event, count: int) -> list[Any]:
        if x.kernel < 0:
            return [*_when(x), len(BOUNDS), text(x.name), text(""), -1, count]
        k = kernels[x.kernel]
        bound = BOUNDS.index(k.cost.bound)
        return [*_when(x), bound, text(k.name), text(places.of(k.place)), row_of.get(k.key, -1), count]

    lanes: dict[str, list[Event]] = {}
    for x in laid.kernels:
        lanes.setdefault(COMPUTE if x.kernel < 0 else track_of(kernels[x.kernel]), []).append(x)
    events = [event(x, n) for lane in lanes.values() for x, n in thinned(lane, ROUNDS)]
    shown = [[*_when(x), x.depth, text(x.name)] for x in laid.loops if x.seconds * ROUNDS > found.seconds]
    return {"events": sorted(events, key=lambda e: e[0]), "loops": shown, "texts": list(texts)}


def _when(x: Event) -> tuple[float, float]:
    return float(f"{x.start * 1e6:.7g}"), float(f"{x.seconds * 1e6:.4g}")


def _memory(held: HeldRows, places: Places) -> dict[str, Any]:
    """The curve of temporaries (thinned to its maxima where it is long) and what makes the peak."""
    totals, moments = held.totals, held.moments
    every = max(1, -(-len(moments) // 1500))  # the curve has no more points than that
    kept = [max(moments[i : i + every], key=lambda m: m.bytes) for i in range(0, len(moments), every)]
    named = [(m.bytes, *held.named(m)) for m in kept]
    rows = [[kind, size, name, places.of(place), count] for kind, size, name, place, count in held.alive]
    most = 15  # rows of arrays at the peak
    rest = held.alive[most:]
    shown = ("fixed", "arguments", "results", "shared", "temporaries")
    return {name: getattr(totals, name) for name in shown} | {
        "by": held.by,
        "curve": [[size, f"{name} {places.of(place)}".strip()] for size, name, place in named],
        "alive": rows[:most],
        "more": [sum(row[4] for row in rest), sum(row[1] for row in rest)],
    }


def _times(kernels: Iterable[TimedKernel]) -> list[dict[str, Any]]:
    """Seconds, FLOPs and bytes by class of operator and by what bounds them."""
    rows: dict[str, dict[str, Any]] = {}
    for k in kernels:
        new = {"class": k.kind, **dict.fromkeys(BOUNDS, 0.0), "flops": 0, "moved": 0, "sent": 0}
        row = rows.setdefault(k.kind, new)
        for what, spent in k.cost.parts:
            row[what] += spent * k.cost.times
        for what in ("flops", "moved", "sent"):
            row[what] += getattr(k.cost, what) * k.cost.times
    return sorted(rows.values(), key=lambda r: -math.fsum(r[what] for what in BOUNDS))


# Timeline: the kernels of one call on one device in order, by the cost model. The end is ``CallTotals.seconds``. Of a
# long loop the first rounds are drawn one by one, and the others as one event.

ROUNDS = 3000  # events that the rounds of one loop, or a lane of the page, are drawn with
FIRST = 2  # rounds that are drawn of a longer loop, at least
COMPUTE, NETWORK = "compute", "network"  # tracks


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A stretch of time."""

    start: float  # seconds from the beginning of the call
    seconds: float  # how long
    kernel: int  # the number of the costed kernel that runs, -1 for a loop and for rounds that are not drawn
    name: str  # what is shown of a loop, and of rounds that are not drawn
    depth: int = 0  # how many loops it is inside of


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One call of a program."""

    kernels: tuple[Event, ...]  # what runs, and stretches of rounds that are not drawn
    loops: tuple[Event, ...]  # where loops begin and end


def timeline(found: CallTotals) -> Timeline:
    """Draws the rounds of loops one by one as long as they are few."""
    numbers = {id(k): i for i, k in enumerate(found.kernels)}
    kernels, loops = list[Event](), list[Event]()

    def draw(run: Run, at: float, depth: int) -> None:
        for begins, seconds, what in run.stretches:
            start = at + begins
            if not isinstance(what, Loop):
                kernels.append(Event(start, seconds, numbers[id(what)], "", depth))
            elif events := sum(map(_count, what.bodies)):
                times = f" x{what.rounds}" if what.rounds > 1 else ""
                if seconds:
                    loops.append(Event(start, seconds, -1, f"{what.name}{times} {what.line}".strip(), depth))
                drawn = what.rounds
                if drawn * events > ROUNDS:
                    drawn = min(drawn, max(FIRST, ROUNDS // events))
                for _ in range(drawn):
                    for body in what.bodies:
                        draw(body, start, depth + 1)
                        start += body.seconds
                if (left := what.rounds - drawn) > 0:
                    rest = seconds * left / what.rounds
                    kernels.append(Event(start, rest, -1, f"{left} more rounds", depth + 1))

    draw(found.call, 0.0, 0)
    return Timeline(*(tuple(sorted(own, key=lambda e: e.start)) for own in (kernels, loops)))


def _count(run: Run) -> int:
    """How many events a run is drawn with, about."""
    count = 0
    for _, _, what in run.stretches:
        if isinstance(what, Loop):
            events = sum(map(_count, what.bodies))
            count += min(what.rounds * events, max(ROUNDS, FIRST * events))
        else:
            count += 1
    return count


def track_of(k: TimedKernel) -> str:
    """Where a kernel is drawn: what the network does has a lane of its own."""
    return NETWORK if k.cost.kind == COLLECTIVE else COMPUTE


def thinned(events: Sequence[Event], most: int) -> Iterator[tuple[Event, int]]:
    """At most about so many events: neighbours that are too short to be seen are one, with how many they are.

    Events far enough apart that the gap between them can be seen stay apart.
    """
    if not events:
        return
    shortest = (events[-1].start + events[-1].seconds - events[0].start) / most if len(events) > most else 0.0
    first, count, longest = events[0], 0, events[0]
    end = first.start
    for event in events:
        is_seen = event.seconds >= shortest or event.kernel < 0 or event.start - end > shortest
        if count and (end - first.start >= shortest or is_seen or not shortest):
            yield dataclasses.replace(longest, start=first.start, seconds=end - first.start), count
            first, count, longest = event, 0, event
        count += 1
        longest = max(longest, event, key=lambda e: e.seconds)
        end = event.start + event.seconds
    yield dataclasses.replace(longest, start=first.start, seconds=end - first.start), count
