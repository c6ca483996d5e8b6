"""Async overlap: the seconds of collectives that pass while a device computes.

A device runs one kernel after another, and its links carry one collective after another. The compiler starts a
collective that it hides (``Compiler.hides``) as soon as its operand is there, but not before the first kernel that
reads the result of the previous collective: it fetches one array ahead, not all. The first reader waits for the rest.
All other collectives run alone.

    gather w1, x @ w1, gather w2, y @ w2         the second gather passes while x @ w1 is computed

Some collectives overlap with products only (``Compiler.hides_beside_products``), others with any kernel.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from gshard.comm.collectives import KINDS
from gshard.core.mesh import Mesh
from gshard.device.fusion_model import COLLECTIVE, PRODUCT, REGION, Kernel, Kernels
from gshard.device.machine import Machine
from gshard.device.machine_kinds import PERMUTE, Compiler
from gshard.device.network import goes_one_way


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What a device does next: a kernel or a collective.

    Attributes:
        seconds: of it alone.
        reads, writes: arrays, under any names.
        kind: of the collective; empty for a kernel.
        product: whether it is one.
        way: of a permutation that uses no link in both directions, who sends to whom: the same the other way round
            passes at the same time.
        region: whether it is a loop or a branch, around which nothing is under way.
    """

    seconds: float
    reads: Sequence[Hashable]
    writes: Sequence[Hashable]
    kind: str = ""
    product: bool = False
    way: frozenset[tuple[int, int]] | None = None
    region: bool = False


def overlapped(steps: Sequence[Step], compiler: Compiler) -> list[float]:
    """Seconds of each step that pass while others run.

    Args:
        steps: what a device does, in order.
        compiler: tells which collectives it begins early, and beside what.
    """
    hides = compiler.hides or ()
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
            if not step.product and steps[group[0]].kind in compiler.hides_beside_products:
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
    """For each step the collectives that begin before it; what takes no time is done as soon as it can be."""
    ready: dict[Hashable, int] = {}
    read = {v: k for k, s in reversed(list(enumerate(steps))) for v in s.reads}
    found: list[list[int]] = [[] for _ in steps]
    earliest = 0
    for i, step in enumerate(steps):
        at = max((ready.get(v, 0) for v in step.reads), default=0)
        free = not (step.kind or step.region or step.seconds)
        ready.update(dict.fromkeys(step.writes, at if free else i + 1))
        if step.kind in hides:
            at = min(i, max(at, earliest))
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


def overlapped_of(
    program: Kernels, seconds: Mapping[Kernel, float], mesh: Mesh, machine: Machine
) -> dict[Kernel, float]:
    """For the kernels of a program, in one run, the seconds of each that pass while others run.

    Args:
        program: a block; what is inside of loops and branches counts by itself.
        seconds: of each kernel that is no region.
        mesh, machine: the devices.
    """
    if not machine.compiler.hides:
        return {}
    steps = []
    for kernel in program.kernels:
        kind = KINDS[kernel.equation.name] if kernel.kind == COLLECTIVE else ""
        way = _way(kernel.equation.params["perm"], mesh, machine) if kind == PERMUTE else None
        product, region = kernel.kind == PRODUCT, kernel.kind == REGION
        steps.append(Step(seconds.get(kernel, 0.0), kernel.reads, kernel.writes, kind, product, way, region))
    found = dict(zip(program.kernels, overlapped(steps, machine.compiler), strict=True))
    for kernel in program.kernels:
        for body in kernel.bodies:
            found.update(overlapped_of(body, seconds, mesh, machine))
    return {kernel: x for kernel, x in found.items() if x > 0}


def _way(perm: Sequence[tuple[int, int]], mesh: Mesh, machine: Machine) -> frozenset[tuple[int, int]] | None:
    """A permutation of all positions of the mesh, if it uses no link in both directions."""
    devices = np.asarray(mesh.order or range(mesh.size), np.intp)
    sources, targets = devices[np.asarray(perm, np.intp).reshape(-1, 2).T]
    return frozenset((int(a), int(b)) for a, b in perm) if goes_one_way(sources, targets, machine) else None
