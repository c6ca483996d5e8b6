"""Compiled cost: the modelled time, FLOPs, bytes and memory of one call of a compiled program, and its verdict."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from gshard.core.mesh import Mesh
from gshard.core.number_text import format_seconds
from gshard.core.program import format_bytes
from gshard.device.cost import CallTotals
from gshard.device.machine import COMPILERS, Machine, MachineError
from gshard.device.network import permutation_seconds, seconds, seconds_among
from gshard.explanation.compiled_program import CompiledProgram
from gshard.explanation.compiled_rows import CompiledRow, atoms_of
from gshard.explanation.verdict import CallVerdict, remedies
from gshard.xla.hlo_collectives import CompiledCollective, Sent, pairs_of
from gshard.xla.hlo_parser import Instruction
from gshard.xla.kernels import Elapsed, Ran, elapsed


@dataclasses.dataclass(frozen=True)
class CompiledCost(CallTotals):
    """What one call of a compiled program takes on each device, as modelled."""

    machine: Machine  # what was assumed
    kernels: tuple[Ran, ...]  # the instructions that take time, in order
    peak: int  # the most bytes that a device holds
    unknown: tuple[str, ...] = ()  # custom calls whose operations the text does not tell: they count by their bytes
    elapsed: Elapsed = dataclasses.field(default=Elapsed(0.0), repr=False)  # one call in time

    @property
    def products(self) -> int:
        """Operations of products in one call."""
        return sum(k.work.products * k.times for k in self.kernels if k.work is not None)

    @functools.cached_property
    def by_collective(self) -> Mapping[int, tuple[float, float]]:
        """For each collective (``id(sent.itself)``) the seconds of one run, and those that a call waits for."""
        totals: dict[int, tuple[float, float, int]] = {}
        for k in self.kernels:
            if k.collective is not None:
                taken, waited, times = totals.get(id(k.collective.itself), (0.0, 0.0, 0))
                now = taken + k.duration * k.times, waited + k.seconds * k.times, times + k.times
                totals[id(k.collective.itself)] = now
        return {which: (taken / times, waited / times) for which, (taken, waited, times) in totals.items() if times}

    @property
    def network(self) -> float:
        """Seconds of all collectives in one call, those that pass while other instructions run included."""
        return sum(k.duration * k.times for k in self.kernels if k.collective is not None)


def compiled_cost(program: CompiledProgram, machine: Machine) -> CompiledCost:
    """Prices a compiled program."""
    mesh = program.mesh
    if machine.size != mesh.size:
        raise MachineError(
            f"{machine.name} has {machine.size} devices, and the program runs on {mesh.size}.", got=f"mesh: {mesh}"
        )
    by_made = {id(sent.itself): sent for sent in program.sent}

    def network(collective: CompiledCollective, made: Instruction) -> float:
        return _network_seconds(program, by_made[id(made)], collective, made, mesh, machine)

    call = elapsed(program.module, machine, network)
    kernels = tuple(call.ran())
    unknown = {
        row.made.attributes.partition('custom_call_target="')[2].partition('"')[0]
        for row in kernels
        if row.work is not None and not row.work.is_known
    }
    return CompiledCost(machine, kernels, program.peak, tuple(sorted(unknown)), call)


def _network_seconds(
    program: CompiledProgram, sent: Sent, read: CompiledCollective, made: Instruction, mesh: Mesh, machine: Machine
) -> float:
    """Seconds of one run of a collective, by the links of its groups."""
    # A ragged exchange is priced as a full one, and a broadcast as a gather.
    kind = "all_to_all" if read.kind.endswith("all_to_all") else read.kind.replace("collective_broadcast", "all_gather")
    if kind == "collective_permute":
        pairs = [(a, b) for a, b in pairs_of(made) if a != b]
        size = min(read.operand_bytes, read.bytes_moved)
        there = [(mesh.order[a], mesh.order[b]) if mesh.order else (a, b) for a, b in pairs]
        return permutation_seconds(size, there, machine) if there else 0.0
    if read.group_size < 2:
        return 0.0
    atoms = atoms_of(program, sent)
    if atoms is not None:
        return seconds(kind, read.operand_bytes, mesh, machine, atoms)
    return max(
        seconds_among(kind, read.operand_bytes, sorted(mesh.order[d] if mesh.order else d for d in group), machine)
        for group in read.groups
    )


# Compiled verdict: what bounds a call of a compiled program, in a few sentences.

_HIDDEN = 0.005  # of the network's seconds: less is not worth a sentence


@dataclasses.dataclass(frozen=True)
class CompiledVerdict(CallVerdict):
    """What bounds one call of a compiled program on a machine, as modelled."""

    cost: CompiledCost  # what it was read from
    rows: Sequence[CompiledRow] = dataclasses.field(repr=False)  # the collectives, with their seconds on this machine
    platform: str = ""  # what the program was compiled for; empty if that is not known

    @property
    def ideal(self) -> float:
        """Seconds that the products take at the machine's peak rate."""
        works = ((k.work, k.times) for k in self.cost.kernels)
        return sum(w.products * times / self.cost.machine.peak(w.dtype) for w, times in works if w is not None)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The others."""
        more = self._compute(), self._network(), self._memory(), self._unknown(), self._elsewhere()
        return tuple(text for text in (*remedies(self.cost), *more) if text)

    def _compute(self) -> str:
        if not self.ideal:
            return "There is no matrix product whose operations are known."
        return (
            f"The products of a device would take {format_seconds(self.ideal)} at the peak rate: "
            f"{100 * self.share:.0f} % of the call."
        )

    def _network(self) -> str:
        if not self.rows:
            return "No device sends anything."
        most, total = self.rows[0], max(self.cost.sent, 1)
        text = (
            f"Of {format_bytes(self.cost.sent)} that each device sends, {100 * most.bytes / total:.0f} % is the "
            f"{most.kind} of {most.array} over {most.axes} at {most.line or most.module or 'no known line'}."
        )
        taken, hidden = sum(row.seconds for row in self.rows), self.cost.overlapped
        if taken and hidden > _HIDDEN * taken:
            text += f" {100 * hidden / taken:.0f} % of the network's {format_seconds(taken)} passes while kernels run."
        longest = max(self.rows, key=lambda row: row.exposed)
        if longest is not most and longest.exposed:
            text += (
                f" The call waits longest, {format_seconds(longest.exposed)}, for the {longest.kind} of "
                f"{longest.array} at {longest.line or longest.module or 'no known line'}."
            )
        return text

    def _unknown(self) -> str:
        if not self.cost.unknown:
            return ""
        return f"Kernels whose operations are not known count by their bytes only: {', '.join(self.cost.unknown)}."

    def _elsewhere(self) -> str:
        machine = self.cost.machine
        if not self.platform or machine.compiler == COMPILERS.get(self.platform, machine.compiler):
            return ""
        return (
            f"XLA compiled this program for {self.platform}. For {machine.kind or machine.name} it fuses and combines "
            "otherwise, and may choose other collectives: compile for the devices themselves to see those."
        )
