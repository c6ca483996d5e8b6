"""Compiled timeline: one call of a compiled program in time, kernels in one lane and what the network does in another.

Rounds of a loop are drawn as ``explanation.timeline`` draws them: one by one as long as they are few; of a long loop
the first rounds, and the others as one event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from gshard.explanation.timeline import FIRST, ROUNDS, Event
from gshard.xla.elapsed import Elapsed, Inner, Ran
from gshard.xla.hlo_collectives import line_of
from gshard.xla_programs.compiled_cost import CompiledCost
from gshard.xla_programs.compiled_program import CompiledProgram


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledTimeline:
    """One call of a compiled program.

    Attributes:
        kernels: what computes, and stretches of rounds that are not drawn, in order.
        network: what the network does, in order; it may run beside kernels.
        loops: where loops begin and end.
    """

    kernels: tuple[Event, ...]
    network: tuple[Event, ...]
    loops: tuple[Event, ...]


def compiled_timeline(program: CompiledProgram, found: CompiledCost, names: Sequence[str]) -> CompiledTimeline:
    """Lays the instructions of a program out in time.

    Args:
        program: what was compiled.
        found: its cost.
        names: what each of ``found.kernels`` is called.
    """
    numbers = {id(k.ran): i for i, k in enumerate(found.kernels)}
    layout = _Layout(program, numbers, names)
    layout.run(found.elapsed, 0.0, 0)
    kernels, network, loops = (
        tuple(sorted(own, key=lambda e: e.start)) for own in (layout.kernels, layout.network, layout.loops)
    )
    return CompiledTimeline(kernels, network, loops)


class _Layout:
    """Where instructions are put."""

    def __init__(self, program: CompiledProgram, numbers: Mapping[int, int], names: Sequence[str]) -> None:
        self.program, self.numbers, self.names = program, numbers, names
        self.kernels: list[Event] = []
        self.network: list[Event] = []
        self.loops: list[Event] = []

    def run(self, call: Elapsed, at: float, depth: int) -> None:
        """Lays out one run of a computation from a time on."""
        for one in call.in_order():
            if isinstance(one, Inner):
                self._inner(one, at + one.start, depth)
                continue
            number = self.numbers[id(one)]
            lane = self.kernels if one.sent is None else self.network
            lane.append(Event(at + one.start, one.seconds, number, self.names[number], depth))

    def _inner(self, loop: Inner, start: float, depth: int) -> None:
        events = sum(_events(body) for body in loop.bodies)
        if not events:
            return
        drawn = loop.rounds if loop.rounds * events <= ROUNDS else min(loop.rounds, max(FIRST, ROUNDS // events))
        one, at = sum(body.seconds for body in loop.bodies), start
        for _ in range(drawn):
            for body in loop.bodies:
                self.run(body, at, depth + 1)
                at += body.seconds
        if drawn < loop.rounds:
            left = loop.rounds - drawn
            self.kernels.append(Event(at, left * one, -1, f"{left} more rounds", depth + 1))
        if one:
            times = f" x{loop.rounds}" if loop.rounds > 1 else ""
            line = line_of(loop.made, self.program.module.frames)
            name = f"{loop.made.opcode}{times} {line}".strip()
            self.loops.append(Event(start, loop.rounds * one, -1, name, depth))


def _events(body: Elapsed) -> int:
    """How many events a run is drawn with, about."""
    return sum(_counts(body))


def _counts(body: Elapsed) -> Iterator[int]:
    for one in body.in_order():
        if isinstance(one, Ran):
            yield 1
        else:
            inside = sum(map(_events, one.bodies))
            yield min(one.rounds * inside, max(ROUNDS, FIRST * inside))
