"""Timeline: the kernels of one call on one device in order, by the cost model. The end is ``CallTotals.seconds``.

Of a long loop the first rounds are drawn one by one, and the others as one event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gshard.device.cost import CallTotals, Loop, Run
from gshard.device.fusion_model import COLLECTIVE
from gshard.explanation.rows import TimedKernel

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
