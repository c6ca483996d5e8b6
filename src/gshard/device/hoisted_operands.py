"""Finds hoisted operands: small arrays that XLA computes in a kernel of their own instead of once for each element.

x / x.sum(1, keepdims=True)     1 / sum is a kernel of its own: a division for each row, not for each element
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gshard.core.program import Equation, Value
from gshard.device.fusion_model import COLLECTIVE, REGION, Kernel, Kernels, only_moves, size


def hoisted_operands(program: Kernels) -> dict[Kernel, tuple[int, ...]]:
    """The bytes of the small arrays that each kernel reads, and broadcasts, instead of computing them itself."""
    bytes_of: dict[Kernel, tuple[int, ...]] = {}
    position = {e: i for i, e in enumerate(program.block.equations)}
    known: set[Value] = set()
    for kernel in program.kernels:
        for body in kernel.bodies:
            bytes_of |= hoisted_operands(body)
        if kernel.kind in (COLLECTIVE, REGION) or kernel.spared:  # a merged group shares arrays in registers
            continue
        arrays = [v for v in _expensive_small_arrays(kernel, position) if v not in known]
        known.update(arrays)
        if arrays:
            bytes_of[kernel] = tuple(size(v) for v in arrays)
    return bytes_of


def _expensive_small_arrays(kernel: Kernel, position: Mapping[Equation, int]) -> list[Value]:
    """The small arrays that a kernel broadcasts after an expensive operation on them."""
    hoisted: dict[Value, None] = {}
    slow: set[Value] = set()  # results of expensive operations on small arrays
    repeated: dict[Value, Value] = {}  # for each broadcast value, the smaller array
    for e in sorted((*kernel.fused, kernel.equation), key=lambda e: position.get(e, 0)):
        if e.rule is None or not e.outputs:
            continue
        result, is_hoisted = e.outputs[0], False
        for i, x in enumerate(e.inputs):
            if not isinstance(x, Value):
                continue
            grows = 1 < _elements(x) < _elements(result)
            small = repeated.get(x, x if grows else None)
            if small is not None and (i in e.rule.slow or small in slow):
                hoisted[small] = None
                is_hoisted = True
            elif small is not None and only_moves(e):
                repeated[result] = small
            elif x in slow:
                slow.add(result)
        if e.rule.slow and not is_hoisted:
            slow.add(result)
    return list(hoisted)


def _elements(v: Value) -> int:
    return math.prod(v.shape)
