"""Hidden: how much of a collective passes while a device computes, where its compiler begins it early and ends it late.

A device computes one kernel after the other, and its links carry one collective after the other. A collective that the
compiler hides (``Machine.hides``) begins as soon as what it sends is there, but no earlier than the first kernel that
reads what the one before brought: one thing is fetched ahead, not everything. Its first reader waits for what is left
of it. All others run by themselves.

    gather w1, x @ w1, gather w2, y @ w2         the second gather passes while x @ w1 is computed

Of libtpu: a permutation passes beside any kernel, an all-gather beside products alone, as it becomes part of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from gshard.analysis.machine import PERMUTE, Machine
from gshard.comm.collectives import KINDS
from gshard.passes.device_program import COLLECTIVE, PRODUCT, REGION, Kernel, Kernels


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What a device does next: a kernel or a collective.

    Attributes:
        seconds: of it alone.
        reads, writes: arrays, under any names.
        kind: of the collective; empty for a kernel.
        product: whether it is one.
        way: of a permutation, who sends to whom; what goes there and back uses both directions of the links.
        region: whether it is a loop or a branch, around which nothing is under way.
    """

    seconds: float
    reads: Sequence[Hashable]
    writes: Sequence[Hashable]
    kind: str = ""
    product: bool = False
    way: frozenset[tuple[int, int]] | None = None
    region: bool = False


def hidden(steps: Sequence[Step], hides: Sequence[str]) -> list[float]:
    """Seconds of each step that pass while others run.

    Args:
        steps: what a device does, in order.
        hides: the kinds of collectives that the compiler begins early.
    """
    under_way: collections.deque[int] = collections.deque()
    left = [s.seconds if s.kind in hides else 0.0 for s in steps]
    found = list(left)
    begins = _begins(steps, hides)
    brought = {v: i for i, s in enumerate(steps) if s.kind in hides for v in s.writes}

    def wait(until: int) -> None:
        while under_way and until in under_way:
            group = _together(under_way, steps)
            longest, total = max(left[i] for i in group), sum(left[i] for i in group)
            for i in group:
                found[i] -= longest * left[i] / total if total else 0.0
                left[i] = 0.0
                under_way.popleft()

    for k, step in enumerate(steps):
        under_way.extend(begins[k])
        if step.kind in hides:
            continue
        for v in step.reads:
            if v in brought:
                wait(brought[v])
        if step.kind or step.region:
            while under_way:
                wait(under_way[0])
            continue
        spent = step.seconds
        while under_way and spent > 0:
            group = _together(under_way, steps)
            if steps[group[0]].kind != PERMUTE and not step.product:
                break
            passed = min(spent, max(left[i] for i in group))
            spent -= passed
            for i in group:
                left[i] = max(0.0, left[i] - passed)
            if all(left[i] == 0.0 for i in group):
                for _ in group:
                    under_way.popleft()
    while under_way:
        wait(under_way[0])
    return found


def _begins(steps: Sequence[Step], hides: Sequence[str]) -> list[list[int]]:
    """For each step the collectives that begin before it."""
    made = {v: i for i, s in enumerate(steps) for v in s.writes}
    read = {v: k for k, s in reversed(list(enumerate(steps))) for v in s.reads}
    found: list[list[int]] = [[] for _ in steps]
    earliest = 0
    for i, step in enumerate(steps):
        if step.kind in hides:
            at = min(i, max(earliest, *(made.get(v, -1) + 1 for v in step.reads), 0))
            found[at].append(i)
            earliest = max(at, min((read.get(v, i) for v in step.writes), default=i))
    return found


def _together(under_way: Sequence[int], steps: Sequence[Step]) -> list[int]:
    """What the links carry now: the first, and a permutation the other way that follows it."""
    first = under_way[0]
    way = steps[first].way
    if way is not None and len(under_way) > 1 and steps[under_way[1]].way == frozenset((b, a) for a, b in way):
        return [first, under_way[1]]
    return [first]


def hidden_of(program: Kernels, seconds: Mapping[Kernel, float], machine: Machine) -> dict[Kernel, float]:
    """For the kernels of a program, in one run, the seconds of each that pass while others run.

    Args:
        program: a block; what is inside of loops and branches counts by itself.
        seconds: of each kernel that is no region.
        machine: the devices.
    """
    if not machine.hides:
        return {}
    steps = []
    for kernel in program.kernels:
        kind = KINDS[kernel.equation.name] if kernel.kind == COLLECTIVE else ""
        pairs = kernel.equation.params.get("perm")
        way = None if pairs is None else frozenset((int(a), int(b)) for a, b in pairs)
        steps.append(
            Step(
                seconds.get(kernel, 0.0), kernel.reads, kernel.writes, kind, kernel.kind == PRODUCT, way,
                kernel.kind == REGION,
            )
        )  # fmt: skip
    found = dict(zip(program.kernels, hidden(steps, machine.hides), strict=True))
    for kernel in program.kernels:
        for body in kernel.bodies:
            found.update(hidden_of(body, seconds, machine))
    return {kernel: x for kernel, x in found.items() if x > 0}
