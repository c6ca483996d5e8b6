"""Verdict: what bounds a call of a program on a machine, and what would make it faster."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gshard.core.mesh import Mesh
from gshard.core.number_text import format_seconds, significant
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import format_bytes
from gshard.device.cost import MOST, WORTH, CallTotals, Cost, cost_of_kernels
from gshard.device.fusion_model import COLLECTIVE, PRODUCT, kernels_of, products_of
from gshard.device.machine import Machine
from gshard.device.roofline import dtype_of, repeats
from gshard.explanation.rows import MergedCollective
from gshard.explanation.trials import Proposal, Trials
from gshard.planning.objective import BY_BYTES

# Bounds: what a call is bound by on a machine, and what would make it faster.

NAMES = {
    "compute": "arithmetic",
    "memory": "memory traffic",
    "network": "bytes on links",
    "launch": "kernel launches",
    "latency": "network latency",
    "host": "transfers to and from the host",
}


def headline(found: CallTotals) -> str:
    """What bounds a call, in one sentence, with the share of everything that takes a percent of it or more."""
    if not found.seconds:
        return f"Nothing to run: no operation reaches a device of {found.machine.name}."
    shares = sorted(found.shares.items(), key=lambda pair: -pair[1])
    parts = ", ".join(f"{100 * share:.0f} % {NAMES[what]}" for what, share in shares if round(100 * share))
    bound = "- and ".join(found.bounds).capitalize()
    return f"{bound}-bound: {format_seconds(found.seconds)} a call on {found.machine.name}, {parts}."


def remedies(found: CallTotals) -> tuple[str, ...]:
    """What makes a call shorter, a sentence for each of ``CallTotals.bounds``."""
    return tuple(_remedy(what, found) for what in found.bounds) if found.seconds else ()


class CallVerdict:
    """What bounds one call of a program on a machine: of gshard's, or of one that XLA compiled."""

    if TYPE_CHECKING:

        @property
        def cost(self) -> CallTotals: ...
        @property
        def ideal(self) -> float: ...
        @property
        def sentences(self) -> tuple[str, ...]: ...

    @property
    def bounds(self) -> tuple[str, ...]:
        """What most of a call is spent on, and the second where the first takes no more than half."""
        return self.cost.bounds

    @property
    def bound(self) -> str:
        """What most of a call is spent on: compute, memory, network, launch, latency or host."""
        return self.bounds[0]

    @property
    def shares(self) -> dict[str, float]:
        """What a call is spent on, as parts of its seconds.

        ``compute`` (operations), ``memory`` (bytes read and written), ``network`` (bytes on links), ``launch``
        (starting kernels), ``latency`` (of the network) and ``host`` (bytes to and from the host).
        """
        return self.cost.shares

    @property
    def share(self) -> float:
        """The ideal time of the products as a part of a call: 1 is products alone, at the peak rate."""
        return self.ideal / self.cost.seconds if self.cost.seconds else 0.0

    @property
    def headline(self) -> str:
        """The first sentence."""
        return headline(self.cost)

    def data(self) -> dict[str, Any]:
        """The same as JSON can hold it."""
        return {
            "headline": self.headline, "sentences": list(self.sentences), "shares": self.shares, "share": self.share,
        }  # fmt: skip

    def _memory(self) -> str:
        says = "it fits" if self.cost.fits else "it does not fit"
        memory = format_bytes(self.cost.machine.memory)
        return f"Peak memory of a device: {format_bytes(self.cost.peak)} of {memory}, {says}."

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.sentences])


def _remedy(what: str, found: CallTotals) -> str:
    spent = format_seconds(found.by_bound.get(what, 0.0))
    if what == "launch":
        count = sum(k.times for k in found.kernels if any(part == "launch" and s for part, s in k.parts))
        return (
            f"Kernel launches: {count:,} kernels take {spent} to start, however little each computes. Fewer and larger "
            "operations help, and a larger batch on each device; more devices do not."
        )
    if what == "latency":
        count = sum(k.times for k in found.kernels if k.sent)
        return (
            f"Network latency: the first bytes of {count:,} collective{'s' * (count != 1)} take {spent} to arrive, "
            "however few follow. "
            "Fewer and larger collectives help, and fewer devices along an axis; fewer bytes do not."
        )
    if what == "memory":
        moved = sum(k.moved * k.times for k in found.kernels if k.kind != COLLECTIVE)
        return (
            f"Memory traffic: each device reads and writes {format_bytes(moved)} of its memory. "
            "Narrower dtypes (bfloat16) and operations that XLA can fuse help."
        )
    if what == "network":
        return (
            f"Bytes on links: each device sends {format_bytes(found.sent)}. Fewer bytes help, and a larger batch on "
            "each device if the bytes are those of weights or gradients."
        )
    if what == "host":
        return (
            f"Transfers to and from the host: {spent} of it. Fewer bytes in the memory of the host help, and more "
            "devices, because each moves its own part."
        )
    return f"Arithmetic: {spent} of it. Fewer operations and narrower dtypes help, and more devices."


@with_tables
def alone(plan: Plan, machine: Machine, donated: Sequence[int] = ()) -> Cost | None:
    """What a call takes on one device that holds all of every array, and computes everything."""
    if any(e.rule is not None and not e.rule.is_free for e in plan.program.block.walk()):
        return None
    return cost_of_kernels(kernels_of(plan.program.block), plan.mesh, machine, donated)


def does_not_pay(plan: Plan, found: Cost) -> str:
    """That a call is no faster than on one device alone, if so; empty where it is bound by what devices share."""
    if plan.mesh.size == 1 or not {"launch", "latency", "network"} & {*found.bounds} or not found.seconds:
        return ""
    one = alone(plan, found.machine, found.donated)
    if one is None or one.seconds > found.seconds or not one.fits:
        return ""
    text = (
        f"This split does not pay: one device alone would take {format_seconds(one.seconds)} a call, "
        f"and hold {format_bytes(one.peak)}."
    )
    launches = one.by_bound.get("launch", 0.0)
    if launches <= MOST * one.seconds:
        return text
    return f"{text} {format_seconds(launches)} of that are kernel launches, which no split makes fewer."


PROVEN = 1e-6  # of what a plan costs: a smaller gap is none
ALSO = 2  # other changes of marks that are named
EVEN = 1.02  # of its share of the products: more is no rounding of uneven parts any more
# Why a plan that sends less, or is faster, is not cheaper for the planner.
_BYTES = (
    "it also counts messages, repeated work, memory and, of a result without a mark, a part of the bytes that moving "
    "it into another sharding would send"
)
_TIME = "it prices each kernel and each collective by itself, and the change is priced in full"


@dataclasses.dataclass(frozen=True)
class Verdict(CallVerdict):
    """What bounds one call of a program on a machine, as modelled."""

    cost: Cost  # what it was read from
    mesh: Mesh  # the devices
    ideal: float  # seconds that an even share of all products takes at the machine's peak rate
    work: float  # operations of products that a device computes, as a multiple of an even share
    # the line whose products exceed their share most, and how many times it; None if none does
    repeated: tuple[str, float] | None
    sent: int  # bytes that each device sends
    # the collectives of a kind at a line that send most and, if they are others, those that take longest
    largest: tuple[MergedCollective, ...]
    trials: Trials  # the changes of marks that were tried;
    # those that lower the bytes sent, for each kind of collective, with what a call then takes
    proposals: tuple[Proposal | None, ...]
    gap: float | None = None  # gap, counted, is_limited: of the plan (``core.plan``)
    counted: str = ""
    is_limited: bool = False
    by_bytes: bool = False  # whether the plan was made by bytes;
    planned_for: Machine | None = None  # or for which machine; None if that is not known
    alone: str = ""  # that a call is no faster than on one device, if so
    unsplit: str = ""  # that a product is not split as its operand is, and what a call would take if it were, if so

    @property
    def proposal(self) -> Proposal | None:
        """The change of marks that lowers the bytes sent most, of those with which a call takes no longer, if any."""
        made = (p for p in self.proposals if p is not None)
        return min(made, key=_rank, default=None)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The others."""
        return tuple(
            text
            for text in (
                *remedies(self.cost), self.alone, self._compute(), self._groups(), self.unsplit, self._network(),
                self._hint(), self._choice(), self._memory(),
            )
            if text
        )  # fmt: skip

    def _compute(self) -> str:
        if not self.ideal:
            return "There is no matrix product."
        text = f"Upper bound on MFU: {100 * self.share:.0f} % (perfectly divided matrix products would take "
        text += f"{format_seconds(self.ideal)} at the peak rate). "
        if self.repeated is None:
            return text + "No product is computed by more than one device."
        line, times = self.repeated
        text += f"Each device computes {self.work:.2f} times its share"
        return f"{text}, most at {line}: {significant(times, 3)} times."

    def _groups(self) -> str:
        """That a compiler multiplies all rows of a ragged product with the matrix of each group, if that takes long."""
        rows = [(k, repeats(k.equation, self.cost.machine)) for k in self.cost.kernels if k.bound == "compute"]
        extra = {k: k.total_seconds * (1 - 1 / times) for k, times in rows if times > 1}
        if sum(extra.values()) <= (1 - WORTH) * self.cost.seconds:
            return ""
        taken, most = format_seconds(sum(extra.values())), max(extra, key=lambda k: extra[k])
        return (
            f"{taken} of a call are products of rows with the matrices of other groups, most at {most.line}: XLA for "
            f"{self.cost.machine.kind} has no kernel for {most.name}. A kernel of your own (gshard.kernel) multiplies "
            "each row once, as a TPU does."
        )

    def _network(self) -> str:
        if not self.largest:
            return "No device sends anything."
        most, *longest = self.largest
        share = 100 * most.collective.total_bytes / max(self.sent, 1)
        text = f"Of {format_bytes(self.sent)} that each device sends, {share:.0f} % is the {self._named(most)}."
        return text + "".join(f" In time the largest is the {self._named(c)}." for c in longest)

    def _named(self, row: MergedCollective) -> str:
        c = row.collective
        times = f", {c.times} times" if c.times > 1 else ""
        over = self.mesh.format_atoms(c.atoms)
        taken, line = format_seconds(row.seconds), c.line or "a program result"
        return f"{c.kind} of {c.shape} over {over}{times}, {taken}, caused at {line}"

    def _hint(self) -> str:
        """The change of marks that lowers the bytes sent most; else how many were tried without success."""
        tried, p = self.trials, self.proposal
        if p is not None:
            slower = ", but slower" if p.is_slower else ""
            text = f"Fewer bytes{slower}: {p.change}. {p.result[0].upper()}{p.result[1:]}"
            others = sorted({q for q in self.proposals if q not in (None, p) and not q.is_slower}, key=_rank)[:ALSO]
            also = "; ".join(f"{q.change} ({format_bytes(q.after)})" for q in others)
            text += f" Each by itself sends less too: {also}." if also else ""
            return text if tried.is_complete else f"{text} {tried}"
        if not tried.changes:
            return ""
        if tried.is_complete:
            return f"{tried} None of them lowers this."
        more = "With more seconds, verdict(seconds=...), more are tried."
        rest = tried.changes - tried.tried
        lowers = (
            f" None of these lowers this; {rest} {'was' if rest == 1 else 'were'} not tried." if tried.tried else ""
        )
        return f"{tried}{lowers} {more}"

    def _choice(self) -> str:
        """What the plan was made for, and how good it is among those that keep the marks."""
        name, sentences = self.cost.machine.name, []
        if self.by_bytes or self.planned_for not in (None, self.cost.machine):
            made = "by bytes" if self.planned_for is None else f"for {self.planned_for.name}"
            way = "pass machine= to gshard.jit or gshard.explain"
            sentences.append(f"gshard planned {made}, not for {name}; to plan for {name}, {way}.")
        elif self.planned_for is not None and self.counted == BY_BYTES:
            sentences.append(f"Of the plans priced for {name}, the one planned by bytes is the fastest.")
        if self.gap is not None:
            by = "" if self.gap < PROVEN else f" by more than {significant(100 * self.gap, 2)} %"
            model, p = f"By the planner's cost model ({self.counted})", self.proposal
            if self.is_limited:
                none = "none" if p is not None and not p.instead else "none that keeps the marks"
                sentences.append(f"{model}, of the plans that were compared (not all were) {none} is cheaper{by}.")
            elif p is None or p.instead:
                has_parts = any(len(atoms) > 1 for atoms in self.mesh.atoms_of.values())
                over = " over whole axes" if has_parts else ""
                sentences.append(f"{model}, no plan{over} that keeps the marks is cheaper{by}.")
            else:  # the program with one more mark has a plan that keeps the others
                why = _BYTES if self.counted.startswith(BY_BYTES) else _TIME
                sentences.append(f"{model}, a plan with this change is not cheaper{by}: {why}.")
        return " ".join(sentences)


def verdict(
    plan: Plan,
    found: Cost,
    rows: Sequence[MergedCollective],
    tried: Trials,
    by_bytes: bool = False,
    planned_for: Machine | None = None,
    unsplit: str = "",
) -> Verdict:
    """Reads the verdict off a cost."""
    machine, devices = found.machine, plan.mesh.size
    whole: Counter[str] = Counter()
    ideal = 0.0
    for e, times in plan.program.block.runs():
        if products := products_of(e) * times:
            whole[e.line] += products
            ideal += products / machine.peak(dtype_of(e)) / devices
    own: Counter[str] = Counter()
    for k in found.kernels:
        if k.kind == PRODUCT:
            own[k.line] += products_of(k.equation) * k.times * devices
    total = sum(whole.values())
    extra = {line: n - whole[line] for line, n in own.items() if n > EVEN * whole[line] and whole[line]}
    worst = max(extra, key=lambda line: extra[line], default=None)
    repeated = None if worst is None else (worst, own[worst] / whole[worst])
    work = sum(own.values()) / total if total else 1.0
    proposals: list[Proposal | None] = [None] * len(rows)
    for p in tried.found:
        proposals[p.row] = min(filter(None, (proposals[p.row], p.on(found))), key=_rank)
    sent = sum(row.collective.total_bytes for row in rows)
    longest = max(rows, key=lambda row: row.seconds, default=None)
    largest = rows[:1] if longest is None or longest is rows[0] else (rows[0], longest)
    return Verdict(
        found, plan.mesh, ideal, work, repeated, sent, tuple(largest), tried, tuple(proposals), plan.gap, plan.counted,
        plan.is_limited, by_bytes, planned_for, does_not_pay(plan, found), unsplit,
    )  # fmt: skip


def _rank(proposal: Proposal) -> tuple[bool, int]:
    return proposal.is_slower, proposal.after
