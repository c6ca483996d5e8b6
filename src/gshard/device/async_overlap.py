"""Models async overlap: the seconds of collectives that pass while a device computes.

A device runs one kernel after another, and its links carry one collective after another. The compiler starts a
collective that it hides (``Compiler.hides``) as soon as its operand is computed, but not before the first kernel that
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
from gshard.comm.steps import PERMUTE
from gshard.core.mesh import Mesh
from gshard.device.fusion_model import COLLECTIVE, PRODUCT, REGION, Kernel, Kernels
from gshard.device.machine import Machine
from gshard.device.machine_kinds import Compiler
from gshard.device.network import goes_one_way


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A step of a device: a kernel or a collective."""

    seconds: float  # of the step alone
    reads: Sequence[Hashable]  # the arrays that it reads, by any hashable names
    writes: Sequence[Hashable]  # the arrays that it writes
    kind: str = ""  # the kind of collective; empty for a kernel
    product: bool = False  # whether it is a product
    # for a permutation that uses no link in both directions, its pairs of sender and receiver. The reverse permutation
    # runs at the same time.
    way: frozenset[tuple[int, int]] | None = None
    region: bool = False  # whether it is a loop or a branch. No collective is in flight around it.


def overlapped(steps: Sequence[Step], compiler: Compiler) -> list[float]:
    """The seconds of each step in which other steps run."""
    hides = compiler.hides or ()
    in_flight: collections.deque[int] = collections.deque()
    left = [s.seconds if s.kind in hides else 0.0 for s in steps]
    hidden = list(left)
    starts = _starts(steps, hides)
    step_that_writes = {v: i for i, s in enumerate(steps) if s.kind in hides for v in s.writes}

    def wait(until: int) -> None:
        while in_flight and until in in_flight:
            group = _running(in_flight, steps)
            longest, total = max(left[i] for i in group), sum(left[i] for i in group)
            for i in group:
                hidden[i] -= longest * left[i] / total if total else 0.0
                left[i] = 0.0
                in_flight.popleft()

    for k, step in enumerate(steps):
        in_flight.extend(starts[k])
        if step.kind in hides:
            continue
        for v in step.reads:
            if v in step_that_writes:
                wait(step_that_writes[v])
        if step.kind or step.region:
            while in_flight:
                wait(in_flight[0])
            continue
        seconds_left = step.seconds
        while in_flight and seconds_left > 0:
            group = _running(in_flight, steps)
            if not step.product and steps[group[0]].kind in compiler.hides_beside_products:
                break
            elapsed = min(seconds_left, max(left[i] for i in group))
            seconds_left -= elapsed
            for i in group:
                left[i] = max(0.0, left[i] - elapsed)
            if all(left[i] == 0.0 for i in group):
                for _ in group:
                    in_flight.popleft()
    while in_flight:
        wait(in_flight[0])
    return hidden


def _starts(steps: Sequence[Step], hides: Sequence[str]) -> list[list[int]]:
    """For each step, the collectives that start before it. A step without seconds ends when its operands exist."""
    ready: dict[Hashable, int] = {}
    read = {v: k for k, s in reversed(list(enumerate(steps))) for v in s.reads}
    starts: list[list[int]] = [[] for _ in steps]
    earliest = 0
    for i, step in enumerate(steps):
        position = max((ready.get(v, 0) for v in step.reads), default=0)
        is_instant = not (step.kind or step.region or step.seconds)
        ready.update(dict.fromkeys(step.writes, position if is_instant else i + 1))
        if step.kind in hides:
            position = min(i, max(position, earliest))
            starts[position].append(i)
            earliest = max(position, min((read.get(v, i) for v in step.writes), default=i))
    return starts


def _running(in_flight: Sequence[int], steps: Sequence[Step]) -> list[int]:
    """The collectives that run now: the first, and a reverse permutation directly after it."""
    first = in_flight[0]
    way = steps[first].way
    if way is not None and len(in_flight) > 1 and steps[in_flight[1]].way == frozenset((b, a) for a, b in way):
        return [first, in_flight[1]]
    return [first]


def overlapped_of(
    program: Kernels, seconds: Mapping[Kernel, float], mesh: Mesh, machine: Machine
) -> dict[Kernel, float]:
    """For each kernel of a program, the seconds of one run in which other kernels run; without zeros."""
    if not machine.compiler.hides:
        return {}
    steps = []
    for kernel in program.kernels:
        kind = KINDS[kernel.equation.name] if kernel.kind == COLLECTIVE else ""
        way = _way(kernel.equation.params["perm"], mesh, machine) if kind == PERMUTE else None
        is_product, is_region = kernel.kind == PRODUCT, kernel.kind == REGION
        steps.append(Step(seconds.get(kernel, 0.0), kernel.reads, kernel.writes, kind, is_product, way, is_region))
    hidden = dict(zip(program.kernels, overlapped(steps, machine.compiler), strict=True))
    for kernel in program.kernels:
        for body in kernel.bodies:
            hidden.update(overlapped_of(body, seconds, mesh, machine))
    return {kernel: seconds_hidden for kernel, seconds_hidden in hidden.items() if seconds_hidden > 0}


def _way(perm: Sequence[tuple[int, int]], mesh: Mesh, machine: Machine) -> frozenset[tuple[int, int]] | None:
    """A permutation of all positions of the mesh, if it uses no link in both directions; otherwise None."""
    devices = np.asarray(mesh.order or range(mesh.size), np.intp)
    sources, targets = devices[np.asarray(perm, np.intp).reshape(-1, 2).T]
    return frozenset((int(a), int(b)) for a, b in perm) if goes_one_way(sources, targets, machine) else None
