"""Epilogues: elementwise work on the result of a product that the compiler makes part of the product.

    relu(x @ w), y + x @ w, y.at[rows].set(x @ w)          one kernel each: no result of the product reaches memory

A compiler with ``Compiler.fuses_epilogues`` does so where nothing else reads that result. What the epilogue reads and
writes besides counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gshard.core.program import Value
from gshard.device.fusion_model import (
    FUSED,
    OPERATOR,
    PRODUCT,
    Kernel,
    Kernels,
    moves_elements,
    readers_of,
    size,
)
from gshard.device.machine import Machine
from gshard.device.roofline import dtype_of, roofline


def epilogues(program: Kernels, seconds: Mapping[Kernel, float], machine: Machine) -> dict[Kernel, float]:
    """The kernels that are epilogues of a product, and the seconds of one run that each adds to the product.

    Args:
        program: a block, and what is inside of its loops and branches.
        seconds: of each kernel alone.
        machine: the devices.
    """
    found: dict[Kernel, float] = {}
    if not machine.compiler.fuses_epilogues:
        return found
    readers = readers_of(program)
    kept = {program.home.get(v, v) for v in program.block.outputs if isinstance(v, Value)}
    for kernel in program.kernels:
        for body in kernel.bodies:
            found.update(epilogues(body, seconds, machine))
        if kernel.kind == PRODUCT:
            found.update(_after(kernel, readers, kept, program.home, seconds, machine))
    return found


def _after(
    product: Kernel,
    readers: Mapping[Value, list[Kernel]],
    kept: set[Value],
    home: Mapping[Value, Value],
    seconds: Mapping[Kernel, float],
    machine: Machine,
) -> dict[Kernel, float]:
    found: dict[Kernel, float] = {}
    moved, vector, taken = product.moved, product.vector_flops, seconds[product]
    last = product
    while len(last.writes) == 1 and last.writes[0] not in kept and len(readers.get(last.writes[0], ())) == 1:
        (made,) = last.writes
        (kernel,) = readers[made]
        if kernel.kind == FUSED and len(kernel.writes) == 1 and _as_many(kernel.writes[0], made):
            more = kernel.moved - 2 * size(made)
        elif kernel.kind == OPERATOR and _updates(kernel, made, home):
            more = 0  # what was to be written by the product is written into another array
        else:
            break
        moved, vector = moved + more, vector + kernel.vector_flops
        both = roofline(
            machine, dtype_of(product.equation), product.product_flops, vector, moved, returns=kernel.starts
        )
        longest = both.seconds
        found[kernel] = min(seconds[kernel], max(0.0, longest - taken))
        taken, last = taken + found[kernel], kernel
        if kernel.kind == OPERATOR:
            break
    return found


def _as_many(a: Value, b: Value) -> bool:
    return math.prod(a.shape) == math.prod(b.shape)


def _updates(kernel: Kernel, made: Value, home: Mapping[Value, Value]) -> bool:
    """Whether a window of an array is overwritten with what was made."""
    e = kernel.equation
    if e.rule is None or len(e.inputs) < 2 or e.rule.operands[0] != e.rule.results[0] or moves_elements(e.rule):
        return False
    update = e.inputs[1]
    return isinstance(update, Value) and home.get(update, update) is made and not kernel.fused
