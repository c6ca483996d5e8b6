"""Elapsed: the modelled time of a compiled program on a machine, instruction by instruction.

The instructions of a computation run one after the other, in the order in which the compiler scheduled them. A kernel
takes what the roofline says (``device.roofline``), a collective what the links of its group need
(``device.network``). One that comes in two halves runs while what stands between them runs; collectives queue for the
network. What a call waits for it is *exposed*, and the rest is hidden. Loops run as often as their trip count; of
branches the longest counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from gshard.device.cost import PricedKernel
from gshard.device.fusion_model import COLLECTIVE, OPERATOR, PRODUCT
from gshard.device.machine import Machine
from gshard.device.roofline import roofline
from gshard.xla.hlo_collectives import OPCODE, CompiledCollective, Sent, sent_in
from gshard.xla.hlo_parser import Computation, Instruction, Module, trip_count
from gshard.xla.kernels import Work, work_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran(PricedKernel):
    """One instruction that takes time, with all its runs in one call."""

    computation: str  # computation, made: which
    made: Instruction
    work: Work | None = None  # of a kernel
    collective: Sent | None = None  # of a collective where it runs
    start: float = 0.0  # when it begins, in seconds from the beginning of a run of its computation

    @property
    def duration(self) -> float:
        """Seconds of one run; of a collective all that the network takes."""
        return self.seconds + self.overlapped


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    """An instruction that runs computations: a loop, a branch or a call."""

    made: Instruction  # which
    start: float  # when it begins, in seconds from the beginning of a run of its computation
    rounds: int  # how often it runs the bodies
    bodies: tuple[Elapsed, ...]  # what it runs, one after the other


@dataclasses.dataclass(frozen=True, slots=True)
class Elapsed:
    """One computation in time."""

    seconds: float  # of one run
    rows: tuple[Ran, ...] = ()  # its own instructions that take time, in the order in which they begin
    inner: tuple[Inner, ...] = ()  # those that run other computations, in order

    def in_order(self) -> list[Ran | Inner]:
        """What takes time here, in the order in which it begins."""
        every: list[Ran | Inner] = [*self.rows, *self.inner]
        return sorted(every, key=lambda one: one.start)

    def ran(self) -> Iterator[Ran]:
        """All instructions that take time, each body once, in the order in which they begin."""
        for at in self.in_order():
            if isinstance(at, Ran):
                yield at
            else:
                for body in at.bodies:
                    yield from body.ran()


Network = Callable[[CompiledCollective, Instruction], float]
"""The seconds of one run of a collective."""


def elapsed(module: Module, machine: Machine, network: Network) -> Elapsed:
    """One call of a program in time."""
    return _Clock(module, machine, network).run(module.entry, 1) if module.entry else Elapsed(0.0)


@dataclasses.dataclass(frozen=True)
class _Clock:
    """Runs the computations of a program on a machine."""

    module: Module
    machine: Machine
    network: Network

    def run(self, name: str, times: int) -> Elapsed:
        """One computation, which runs so often in a call."""
        computation = self.module.computations[name]
        starts: dict[str, list[Sent]] = {}
        ends: dict[str, list[Sent]] = {}
        for sent in sent_in(self.module, name, times, True):
            starts.setdefault(sent.made.name, []).append(sent)
            ends.setdefault(sent.ends.name, []).append(sent)
        now, network_free = 0.0, 0.0
        rows: list[Ran] = []
        inner: list[Inner] = []
        on_links: list[tuple[float, float, Sent]] = []  # from when to when each collective has the network
        exposed: dict[int, float] = {}
        for made in computation.instructions.values():
            for sent in starts.get(made.name, ()):
                begins = max(now, network_free)
                network_free = begins + self.network(sent.collective, sent.itself)
                on_links.append((begins, network_free, sent))
            if (kernel := self._kernel(computation, name, made, times, now)) is not None:
                rows.append(kernel)
                now += kernel.seconds
            if (runs := self._inner(computation, made, times, now)) is not None:
                inner.append(runs)
                now += runs.rounds * sum(body.seconds for body in runs.bodies)
            for sent in ends.get(made.name, ()):
                arrived = next(until for _, until, known in on_links if known is sent)
                for begins, until, other in on_links if arrived > now else ():
                    waited = max(0.0, min(until, arrived) - max(begins, now))
                    exposed[id(other)] = exposed.get(id(other), 0.0) + waited
                now = max(now, arrived)
        for begins, until, sent in on_links:
            waited = min(until - begins, exposed.get(id(sent), 0.0))
            rows.append(self._of_collective(sent, name, times, begins, until - begins, waited))
        return Elapsed(now, tuple(sorted(rows, key=lambda row: row.start)), tuple(inner))

    def _of_collective(self, sent: Sent, name: str, times: int, begins: float, taken: float, waited: float) -> Ran:
        """One collective; of what is waited for it, latency has the share that it has of all of it."""
        first = self.network(dataclasses.replace(sent.collective, operand_bytes=1), sent.itself) if taken else 0.0
        latency = waited * min(1.0, first / taken) if taken else 0.0
        parts = (("network", waited - latency), ("latency", latency))
        return Ran(
            computation=name, made=sent.made, kind=COLLECTIVE, times=times, sent=sent.collective.bytes_moved,
            seconds=waited, overlapped=taken - waited, parts=parts, collective=sent, start=begins,
        )  # fmt: skip

    def _kernel(self, computation: Computation, name: str, made: Instruction, times: int, now: float) -> Ran | None:
        if OPCODE.fullmatch(made.opcode) or made.bodies:
            return None
        work = work_of(self.module, computation, made)
        if work is None:
            return None
        one = roofline(self.machine, work.dtype, work.products, work.others, work.moved)
        parts = ((one.bound, one.work), ("launch", one.launch))
        return Ran(
            computation=name, made=made, kind=PRODUCT if work.products else OPERATOR, times=times,
            flops=work.products + work.others, moved=work.moved, seconds=one.seconds, parts=parts, work=work, start=now,
        )  # fmt: skip

    def _inner(self, computation: Computation, made: Instruction, times: int, now: float) -> Inner | None:
        if made.opcode == "while":
            rounds = trip_count(self.module, computation, made) or 1
            bodies = [self.run(body, times * rounds) for body in made.bodies]
            return Inner(made, now, rounds, tuple(bodies))
        if made.opcode == "conditional":  # one of the branches runs; the longest counts
            branches = [self.run(b, times) for b in made.bodies]
            return Inner(made, now, 1, (max(reversed(branches), key=lambda b: b.seconds),) if branches else ())
        if made.opcode == "call":
            return Inner(made, now, 1, tuple(self.run(body, times) for body in made.bodies))
        return None
