"""Timeline: the kernels of one call on one device in order, by the cost model.

    found = gshard.explain(step, params, batch, mesh=8)
    found.trace("step.json", machine="v5e:2x4")      # open it in ui.perfetto.dev or chrome://tracing

Kernels follow each other, collectives with what is waited for them, and the end is ``Cost.seconds``. Rounds of a loop
are drawn one by one as long as they are few; of a long loop the first rounds, and the others as one event.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from gshard.core.spmd import Collective
from gshard.device.cost import Cost, KernelCost
from gshard.device.fusion_model import COLLECTIVE, REGION, Kernels
from gshard.device.origin import cause_of

ROUNDS = 3000  # events that the rounds of one loop are drawn with
FIRST = 2  # rounds that are drawn of a longer loop, at least


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A stretch of time.

    Attributes:
        start: seconds from the beginning of the call.
        seconds: how long.
        kernel: the number of the costed kernel that runs, -1 for a loop and for rounds that are not drawn.
        name: what is shown.
        depth: how many loops it is inside of.
    """

    start: float
    seconds: float
    kernel: int
    name: str
    depth: int = 0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One call of a program.

    Attributes:
        cost: what it was made from.
        kernels: what runs, in order, and stretches of rounds that are not drawn.
        loops: where loops begin and end.
    """

    cost: Cost
    kernels: tuple[Event, ...]
    loops: tuple[Event, ...]

    def chrome(self, origins: Sequence[Collective | None], name: str) -> dict[str, Any]:
        """The timeline in the Trace Event Format that Perfetto and chrome://tracing read.

        Args:
            origins: the collective of the plan that each kernel is.
            name: of the program.
        """
        rows: list[dict[str, Any]] = [
            named_track("process_name", 0, f"one device of {self.cost.machine.name}, modelled: {name}"),
            *(named_track("thread_name", i, track) for i, track in enumerate(TRACKS)),
        ]
        for loop in self.loops:
            rows.append(complete_event(loop, 0, "loop", {}))
        for event in self.kernels:
            if event.kernel < 0:
                rows.append(complete_event(event, 0, "rounds", {}))
                continue
            k, c = self.cost.kernels[event.kernel], origins[event.kernel]
            rows.append(complete_event(event, 2 if k.kind == COLLECTIVE else 1, k.bound, _details(k, c)))
        return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"machine": str(self.cost.machine)}}


TRACKS = ("loops", "compute", "network")


def timeline(found: Cost) -> Timeline:
    """Lays the kernels of a cost out in time."""
    numbers = itertools.count()
    layout = _Layout(found.kernels, {id(k): next(numbers) for k, _ in found.program.walk() if k.kind != REGION})
    layout.block(found.program, 0.0, 0)
    return Timeline(found, tuple(layout.kernels), tuple(layout.loops))


class _Layout:
    """Where kernels are put, one after the other."""

    def __init__(self, costs: Sequence[KernelCost], numbers: dict[int, int]) -> None:
        self.costs, self.numbers = costs, numbers
        self.kernels: list[Event] = []
        self.loops: list[Event] = []

    def block(self, block: Kernels, at: float, depth: int) -> float:
        """Lays out a block from a time on; returns when it ends."""
        for kernel in block.kernels:
            if kernel.kind != REGION:
                number = self.numbers[id(kernel)]
                cost = self.costs[number]
                self.kernels.append(Event(at, cost.seconds, number, cost.name, depth))
                at += cost.seconds
                continue
            e = kernel.equation
            rounds, start = e.trip_count, at
            drawn = rounds if rounds * self._events(kernel.bodies) <= ROUNDS else self._first(kernel.bodies, rounds)
            begin = len(self.loops)
            for _ in range(drawn):
                for body in kernel.bodies:
                    at = self.block(body, at, depth + 1)
            if drawn < rounds:
                left = (rounds - drawn) * sum(self._seconds(body) for body in kernel.bodies)
                self.kernels.append(Event(at, left, -1, f"{rounds - drawn} more rounds", depth + 1))
                at += left
            times = f" x{rounds}" if rounds > 1 else ""
            if at > start:
                self.loops.insert(begin, Event(start, at - start, -1, f"{e.name}{times} {e.line}".strip(), depth))
        return at

    def _first(self, bodies: Sequence[Kernels], rounds: int) -> int:
        return min(rounds, max(FIRST, ROUNDS // max(1, self._events(bodies))))

    def _events(self, bodies: Sequence[Kernels]) -> int:
        """How many events a round is drawn with, about."""
        found = 0
        for body in bodies:
            for kernel in body.kernels:
                inside = self._events(kernel.bodies)
                found += (
                    1
                    if kernel.kind != REGION
                    else min(kernel.equation.trip_count * inside, max(ROUNDS, FIRST * inside))
                )
        return found

    def _seconds(self, block: Kernels) -> float:
        """What one run of a block takes."""
        total = 0.0
        for kernel in block.kernels:
            if kernel.kind == REGION:
                total += kernel.equation.trip_count * sum(map(self._seconds, kernel.bodies))
            else:
                total += self.costs[self.numbers[id(kernel)]].seconds
        return total


def thinned(events: Sequence[Event], most: int) -> Iterator[tuple[Event, int]]:
    """At most about so many events: neighbours that are too short to be seen are one, with how many they are.

    Events far enough apart that the gap between them can be seen stay apart.

    Args:
        events: in order of time.
        most: how many to keep.
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


def named_track(what: str, track: int, name: str) -> dict[str, Any]:
    """The name of a track, in the Trace Event Format."""
    return {"ph": "M", "name": what, "pid": 0, "tid": track, "args": {"name": name}}


def complete_event(event: Event, track: int, category: str, details: dict[str, Any]) -> dict[str, Any]:
    """An event of a track, in the Trace Event Format."""
    return {
        "ph": "X", "name": event.name, "cat": category, "pid": 0, "tid": track,
        "ts": event.start * 1e6, "dur": event.seconds * 1e6, "args": details,
    }  # fmt: skip


def _details(k: KernelCost, c: Collective | None) -> dict[str, Any]:
    """What is shown of a kernel that is selected."""
    told: dict[str, Any] = {"line": cause_of(k, c).line, "result": k.result, "bound by": k.bound}
    if c is not None:
        told |= {"emitted at": k.line, "needed for": c.why, "bytes sent": k.sent}
    else:
        told |= {"FLOPs": k.flops, "bytes read and written": k.moved}
    return told
