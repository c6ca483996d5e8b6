"""Verdict: what bounds a call of a program on a machine, and what would make it faster."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from gshard.core.number_text import format_seconds, significant
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import format_bytes
from gshard.device.cost import MOST, WORTH, CallTotals, Cost, cost_of_kernels
from gshard.device.fusion_model import PRODUCT, as_kernel, kernels_of
from gshard.device.machine import Machine
from gshard.device.roofline import dtype_of, repeats
from gshard.explanation.report.page import InNotebooks
from gshard.explanation.rows import HIDDEN, CollectiveRow
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
_HELPS = {
    "compute": "Fewer operations and narrower dtypes help, and more devices.",
    "memory": "Narrower dtypes (bfloat16) and operations that XLA can fuse help.",
    "network": "Fewer bytes help, and a larger batch on each device if the bytes are those of weights or gradients.",
    "launch": "Fewer and larger operations help, and a larger batch on each device; more devices do not.",
    "latency": "Fewer and larger collectives help, and fewer devices along an axis; fewer bytes do not.",
    "host": "Fewer bytes in the memory of the host help, and more devices, because each moves its own part.",
}


def headline(found: CallTotals) -> str:
    """What bounds a call, in one sentence, with the share of everything that takes a percent of it or more."""
    if not found.seconds:
        return f"Nothing to run: no operation reaches a device of {found.machine.name}."
    shares = sorted(found.shares.items(), key=lambda pair: -pair[1])
    parts = ", ".join(f"{100 * share:.0f} % {NAMES[what]}" for what, share in shares if round(100 * share))
    bound = "- and ".join(found.bounds).capitalize()
    return f"{bound}-bound: {format_seconds(found.seconds)} a call on {found.machine.name}, {parts}."


@dataclasses.dataclass(frozen=True)
class Verdict(InNotebooks):
    """What bounds one call of a program on a machine, as modelled."""

    cost: CallTotals  # what it was read from
    ideal: float  # seconds that the products take at the machine's peak rate, those of a plan in even shares
    sentences: tuple[str, ...]  # all but the first
    # operations of products that a device computes, as a multiple of an even share; 1 if the program does not tell
    work: float = 1.0
    trials: Trials | None = None  # the changes of marks that were tried;
    # those that lower the bytes sent, for each row of collectives, with what a call then takes
    proposals: tuple[Proposal | None, ...] = ()

    @property
    def bound(self) -> str:
        """What most of a call is spent on: compute, memory, network, launch, latency or host."""
        return self.cost.bounds[0]

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

    @property
    def proposal(self) -> Proposal | None:
        """The change of marks that lowers the bytes sent most, of those with which a call takes no longer, if any."""
        return None if self.trials is None else self.trials.best()

    def data(self) -> dict[str, Any]:
        """The same as JSON can hold it."""
        return {
            "headline": self.headline, "sentences": list(self.sentences), "shares": self.shares, "share": self.share,
            "work": self.work,
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.sentences])


def sentences_of(
    found: CallTotals, rows: Sequence[CollectiveRow], of_work: Iterable[str], of_choice: Iterable[str]
) -> tuple[str, ...]:
    """What follows the headline, around what one kind of program alone tells of its work and of how it is split."""
    says = "it fits" if found.fits else "it does not fit"
    held = f"Peak memory of a device: {format_bytes(found.peak)} of {format_bytes(found.machine.memory)}, {says}."
    remedies = [
        f"{NAMES[what].capitalize()}: {format_seconds(found.by_bound[what])} of it. {_HELPS[what]}"
        for what in (found.bounds if found.seconds else ())
    ]
    return tuple(filter(None, (*remedies, *of_work, _network(found, rows), *of_choice, held)))


def _network(found: CallTotals, rows: Sequence[CollectiveRow]) -> str:
    """The collectives that send most, what of them passes beside kernels, and those that a call waits for longest."""
    if not rows:
        return "No device sends anything."
    most, longest = rows[0], max(rows, key=lambda row: row.exposed)
    sent, taken, hidden = sum(row.bytes for row in rows), sum(row.seconds for row in rows), found.overlapped
    share = 100 * most.bytes / max(sent, 1)
    text = f"Of {format_bytes(sent)} that each device sends, {share:.0f} % is the {_named(most)}."
    if taken and hidden > HIDDEN * taken:
        text += f" {100 * hidden / taken:.0f} % of the network's {format_seconds(taken)} passes while kernels run."
    if longest is not most and longest.exposed:
        text += f" The call waits longest, {format_seconds(longest.exposed)}, for the {_named(longest)}."
    return text


def _named(row: CollectiveRow) -> str:
    times = f", {row.times} times" if row.times > 1 else ""
    what = f"{row.kind} of {row.array or 'an array'} ({row.shape}) over {row.axes}{times}"
    return f"{what}, {format_seconds(row.seconds)}, caused at {row.line or row.module or 'no known line'}"


@with_tables
def does_not_pay(plan: Plan, found: Cost) -> str:
    """That a call is no faster than on one device alone, if so; empty where it is bound by what devices share."""
    block = plan.program.block
    if plan.mesh.size == 1 or not {"launch", "latency", "network"} & {*found.bounds} or not found.seconds:
        return ""
    if any(e.rule is not None and not e.rule.is_free for e in block.walk()):
        return ""
    one = cost_of_kernels(kernels_of(block), plan.mesh, found.machine, found.donated)
    if one.seconds > found.seconds or not one.fits:
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
EVEN = 1.02  # of its share of the products: more is no rounding of uneven parts any more
# Why a plan that sends less, or is faster, is not cheaper for the planner.
_BYTES = "it also counts messages, repeated work and memory"
_TIME = "it prices each kernel and each collective by itself, and the change is priced in full"


# What the verdict says of a plan alone: the work of its products, changes of marks, and what the plan was made for.


def work_of_plan(plan: Plan, found: Cost) -> tuple[float, float, str]:
    """Seconds of an even share of all products at the peak rate; the work of a device in shares; and a sentence."""
    devices = plan.mesh.size
    whole: Counter[str] = Counter()
    ideal = 0.0
    for e, times in plan.program.block.runs():
        if products := as_kernel(e).product_flops * times:
            whole[e.line] += products
            ideal += products / found.machine.peak(dtype_of(e)) / devices
    own: Counter[str] = Counter()
    for k in found.kernels:
        if k.kind == PRODUCT:
            own[k.line] += as_kernel(k.equation).product_flops * k.times * devices
    if not ideal:
        return 0.0, 1.0, "There is no matrix product."
    text = f"Upper bound on MFU: {100 * ideal / found.seconds:.0f} % (perfectly divided matrix products would take "
    text += f"{format_seconds(ideal)} at the peak rate). "
    work = sum(own.values()) / sum(whole.values())
    extra = {line: n - whole[line] for line, n in own.items() if n > EVEN * whole[line] and whole[line]}
    line = max(extra, key=lambda line: extra[line], default=None)
    if line is None:
        return ideal, work, text + "No product is computed by more than one device."
    most = significant(own[line] / whole[line], 3)
    return ideal, work, f"{text}Each device computes {work:.2f} times its share, most at {line}: {most} times."


def ragged_products(found: Cost) -> str:
    """That a compiler multiplies all rows of a ragged product with the matrix of each group, if that takes long."""
    rows = [(k, repeats(k.equation, found.machine)) for k in found.kernels if k.bound == "compute"]
    extra = {k: k.total_seconds * (1 - 1 / times) for k, times in rows if times > 1}
    if sum(extra.values()) <= (1 - WORTH) * found.seconds:
        return ""
    taken, most = format_seconds(sum(extra.values())), max(extra, key=lambda k: extra[k])
    return (
        f"{taken} of a call are products of rows with the matrices of other groups, most at {most.line}: XLA for "
        f"{found.machine.kind} has no kernel for {most.name}. A kernel of your own (gshard.kernel) multiplies "
        "each row once, as a TPU does."
    )


def hint(tried: Trials) -> str:
    """The change of marks that lowers the bytes sent most; else how many were tried without success."""
    if (p := tried.best()) is not None:
        slower = ", but slower" if p.is_slower else ""
        text = f"Fewer bytes{slower}: {p}."
        return text if tried.is_complete else f"{text} {tried}"
    if not tried.changes:
        return ""
    if tried.is_complete:
        return f"{tried} None of them lowers this."
    more = "With more seconds, verdict(seconds=...), more are tried."
    rest = tried.changes - tried.tried
    lowers = f" None of these lowers this; {rest} {'was' if rest == 1 else 'were'} not tried." if tried.tried else ""
    return f"{tried}{lowers} {more}"


def how_chosen(plan: Plan, found: Cost, by_bytes: bool, planned_for: Machine | None, p: Proposal | None) -> str:
    """What the plan was made for, and how good it is among those that keep the marks."""
    name, sentences = found.machine.name, list[str]()
    if by_bytes or planned_for not in (None, found.machine):
        made = "by bytes" if planned_for is None else f"for {planned_for.name}"
        way = "pass machine= to gshard.jit or gshard.explain"
        sentences.append(f"gshard planned {made}, not for {name}; to plan for {name}, {way}.")
    elif planned_for is not None and plan.counted == BY_BYTES:
        sentences.append(f"Of the plans priced for {name}, the one planned by bytes is the fastest.")
    if plan.gap is not None:
        by = "" if plan.gap < PROVEN else f" by more than {significant(100 * plan.gap, 2)} %"
        model = f"By the planner's cost model ({plan.counted})"
        if plan.is_limited:
            none = "none" if p is not None and not p.instead else "none that keeps the marks"
            sentences.append(f"{model}, of the plans that were compared (not all were) {none} is cheaper{by}.")
        elif p is None or p.instead:
            has_parts = any(len(atoms) > 1 for atoms in plan.mesh.atoms_of.values())
            over = " over whole axes" if has_parts else ""
            sentences.append(f"{model}, no plan{over} that keeps the marks is cheaper{by}.")
        else:  # the program with one more mark has a plan that keeps the others
            why = _BYTES if plan.counted.startswith(BY_BYTES) else _TIME
            sentences.append(f"{model}, a plan with this change is not cheaper{by}: {why}.")
    return " ".join(sentences)
