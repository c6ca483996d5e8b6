"""Verdict: what bounds a call of a program on a machine, in a few sentences.

print(gshard.explain(step, params, batch, mesh=8).verdict("v5e:2x4"))

Network-bound: of 3.21 ms a call on v5e:2x4, 62 % is communication, 30 % arithmetic, 8 % memory traffic.
An even share of the matrix products takes 0.92 ms at the machine's peak rate: 29 % of the call.
...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gshard.analysis.cost import Cost
from gshard.analysis.device_program import PRODUCT, flops, kind_of
from gshard.analysis.origin import MergedCollective
from gshard.analysis.proposal import Proposal
from gshard.core.plan import Plan
from gshard.core.program import Block, format_bytes, short_dtype

BOUNDS = {"network": "communication", "compute": "arithmetic", "memory": "memory traffic"}
EVEN = 1.02  # of its share of the products: more is no rounding of uneven parts any more


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What bounds one call of a program on a machine, as modelled.

    Attributes:
        cost: what it was read from.
        ideal: seconds that an even share of all products takes at the machine's peak rate.
        work: products that a device computes, as a multiple of an even share.
        largest: the collectives of a kind at a line that send most; None if nothing is sent.
        axes: the axes of the mesh these run over.
        proposal: the mark that lowers the bytes sent most, of those that were tried.
        tried: for how many collectives marks were tried.
    """

    cost: Cost
    ideal: float
    work: float
    largest: MergedCollective | None
    axes: str
    proposal: Proposal | None
    tried: int

    @property
    def shares(self) -> dict[str, float]:
        """What a call is spent on, ``compute``, ``memory`` and ``network``, as parts of its seconds."""
        total = self.cost.seconds
        return {what: self.cost.by_bound.get(what, 0.0) / total if total else 0.0 for what in BOUNDS}

    @property
    def bound(self) -> str:
        """What most of a call is spent on."""
        return max(self.shares, key=lambda what: self.shares[what])

    @property
    def share(self) -> float:
        """The ideal time as a part of a call: 1 is products alone, evenly divided, at the peak rate."""
        return self.ideal / self.cost.seconds if self.cost.seconds else 0.0

    @property
    def headline(self) -> str:
        """The first sentence."""
        found = self.cost
        if not found.seconds:
            return f"Nothing to run: no operation reaches a device of {found.machine.name}."
        parts = ", ".join(f"{100 * s:.0f} % {BOUNDS[w]}" for w, s in sorted(self.shares.items(), key=lambda p: -p[1]))
        return f"{self.bound.capitalize()}-bound: {_time(found.seconds)} a call on {found.machine.name}, {parts}."

    @property
    def sentences(self) -> tuple[str, ...]:
        """The others."""
        return tuple(text for text in (self._compute(), self._network(), self._way_out(), self._memory()) if text)

    def _compute(self) -> str:
        if not self.ideal:
            return "There is no matrix product."
        text = f"An even share of the matrix products takes {_time(self.ideal)} at the peak rate: "
        text += f"{100 * self.share:.0f} % of the call (an upper limit of MFU). "
        if self.work <= EVEN:
            return text + "No product is computed by more than one device."
        return text + f"Each device computes {self.work:.2f} times its even share: some products are not fully split."

    def _network(self) -> str:
        if self.largest is None:
            return "No device sends anything."
        c, total = self.largest.collective, max(self.cost.sent, 1)
        times = f", {c.times} times" if c.times > 1 else ""
        seconds = self.largest.seconds * c.times
        return (
            f"Of {format_bytes(self.cost.sent)} that each device sends, {100 * c.total_bytes / total:.0f} % is the "
            f"{c.kind} of {c.shape} over {self.axes}{times}, {_time(seconds)}, caused at {c.line or 'the border'}."
        )

    def _way_out(self) -> str:
        p = self.proposal
        if p is not None:
            return (
                f"Fewer bytes: {p.mark} on {p.at}. Planned again with it, each device sends {format_bytes(p.after)} "
                f"instead of {format_bytes(p.before)}."
            )
        return f"No mark lowers this: tried for the {self.tried} largest collectives." if self.tried > 1 else ""

    def _memory(self) -> str:
        found = self.cost
        says = "it fits" if found.fits else "it does not fit"
        return f"Peak memory of a device: {format_bytes(found.peak)} of {format_bytes(found.machine.memory)}, {says}."

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.sentences])


def verdict(
    plan: Plan, found: Cost, rows: Sequence[MergedCollective], proposals: Sequence[Proposal | None], tried: int
) -> Verdict:
    """Reads the verdict off a cost.

    Args:
        plan: the program and how it is split.
        found: what it takes on a machine.
        rows: its collectives, those that send most first.
        proposals: for each a mark that would lower the bytes sent.
        tried: for how many of them marks were tried.
    """
    whole = dict[str, int]()
    for dtype, n in _products(plan.program.block):
        whole[dtype] = whole.get(dtype, 0) + n
    machine, devices = found.machine, plan.mesh.size
    ideal = sum(n / machine.rate(dtype) for dtype, n in whole.items()) / devices
    own = sum(flops(k.equation) * k.times for k in found.kernels if k.kind == PRODUCT)
    work = own * devices / sum(whole.values()) if sum(whole.values()) else 1.0
    best = min((p for p in proposals if p is not None), key=lambda p: p.after, default=None)
    largest = rows[0] if rows else None
    axes = plan.mesh.format_atoms(largest.collective.atoms) if largest else ""
    return Verdict(found, ideal, work, largest, axes, best, tried)


def _products(block: Block, times: int = 1) -> Iterator[tuple[str, int]]:
    """The operations of all products of the program as it was written, by dtype."""
    for e in block.equations:
        for body in e.blocks:
            yield from _products(body, times * e.trips)
        if not e.blocks and e.rule is not None and e.rule.flops and kind_of(e) == PRODUCT:
            yield short_dtype(e.inputs[0].dtype), times * e.rule.flops


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
