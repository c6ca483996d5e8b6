"""Computes gather stalls: the seconds for which the products of a plan wait for their gathered operands.

The compiler overlaps some collectives with the products before them (``Compiler.hides``). This module takes the
equations of a plan in order and prices products by their roofline; other equations take no time, so nothing overlaps
with them. If several equations read a gathered operand, the first one waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from gshard.comm.reshard import plan_reshard
from gshard.comm.steps import LOCAL, PERMUTE
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Block, Equation, Value, itemsize
from gshard.core.sharding import Sharding
from gshard.core.split import operand_sharding, parts, result_sharding
from gshard.device.async_overlap import Step, overlapped
from gshard.device.fusion_model import is_product
from gshard.device.machine import Machine
from gshard.device.network import seconds
from gshard.device.roofline import kernel_roofline


def gather_stalls(plan: Plan, machine: Machine) -> dict[tuple[Equation, int], float]:
    """For each equation and operand index, the seconds for which the equation waits for that operand."""
    found: dict[tuple[Equation, int], float] = {}
    for block in (plan.program.block, *(body for e in plan.program.block.walk() for body in e.blocks)):
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
        step_seconds = seconds(step.kind, bytes_of(v, step.before, mesh), mesh, machine, step.atoms)
        arrives = (v, step.after), (v, target)  # local steps after it take no time
        steps.append(Step(step_seconds, (read,), arrives, step.kind))
        read = (v, step.after)
    return steps


def product_seconds(e: Equation, plan: Plan, machine: Machine) -> float:
    """Seconds of one run of a product on one device, without waiting for its operands."""
    assert e.rule is not None
    products = e.rule.flops / parts(plan.splits[e], plan.mesh)
    returns = not {*e.outputs}.isdisjoint(plan.program.block.outputs)
    return kernel_roofline(machine, e, products, moved=sum(local_sizes(e, plan)), returns=returns).seconds


def local_sizes(e: Equation, plan: Plan) -> list[int]:
    """Bytes of one device's parts of the operands, then of the results."""
    assert e.rule is not None
    split, mesh = plan.splits[e], plan.mesh
    operands = [bytes_of(v, operand_sharding(e.rule, i, split), mesh) for i, v in enumerate(e.inputs)]
    return operands + [bytes_of(v, result_sharding(e.rule, i, split), mesh) for i, v in enumerate(e.outputs)]


def bytes_of(v: Any, sharding: Sharding, mesh: Mesh) -> int:
    """Bytes of one device's part of a value, or of a whole constant."""
    shape = sharding.local_shape(mesh, v.shape) if isinstance(v, Value) else v.shape
    return math.prod(shape) * itemsize(v.dtype)
