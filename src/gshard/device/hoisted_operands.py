"""Hoisted operands: small arrays that XLA computes in a kernel of their own instead of once for each element.

x / x.sum(1, keepdims=True)     1 / sum is a kernel of its own: a division for each row, not for each element
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gshard.core.program import Equation, Value
from gshard.core.rule import moves
from gshard.device.fusion_model import COLLECTIVE, REGION, Kernel, Kernels, size

_MOVES = frozenset((monoid, frozenset(operands)) for monoid, operands in moves(0))


def hoisted_operands(program: Kernels) -> dict[Kernel, tuple[int, ...]]:
    """The bytes of the small arrays that each kernel reads, and broadcasts, instead of computing them itself."""
    found: dict[Kernel, tuple[int, ...]] = {}
    position = {e: i for i, e in enumerate(program.block.equations)}
    known: set[Value] = set()
    for kernel in program.kernels:
        for body in kernel.bodies:
            found |= hoisted_operands(body)
        if kernel.kind in (COLLECTIVE, REGION) or kernel.spared:  # what a group shares is in registers
            continue
        apart = [v for v in _apart(kernel, position) if v not in known]
        known.update(apart)
        if apart:
            found[kernel] = tuple(size(v) for v in apart)
    return found


def _apart(kernel: Kernel, position: Mapping[Equation, int]) -> list[Value]:
    """The small arrays that a kernel broadcasts after an expensive operation on them."""
    found: dict[Value, None] = {}
    slow: set[Value] = set()  # what was computed of a small array, and takes long
    repeated: dict[Value, Value] = {}  # the smaller array that a value broadcasts
    for e in sorted((*kernel.fused, kernel.equation), key=lambda e: position.get(e, 0)):
        if e.rule is None or not e.outputs:
            continue
        made, hoists = e.outputs[0], False
        for i, x in enumerate(e.inputs):
            if not isinstance(x, Value):
                continue
            grows = 1 < _elements(x) < _elements(made)
            small = repeated.get(x, x if grows else None)
            if small is not None and (i in e.rule.slow or small in slow):
                found[small] = None
                hoists = True
            elif small is not None and _MOVES.issubset(e.rule.linear):
                repeated[made] = small
            elif x in slow:
                slow.add(made)
        if e.rule.slow and not hoists:
            slow.add(made)
    return list(found)


def _elements(v: Value) -> int:
    return math.prod(v.shape)
