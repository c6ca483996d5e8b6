"""Models epilogues: elementwise work on the result of a product that the compiler fuses into the product.

    relu(x @ w), y + x @ w, y.at[rows].set(x @ w)          one kernel each: no result of the product reaches memory

A compiler with ``Compiler.fuses_epilogues`` fuses it if nothing else reads that result. Other arrays that the epilogue
reads and writes count.
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
from gshard.device.roofline import kernel_roofline


def epilogues(program: Kernels, seconds: Mapping[Kernel, float], machine: Machine) -> dict[Kernel, float]:
    """The kernels that are epilogues of a product, and the seconds of one run that each adds to the product."""
    found: dict[Kernel, float] = {}
    if not machine.compiler.fuses_epilogues:
        return found
    readers = readers_of(program)
    kept = program.results
    for kernel in program.kernels:
        for body in kernel.bodies:
            found.update(epilogues(body, seconds, machine))
        if kernel.kind == PRODUCT:
            found.update(_epilogues_of(kernel, readers, kept, program.home, seconds, machine))
    return found


def _epilogues_of(
    product: Kernel,
    readers: Mapping[Value, list[Kernel]],
    kept: frozenset[Value],
    home: Mapping[Value, Value],
    seconds: Mapping[Kernel, float],
    machine: Machine,
) -> dict[Kernel, float]:
    added: dict[Kernel, float] = {}
    moved, vector, seconds_so_far = product.moved, product.vector_flops, seconds[product]
    last = product
    while len(last.writes) == 1 and last.writes[0] not in kept and len(readers.get(last.writes[0], ())) == 1:
        (result,) = last.writes
        (kernel,) = readers[result]
        if kernel.kind == FUSED and len(kernel.writes) == 1 and _have_equal_sizes(kernel.writes[0], result):
            extra_bytes = kernel.moved - 2 * size(result)
        elif kernel.kind == OPERATOR and _updates(kernel, result, home):
            extra_bytes = 0  # the product writes its result into another array
        else:
            break
        moved, vector = moved + extra_bytes, vector + kernel.vector_flops
        products = product.product_flops
        merged_seconds = kernel_roofline(
            machine, product.equation, products, vector, moved, returns=kernel.starts
        ).seconds
        added[kernel] = min(seconds[kernel], max(0.0, merged_seconds - seconds_so_far))
        seconds_so_far, last = seconds_so_far + added[kernel], kernel
        if kernel.kind == OPERATOR:
            break
    return added


def _have_equal_sizes(a: Value, b: Value) -> bool:
    return math.prod(a.shape) == math.prod(b.shape)


def _updates(kernel: Kernel, value: Value, home: Mapping[Value, Value]) -> bool:
    """Whether a kernel overwrites a window of an array with ``value``."""
    e = kernel.equation
    if e.rule is None or len(e.inputs) < 2 or e.rule.operands[0] != e.rule.results[0] or moves_elements(e.rule):
        return False
    update = e.inputs[1]
    return isinstance(update, Value) and home.get(update, update) is value and not kernel.fused
