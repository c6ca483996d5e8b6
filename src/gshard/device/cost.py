"""Prices each kernel of a per-device program on a machine: time, FLOPs, bytes, and its collective."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gshard.comm.route import numbered
from gshard.comm.steps import KINDS, sent_bytes, sent_sizes
from gshard.core.jax_adapter import user_place
from gshard.core.mesh import Atoms, Mesh
from gshard.core.number_text import format_ms, format_seconds
from gshard.core.planning_tables import with_tables
from gshard.core.program import Equation, Value, format_bytes, format_flops, type_text
from gshard.core.spmd import Collective, SpmdProgram
from gshard.device.async_overlap import overlapped_of
from gshard.device.fusion_model import COLLECTIVE, PRODUCT, REGION, Kernel, Kernels, as_compiled, device_program
from gshard.device.machine import Machine
from gshard.device.memory import Memory, memory_of
from gshard.device.network import latency, permutation_seconds, seconds
from gshard.device.roofline import copy_seconds, host_seconds, kernel_roofline, launch_seconds
from gshard.language.transfer import changes_memory

# The causes of seconds: operations, bytes of the device's memory, bytes on links, kernel launches, the time until the
# first byte of a message arrives, and bytes between the device and the memory of its host.
BOUNDS = "compute", "memory", "network", "launch", "latency", "host"

MOST = 0.5  # of a call: what takes no more than that does not bound it alone

# A ratio of times or bytes of a program: another plan or another mark must save 2 %.
WORTH = 0.98


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PricedKernel:
    """The cost of one kernel of a call, of gshard's program or of XLA's."""

    kind: str  # collective, product, reduction, operator or fused
    times: int  # how often it runs in one call
    seconds: float  # of one run; for a collective, the time for which the device waits
    parts: tuple[tuple[str, float], ...]  # the seconds for each cause in ``BOUNDS``; they add up to ``seconds``
    flops: int = 0  # operations of one run, of all its equations
    moved: int = 0  # bytes that it reads and writes in one run
    sent: int = 0  # bytes that the device sends in one run
    overlapped: float = 0.0  # seconds of one run of a collective in which other kernels run

    @property
    def bound(self) -> str:
        """The cause of most of the seconds."""
        return max(self.parts, key=lambda part: part[1])[0]

    @property
    def total_seconds(self) -> float:
        """Seconds in one call of the program."""
        return self.seconds * self.times

    @property
    def duration(self) -> float:
        """Seconds of one run; of a collective all that the network takes."""
        return self.seconds + self.overlapped

    def beside(self, overlapped: float) -> Self:
        """The cost if other kernels run in some of its seconds. Each part keeps its share of the others."""
        left = self.seconds - overlapped
        share = left / self.seconds if self.seconds else 0.0
        parts = tuple((what, spent * share) for what, spent in self.parts)
        return dataclasses.replace(self, seconds=left, parts=parts, overlapped=overlapped)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost(PricedKernel):
    """The cost of one kernel of a per-device program."""

    name: str  # the operation, or the kind of collective
    line: str  # the user's source line
    result: str  # the local result, as text
    axes: Atoms = ()  # the atoms of a collective
    equation: Equation  # its last equation, as emitted


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop, a branch or a call in a run."""

    name: str  # the operation
    line: str  # the user's source line
    rounds: int  # how often it runs its bodies
    bodies: tuple[Run, ...]  # one round: what it runs, one after the other

    @property
    def seconds(self) -> float:
        """Seconds of all rounds."""
        return self.rounds * sum(body.seconds for body in self.bodies)


class Stretch(NamedTuple):
    """What a device does for some time."""

    start: float  # seconds from the beginning of the run
    seconds: float
    what: PricedKernel | Loop


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of a block in time."""

    seconds: float
    stretches: Sequence[Stretch] = ()  # in the order in which they begin

    def kernels(self) -> Iterator[PricedKernel]:
        """All kernels, those of each body once."""
        for _, _, what in self.stretches:
            if isinstance(what, Loop):
                for body in what.bodies:
                    yield from body.kernels()
            else:
                yield what


class CallTotals:
    """Totals over the kernels of one call: of a per-device program (``Cost``), or of one that XLA compiled."""

    machine: Machine
    kernels: Sequence[PricedKernel]
    if TYPE_CHECKING:

        @property
        def call(self) -> Run: ...
        @property
        def peak(self) -> int: ...

    @property
    def seconds(self) -> float:
        """Seconds of one call."""
        return sum(k.seconds * k.times for k in self.kernels)

    @property
    def overlapped(self) -> float:
        """Seconds of collectives in one call in which other kernels run. ``seconds`` does not contain them."""
        return sum(k.overlapped * k.times for k in self.kernels)

    @property
    def flops(self) -> int:
        """Operations of one call."""
        return sum(k.flops * k.times for k in self.kernels)

    @property
    def sent(self) -> int:
        """Bytes that a device sends in one call."""
        return sum(k.sent * k.times for k in self.kernels)

    @property
    def fits(self) -> bool:
        """Whether the peak is within a device's memory."""
        return self.peak <= self.machine.memory

    @property
    def by_bound(self) -> dict[str, float]:
        """Seconds for each cause in ``BOUNDS``, the largest first."""
        found = dict.fromkeys(BOUNDS, 0.0)
        for k in self.kernels:
            for what, spent in k.parts:
                found[what] += spent * k.times
        return dict(sorted(((w, s) for w, s in found.items() if s), key=lambda pair: -pair[1]))

    @property
    def shares(self) -> dict[str, float]:
        """The parts of the seconds: one for each cause in ``BOUNDS``, together 1, or 0 of no seconds."""
        total, spent = self.seconds, self.by_bound
        return {what: spent.get(what, 0.0) / total if total else 0.0 for what in BOUNDS}

    @property
    def bounds(self) -> tuple[str, ...]:
        """What bounds a call: what takes more than half of it, else the two that take most; the largest first."""
        shares = self.shares
        first, second, *_ = sorted(BOUNDS, key=lambda what: -shares[what])
        return (first,) if shares[first] > MOST or not shares[second] else (first, second)

    def __str__(self) -> str:
        bounds = ", ".join(f"{what} {format_seconds(s)}" for what, s in self.by_bound.items())
        beside = f"; {format_seconds(self.overlapped)} of network beside them" if self.overlapped else ""
        return (
            f"{format_ms(self.seconds)} a call on {self.machine.name} ({bounds}{beside}); "
            f"{format_flops(self.flops)}, {format_bytes(self.sent)} sent, "
            f"peak {format_bytes(self.peak)} of {format_bytes(self.machine.memory)}"
        )


@dataclasses.dataclass(frozen=True)
class Cost(CallTotals):
    """The cost of one call of a program on each device.

    Attributes:
        machine: the machine.
        kernels: the costs of the kernels, in the order in which they run.
        program: the kernels, nested in loops.
        donated: inputs (counted with captured arrays) whose memory results may take.
    """

    machine: Machine
    kernels: tuple[KernelCost, ...]
    program: Kernels = dataclasses.field(repr=False)
    donated: tuple[int, ...] = ()

    @property
    def call(self) -> Run:
        """The kernels in time: each follows the one before, and a collective takes what a call waits for it."""
        rows = iter(self.kernels)

        def run(block: Kernels) -> Run:
            at, stretches = 0.0, list[Stretch]()
            what: PricedKernel | Loop
            for kernel in block.kernels:
                e = kernel.equation
                loop = kernel.kind == REGION
                what = Loop(e.name, e.line, e.trip_count, tuple(map(run, kernel.bodies))) if loop else next(rows)
                stretches.append(Stretch(at, what.seconds, what))
                at += what.seconds
            return Run(at, stretches)

        return run(self.program)

    @functools.cached_property
    def memory(self) -> Memory:
        """The memory of a device at each moment."""
        return memory_of(self.program, self.donated, self.machine.compiler)

    @property
    def peak(self) -> int:
        """The most bytes that a device holds."""
        return self.memory.peak

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds by kind of kernel, collectives by their own kinds."""
        found: dict[str, float] = {}
        for k in self.kernels:
            kind = k.name if k.kind == COLLECTIVE else k.kind
            found[kind] = found.get(kind, 0.0) + k.total_seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


@with_tables
def cost(spmd: SpmdProgram, machine: Machine, donated: Iterable[int] = ()) -> Cost:
    """Prices a per-device program.

    >>> import jax.numpy as jnp
    >>> from gshard.api.marks import split
    >>> from gshard.emit.partition import partition
    >>> from gshard.planning.propagate import propagate
    >>> from gshard.tracing.trace import trace
    >>> program = trace(lambda x, y: split(x, 1, 8) @ y, jnp.ones((64, 512)), jnp.ones((512, 32)))
    >>> found = cost(partition(propagate(program, Mesh.abstract(devices=8))), Machine.of("v3:2x2"))
    >>> [(k.name, k.flops, k.sent) for k in found.kernels]
    [('dot_general', 262144, 0), ('all_reduce', 0, 14336)]
    """
    return cost_of_kernels(device_program(spmd), spmd.mesh, machine, [len(spmd.program.captured) + i for i in donated])


def cost_of_kernels(program: Kernels, mesh: Mesh, machine: Machine, donated: Iterable[int] = ()) -> Cost:
    """As ``cost``, for kernels that were read already. ``donated`` counts captured arrays too."""
    program = as_compiled(program, machine.compiler)
    rows = {
        kernel: kernel_cost(kernel, times, mesh, machine) for kernel, times in program.walk() if kernel.kind != REGION
    }
    seconds_alone = {kernel: row.seconds for kernel, row in rows.items()}
    for kernel, overlapped in overlapped_of(program, seconds_alone, mesh, machine).items():
        rows[kernel] = rows[kernel].beside(overlapped)
    return Cost(machine, tuple(rows.values()), program, tuple(donated))


def kernel_cost(kernel: Kernel, times: int, mesh: Mesh, machine: Machine) -> KernelCost:
    """Prices one kernel that is not a region."""
    e = kernel.equation
    copied = (*kernel.copied, *(piece.value.bytes for piece in kernel.slices if piece.copied))
    filled = sum(piece.value.bytes for piece in kernel.slices if piece.filled)
    launches = sum((launch_seconds(machine, 2 * array) for array in copied), 0.0)
    copies = sum(copy_seconds(machine, array) for array in copied) - launches + filled / machine.memory_bandwidth
    atoms: Atoms = ()
    name, kind, flops, sent = e.name, kernel.kind, 0, 0
    if kind == COLLECTIVE:
        name, atoms, sent, message, latency_seconds = _collective(kernel, mesh, machine)
        work = ("network", message - latency_seconds), ("latency", latency_seconds)
    elif changes_memory(e) and machine.host_link:
        array = sum(v.bytes for v in e.outputs)
        work = ("host", host_seconds(machine, array)), ("launch", launch_seconds(machine, kernel.moved))
    else:
        products, others = kernel.product_flops, kernel.vector_flops
        time = kernel_roofline(machine, e, products, others, kernel.moved, returns=kernel.starts)
        work = (time.bound, time.work), ("launch", time.launch)
        kind, flops = PRODUCT if products else kind, products + others
    parts: dict[str, float] = {}
    for what, spent in (*work, ("memory", copies), ("launch", launches)):
        parts[what] = parts.get(what, 0.0) + spent
    return KernelCost(
        name=name, kind=kind, line=e.line, result=", ".join(map(type_text, e.outputs)), times=times, equation=e,
        axes=atoms, flops=flops, moved=kernel.moved + 2 * sum(copied) + filled, sent=sent,
        seconds=sum(parts.values()), parts=tuple(parts.items()),
    )  # fmt: skip


def sent_by(e: Equation, mesh: Mesh) -> tuple[str, Atoms, list[int], int]:
    """The kind of a collective equation, its atoms, the bytes of each operand, and the bytes that a device sends."""
    axes: Any = e.params.get("axes", e.params.get("axis_name"))
    atoms = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    kind, operands = KINDS[e.name], sent_sizes(e.name, [v.bytes for v in e.inputs if isinstance(v, Value)])
    return kind, atoms, [*operands], sum(sent_bytes(kind, operand, mesh.count(atoms)) for operand in operands)


def _collective(kernel: Kernel, mesh: Mesh, machine: Machine) -> tuple[str, Atoms, int, float, float]:
    """The kind of a collective, its atoms, bytes sent, seconds of one run, and the latency in these seconds."""
    e = kernel.equation
    name, atoms, operands, sent = sent_by(e, mesh)
    if "perm" in e.params:
        pairs = _pairs(e.params["perm"], atoms, mesh)
        return name, atoms, sent, permutation_seconds(sent, pairs, machine), permutation_seconds(0, pairs, machine)
    joined = kernel.joined
    before, together = (seconds(name, n, mesh, machine, atoms) for n in (joined, joined + sum(operands)))
    # A collective that joins a message adds no latency.
    first = latency(name, mesh, machine, atoms) if together and not joined else 0.0
    return name, atoms, sent, together - before, min(first, together - before)


def _pairs(perm: Sequence[tuple[int, int]], atoms: Atoms, mesh: Mesh) -> list[tuple[int, int]]:
    """The pairs of a permutation over some atoms as pairs of devices. The first group represents all groups."""
    group = numbered(mesh, atoms)[1].tolist()
    devices = [mesh.order[position] for position in group] if mesh.order else group
    return [(devices[a], devices[b]) for a, b in perm]


# Matches each collective of a per-device program with the one that the partitioner emitted.


def origins(spmd: SpmdProgram, found: Cost) -> tuple[Collective | None, ...]:
    """For each priced kernel, its collective; None for kernels that send nothing."""
    sends = [k.equation for k in found.kernels if k.kind == COLLECTIVE]
    collectives = iter(emitted_as(spmd, sends))
    return tuple(next(collectives) if k.kind == COLLECTIVE else None for k in found.kernels)


def emitted_as(spmd: SpmdProgram, sends: Iterable[Equation]) -> list[Collective | None]:
    """For each collective equation, its collective; None for one that is new.

    Both are in the order in which they were emitted, and those of one kind with as many bytes at one place are matched
    in this order. Atoms do not count, because a permutation along some atoms is emitted over all.
    """
    queues: dict[Hashable, deque[Collective]] = {}
    for c in spmd.collectives:
        place = None if c.emitted is None else user_place(c.emitted.source_info)
        queues.setdefault((c.kind, c.bytes, place), deque()).append(c)
    found: list[Collective | None] = []
    for e in sends:
        kind, _, _, sent = sent_by(e, spmd.mesh)
        queue = queues.get((kind, sent, user_place(e.source_info)))
        found.append(queue.popleft() if queue else None)
    return found
