"""Models async overlap: the seconds of collectives that pass while a device computes, and those in which it waits."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gshard.comm.reshard import plan_reshard
from gshard.comm.steps import KINDS, LOCAL, PERMUTE
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan, local_bytes
from gshard.core.program import Block, Equation, Value, itemsize
from gshard.core.rule import operand_sharding, parts, result_sharding
from gshard.core.sharding import Sharding
from gshard.device.fusion_model import COLLECTIVE, PRODUCT, REGION, Kernel, Kernels, is_product
from gshard.device.machine import Compiler, Machine
from gshard.device.network import goes_one_way, seconds
from gshard.device.roofline import kernel_roofline


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


class Timed(NamedTuple):
    """Steps in time."""

    begins: list[float]  # when each step begins, in seconds; a collective, when it gets the network
    hidden: list[float]  # of each collective, the seconds in which other steps run
    seconds: float  # of all steps


def overlapped(steps: Sequence[Step], compiler: Compiler) -> list[float]:
    """The seconds of each step in which other steps run, if a compiler orders them."""
    hides = compiler.hides or ()
    return timed(steps, _starts(steps, hides), compiler.hides_beside_products).hidden


def timed(steps: Sequence[Step], starts: Sequence[Sequence[int]], beside_products: Sequence[str] = ()) -> Timed:
    """Runs steps in order.

    Collectives of ``starts[k]`` start before step ``k``; they use the network one after the other, and the first step
    that reads a result waits for it. Kinds of ``beside_products`` proceed while products run, and while a step waits.
    """
    in_flight: collections.deque[int] = collections.deque()
    asynchronous = {i for together in starts for i in together}
    left = [step.seconds if i in asynchronous else 0.0 for i, step in enumerate(steps)]
    hidden, begins = list(left), [0.0] * len(steps)
    step_that_writes = {v: i for i in sorted(asynchronous) for v in steps[i].writes}
    now = network_free = 0.0

    def wait(until: int) -> None:
        nonlocal now
        while in_flight and until in in_flight:
            group = _running(in_flight, steps)
            longest, total = max(left[i] for i in group), sum(left[i] for i in group)
            now += longest
            for i in group:
                hidden[i] -= longest * left[i] / total if total else 0.0
                left[i] = 0.0
                in_flight.popleft()

    for k, step in enumerate(steps):
        for i in starts[k]:
            begins[i] = max(now, network_free)
            network_free = begins[i] + steps[i].seconds
            in_flight.append(i)
        if k in asynchronous:
            continue
        for v in step.reads:
            if v in step_that_writes:
                wait(step_that_writes[v])
        if step.kind or step.region:
            while in_flight:
                wait(in_flight[0])
        begins[k] = now
        now += step.seconds
        seconds_left = step.seconds
        while in_flight and seconds_left > 0:
            group = _running(in_flight, steps)
            if not step.product and steps[group[0]].kind in beside_products:
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
    return Timed(begins, hidden, now)


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


# Computes gather stalls: the seconds for which the products of a plan wait for their gathered operands.


def gather_stalls(plan: Plan, machine: Machine) -> dict[tuple[Equation, int], float]:
    """For each equation and operand index, the seconds for which the equation waits for that operand."""
    found: dict[tuple[Equation, int], float] = {}
    for block in plan.program.block.blocks():
        found.update(_of_block(block, plan, machine))
    return found


def _of_block(block: Block, plan: Plan, machine: Machine) -> dict[tuple[Equation, int], float]:
    steps: list[Step] = []
    steps_of: dict[tuple[Equation, int], list[int]] = {}
    present: set[Hashable] = set()
    for e in block.equations:
        if e.rule is None:
            steps.append(Step(0.0, e.inputs, e.outputs, region=True))
            continue
        reads: list[Hashable] = []
        for i, v in enumerate(e.inputs):
            if not isinstance(v, Value):
                continue
            target = operand_sharding(e.rule, i, plan.splits[e])
            if (v, target) not in present:
                reshards = _moves(v, target, plan, machine)
                steps_of[e, i] = list(range(len(steps), len(steps) + len(reshards)))
                steps += reshards
                present.add((v, target))
            reads += [v, (v, target)]
        multiplies = is_product(e.rule)
        steps.append(
            Step(product_seconds(e, plan, machine) if multiplies else 0.0, reads, e.outputs, product=multiplies)
        )
    hidden = overlapped(steps, machine.compiler)
    return {key: sum(steps[k].seconds - hidden[k] for k in indices) for key, indices in steps_of.items() if indices}


def _moves(v: Value, target: Sharding, plan: Plan, machine: Machine) -> list[Step]:
    """The collectives that reshard a value."""
    mesh, source = plan.mesh, plan.sharding(v)
    steps: list[Step] = []
    read: Hashable = v
    for step in plan_reshard(source, target, v.shape, itemsize(v.dtype), mesh):
        if step.kind in LOCAL or step.kind == PERMUTE:
            continue
        step_seconds = seconds(step.kind, local_bytes(v, step.before, mesh), mesh, machine, step.atoms)
        arrives = (v, step.after), (v, target)  # local steps after it take no time
        steps.append(Step(step_seconds, (read,), arrives, step.kind))
        read = (v, step.after)
    return steps


def product_seconds(e: Equation, plan: Plan, machine: Machine) -> float:
    """Seconds of one run of a product on one device, without waiting for its operands."""
    products = e.operator_rule.flops / parts(plan.splits[e], plan.mesh)
    returns = not {*e.outputs}.isdisjoint(plan.program.block.outputs)
    return kernel_roofline(machine, e, products, moved=sum(local_sizes(e, plan)), returns=returns).seconds


def local_sizes(e: Equation, plan: Plan) -> list[int]:
    """Bytes of one device's parts of the operands, then of the results."""
    split, mesh = plan.splits[e], plan.mesh
    operands = [(v, operand_sharding(e.operator_rule, i, split)) for i, v in enumerate(e.inputs)]
    results = [(v, result_sharding(e.operator_rule, i, split)) for i, v in enumerate(e.outputs)]
    return [local_bytes(v, sharding, mesh) for v, sharding in (*operands, *results)]
