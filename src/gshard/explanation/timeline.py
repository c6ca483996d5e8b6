"""Timeline: the kernels of one call on one device in order, by the cost model. The end is ``CallTotals.seconds``.

Of a long loop the first rounds are drawn one by one, and the others as one event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gshard.device.cost import Cost
from gshard.device.fusion_model import COLLECTIVE, REGION, Kernels
from gshard.device.machine import Machine
from gshard.explanation.places import Places
from gshard.explanation.rows import CollectiveRow, TimedKernel

ROUNDS = 3000  # events that the rounds of one loop are drawn with
FIRST = 2  # rounds that are drawn of a longer loop, at least
TRACKS = LOOPS, COMPUTE, NETWORK = "loops", "compute", "network"


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A stretch of time."""

    start: float  # seconds from the beginning of the call
    seconds: float  # how long
    kernel: int  # the number of the costed kernel that runs, -1 for a loop and for rounds that are not drawn
    name: str  # what is shown of a loop, and of rounds that are not drawn
    depth: int = 0  # how many loops it is inside of


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of a block, or of several one after the other."""

    seconds: float  # how long it takes
    events: Sequence[Event | Loop]  # its kernels and loops, in order. Their times count from its beginning.

    @property
    def count(self) -> int:
        """How many events it is drawn with, about."""
        return sum(1 if isinstance(e, Event) else e.count for e in self.events)


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop, a branch or a call in a run."""

    start: float  # seconds from the beginning of the run
    rounds: int  # how often it runs
    body: Run  # one round
    name: str  # the text of its event, without the number of rounds
    line: str  # the user's source line

    @property
    def seconds(self) -> float:
        """Seconds of all rounds."""
        return self.rounds * self.body.seconds

    @property
    def count(self) -> int:
        """How many events all rounds are drawn with, about."""
        return min(self.rounds * self.body.count, max(ROUNDS, FIRST * self.body.count))


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One call of a program."""

    kernels: tuple[Event, ...]  # what runs, and stretches of rounds that are not drawn
    loops: tuple[Event, ...]  # where loops begin and end

    @staticmethod
    def of(call: Run) -> Timeline:
        """Draws the rounds of loops one by one as long as they are few."""
        kernels, loops = list[Event](), list[Event]()
        _draw(call, 0.0, 0, kernels, loops)
        return Timeline(*(tuple(sorted(own, key=lambda e: e.start)) for own in (kernels, loops)))


def _draw(run: Run, at: float, depth: int, kernels: list[Event], loops: list[Event]) -> None:
    for one in run.events:
        start = at + one.start
        if isinstance(one, Event):
            kernels.append(dataclasses.replace(one, start=start, depth=depth))
            continue
        rounds, events = one.rounds, one.body.count
        if not events:
            continue
        if one.seconds:
            times = f" x{rounds}" if rounds > 1 else ""
            loops.append(Event(start, one.seconds, -1, f"{one.name}{times} {one.line}".strip(), depth))
        drawn = rounds if rounds * events <= ROUNDS else min(rounds, max(FIRST, ROUNDS // events))
        for _ in range(drawn):
            _draw(one.body, start, depth + 1, kernels, loops)
            start += one.body.seconds
        if (left := rounds - drawn) > 0:
            kernels.append(Event(start, left * one.body.seconds, -1, f"{left} more rounds", depth + 1))


def timeline(found: Cost) -> Timeline:
    """Lays the kernels of a per-device program out in time: each follows the one before, and collectives take what a
    call waits for them."""
    numbers = {id(k): i for i, k in enumerate(k for k, _ in found.program.walk() if k.kind != REGION)}

    def run(blocks: Iterable[Kernels]) -> Run:
        at, events = 0.0, list[Event | Loop]()
        for kernel in (kernel for block in blocks for kernel in block.kernels):
            e = kernel.equation
            if kernel.kind == REGION:
                events.append(Loop(at, e.trip_count, run(kernel.bodies), e.name, e.line))
            else:
                number = numbers[id(kernel)]
                events.append(Event(at, found.kernels[number].seconds, number, ""))
            at += events[-1].seconds
        return Run(at, events)

    return Timeline.of(run([found.program]))


def trace_of(
    name: str, machine: Machine, laid: Timeline, kernels: Sequence[TimedKernel], row_of: Mapping[int, CollectiveRow]
) -> dict[str, Any]:
    """A call in the Trace Event Format that Perfetto and chrome://tracing read; ``row_of`` is by ``Moved.key``."""
    titles = [("process_name", 0, f"one device of {machine.name}, modelled: {name}")]
    titles += [("thread_name", i, track) for i, track in enumerate(TRACKS)]
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": what, "pid": 0, "tid": i, "args": {"name": text}} for what, i, text in titles
    ]
    rows += [_complete_event(loop, loop.name, LOOPS, "loop", {}) for loop in laid.loops]
    places = Places()
    for event in laid.kernels:
        if event.kernel < 0:
            rows.append(_complete_event(event, event.name, LOOPS, "rounds", {}))
            continue
        k = kernels[event.kernel]
        told: dict[str, Any] = {"line": places.of(k.place), "bound by": k.cost.bound}
        if k.key is None:
            told |= {"FLOPs": k.cost.flops, "bytes read and written": k.cost.moved}
        else:
            row = row_of[k.key]
            told |= {"array": row.array, "over": row.axes, "needed for": row.why, "bytes sent": k.cost.sent}
            told |= {"of it beside kernels, in µs": k.cost.overlapped * 1e6} if k.cost.overlapped else {}
        rows.append(_complete_event(event, k.name, track_of(k), k.cost.bound, told))
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"machine": str(machine)}}


def track_of(k: TimedKernel) -> str:
    """Where a kernel is drawn: what the network does has a lane of its own."""
    return NETWORK if k.cost.kind == COLLECTIVE else COMPUTE


def _complete_event(event: Event, name: str, track: str, category: str, details: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": 0, "tid": TRACKS.index(track),
        "ts": event.start * 1e6, "dur": event.seconds * 1e6, "args": details,
    }  # fmt: skip


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
