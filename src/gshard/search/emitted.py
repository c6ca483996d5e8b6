"""Emitted: what it takes more where an equation runs on shards in a way of its own.

A halo that is fetched, a look-up in a part of a table, masks around what is padded: how much of that there is only the
rule knows, and the rest of what is emitted for it. So the equation is partitioned alone and priced, as a program is.
"""

from __future__ import annotations

import dataclasses

from gshard.analysis.cost import kernel_cost
from gshard.analysis.machine import Machine
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Block, Equation, Program, Value
from gshard.core.rule import PARALLEL, Rule
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.passes.device_program import Kernel, device_program, kind_of
from gshard.passes.partition import partition


def has_own_way(rule: Rule, split: Split) -> bool:
    """Whether an equation does something else on shards than the same on smaller arrays."""
    if rule.fixed is not None or (rule.local is None and rule.sends is None):
        return False
    return any(f >= 0 and atoms and rule.factors[f].kind != PARALLEL for f, atoms in split.items())


def seconds_alone(e: Equation, split: Split, mesh: Mesh, machine: Machine) -> float:
    """Seconds of one run of an equation, all that is emitted for it, its operands being where the split wants them."""
    plan = _alone(e, split, mesh)
    lies = {i: plan.shardings[v] for i, v in enumerate(plan.program.block.inputs)}
    program = device_program(partition(plan, lies, keep_uneven=True))
    return sum(kernel_cost(kernel, times, mesh, machine).total_seconds for kernel, times in program.walk())


def as_kernel(e: Equation) -> Kernel:
    """An equation as a kernel that reads and writes nothing but its own operands and results."""
    reads = tuple(dict.fromkeys(v for v in e.inputs if isinstance(v, Value)))
    return Kernel(e, kind_of(e), (), reads, e.outputs)


def _alone(e: Equation, split: Split, mesh: Mesh) -> Plan:
    """The plan of a program of nothing else."""
    rule = e.rule
    assert rule is not None
    inputs = [dataclasses.replace(v) if isinstance(v, Value) else v for v in e.inputs]
    outputs = [dataclasses.replace(v) for v in e.outputs]
    alone = dataclasses.replace(e, inputs=tuple(inputs), outputs=tuple(outputs))
    shardings = {v: operand_sharding(rule, i, split) for i, v in enumerate(inputs) if isinstance(v, Value)}
    values = tuple(shardings)
    shardings |= {v: result_sharding(rule, i, split) for i, v in enumerate(outputs)}
    block = Block(values, (alone,), tuple(outputs))
    program = Program(block, (), (None,) * len(values), tuple(f"operand {i}" for i in range(len(values))), None)
    return Plan(program, mesh, shardings, {alone: split}, {})
