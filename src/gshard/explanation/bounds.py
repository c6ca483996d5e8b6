"""Bounds: what a call is bound by on a machine, and what would make it faster.

Launch-bound: 25.1 µs a call on h100:1x8, 72 % kernel launches, 21 % network latency, 7 % memory traffic.

The seconds of a call are those of its cost. Each is spent on one of six things (``cost.BOUNDS``), which different
changes make shorter: more bandwidth, or fewer bytes, shortens no launch and no latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gshard.core.number_text import format_seconds
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import format_bytes
from gshard.device.cost import MOST, CallTotals, Cost, cost_of_kernels
from gshard.device.fusion_model import COLLECTIVE, kernels_of
from gshard.device.machine import Machine

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
            f"Network latency: the first bytes of {count:,} collectives take {spent} to arrive, however few follow. "
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
