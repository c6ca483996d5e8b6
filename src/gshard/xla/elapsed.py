"""Elapsed: the modelled time of a compiled program on a machine, instruction by instruction.

The instructions of a computation run one after the other, in the order in which the compiler scheduled them. A kernel
takes what the roofline says (``device.roofline``), a collective what the links of its group need
(``device.network``). One that comes in two halves runs while what stands between them runs; collectives queue for the
network. What a call waits for it is *exposed*, and the rest is hidden. Loops run as often as their trip count; of
branches the longest counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gshard.device.machine import Machine
from gshard.device.roofline import roofline
from gshard.xla.hlo_collectives import BRANCHES, LOOP, OPCODE, CompiledCollective, Sent, sent_in
from gshard.xla.hlo_parser import Computation, Instruction, Module, trip_count
from gshard.xla.kernels import Work, work_of


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One instruction that takes time, with all its runs in one call.

    Attributes:
        computation, made: which.
        times: how often it runs.
        seconds: of one run; of a collective all that the network takes.
        exposed: of these, what a call waits for; the same as ``seconds`` for a kernel.
        work: of a kernel.
        sent: of a collective.
        parts: the exposed seconds by what they are spent on (``device.cost.BOUNDS``).
    """

    computation: str
    made: Instruction
    times: int
    seconds: float
    exposed: float
    work: Work | None
    sent: Sent | None
    parts: tuple[tuple[str, float], ...]


def ran(module: Module, machine: Machine, network: Callable[[CompiledCollective, Instruction], float]) -> list[Ran]:
    """What takes time in one call, in order.

    Args:
        module: a compiled program.
        machine: one of its devices runs the kernels.
        network: the seconds of one run of a collective.
    """
    found: list[Ran] = []
    if module.entry:
        _Clock(module, machine, network, found).run(module.entry, 1)
    return found


class _Clock:
    """Runs the computations of a program on a machine."""

    def __init__(
        self,
        module: Module,
        machine: Machine,
        network: Callable[[CompiledCollective, Instruction], float],
        found: list[Ran],
    ) -> None:
        self.module, self.machine, self.network, self.found = module, machine, network, found

    def run(self, name: str, times: int) -> float:
        """Seconds of one run of a computation; notes what runs in it."""
        computation = self.module.computations[name]
        starts: dict[str, list[Sent]] = {}
        ends: dict[str, list[Sent]] = {}
        for sent in sent_in(self.module, name, times, True):
            starts.setdefault(sent.made.name, []).append(sent)
            ends.setdefault(sent.ends.name, []).append(sent)
        now, network_free = 0.0, 0.0
        on_links: list[tuple[float, float, Sent]] = []  # from when to when each collective has the network
        exposed: dict[int, float] = {}
        for made in computation.instructions.values():
            for sent in starts.get(made.name, ()):
                begins = max(now, network_free)
                network_free = begins + self.network(sent.collective, sent.itself)
                on_links.append((begins, network_free, sent))
            now += self._kernel(computation, name, made, times) + self._inner(computation, made, times)
            for sent in ends.get(made.name, ()):
                arrived = next(until for _, until, known in on_links if known is sent)
                for begins, until, other in on_links if arrived > now else ():
                    waited = max(0.0, min(until, arrived) - max(begins, now))
                    exposed[id(other)] = exposed.get(id(other), 0.0) + waited
                now = max(now, arrived)
        for begins, until, sent in on_links:
            taken = until - begins
            self.found.append(self._of_collective(sent, name, times, taken, min(taken, exposed.get(id(sent), 0.0))))
        return now

    def _of_collective(self, sent: Sent, name: str, times: int, taken: float, waited: float) -> Ran:
        """One collective; of what is waited for it, latency has the share that it has of all of it."""
        first = self.network(dataclasses.replace(sent.collective, operand_bytes=1), sent.itself) if taken else 0.0
        latency = waited * min(1.0, first / taken) if taken else 0.0
        return Ran(
            name, sent.made, times, taken, waited, None, sent, (("network", waited - latency), ("latency", latency))
        )

    def _kernel(self, computation: Computation, name: str, made: Instruction, times: int) -> float:
        if OPCODE.fullmatch(made.opcode) or made.opcode in ("while", "conditional", "call"):
            return 0.0
        work = work_of(self.module, computation, made)
        if work is None:
            return 0.0
        one = roofline(self.machine, work.dtype, work.products, work.others, work.moved)
        bound = "compute" if one.compute >= one.memory else "memory"
        parts = ((bound, one.work), ("launch", one.launch))
        self.found.append(Ran(name, made, times, one.seconds, one.seconds, work, None, parts))
        return one.seconds

    def _inner(self, computation: Computation, made: Instruction, times: int) -> float:
        if made.opcode == "while":
            rounds = trip_count(self.module, computation, made) or 1
            return rounds * sum(self.run(body, times * rounds) for a in LOOP for body in made.called(a))
        if made.opcode == "conditional":
            return self._longest([b for a in BRANCHES for b in made.called(a)], times)
        return sum(self.run(body, times) for body in made.called("to_apply")) if made.opcode == "call" else 0.0

    def _longest(self, branches: list[str], times: int) -> float:
        """Of branches one runs; only what the longest runs is noted."""
        best, rows = 0.0, list[Ran]()
        for branch in branches:
            before = len(self.found)
            taken = self.run(branch, times)
            noted = self.found[before:]
            del self.found[before:]
            if taken >= best:
                best, rows = taken, noted
        self.found += rows
        return best
