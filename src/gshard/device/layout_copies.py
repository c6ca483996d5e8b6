"""Layout copies: the arrays that XLA copies into another memory layout before or after a collective.

Where the network library takes one run of bytes, XLA gives what is gathered or scattered along a dimension a layout in
which that dimension comes first; what an all-to-all exchanges comes part after part. XLA copies an operand in another
layout before the collective, and a result that its reader needs in another one after it: a kernel each. An elementwise
kernel writes and reads any layout, and needs no copy; nor do products where ``Compiler.products_take_layouts``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gshard.comm.collectives import KINDS
from gshard.comm.runs import is_strided, is_turned
from gshard.core.program import Value
from gshard.device.fusion_model import COLLECTIVE, FUSED, PRODUCT, REDUCTION, Kernel, Kernels, readers_of, size
from gshard.device.machine import Machine

_ALONG = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}


def layout_copies(program: Kernels, machine: Machine) -> dict[Kernel, tuple[int, ...]]:
    """The bytes of each array that is copied into another layout, for each collective."""
    writers = {v: k for k in program.kernels for v in k.writes}
    readers = readers_of(program)
    ends = {program.home.get(v, v) for v in program.block.outputs if isinstance(v, Value)}
    found: dict[Kernel, tuple[int, ...]] = {}
    for kernel in program.kernels:
        for body in kernel.bodies:
            found |= layout_copies(body, machine)
        if kernel.kind != COLLECTIVE:
            continue
        operand, (result,) = kernel.equation.inputs[0], kernel.writes[:1]
        assert isinstance(operand, Value)
        before, after = _layouts(kernel, operand, result, machine)
        home = program.home.get(operand, operand)
        writer = writers.get(home)
        any_layout = machine.compiler.products_take_layouts
        writes = {FUSED, REDUCTION, PRODUCT} if any_layout else {FUSED, REDUCTION}
        reads = writes if any_layout else {FUSED}
        spared = writer is not None and writer.kind in writes and readers[home] == [kernel]
        arrays = [size(operand)] if before and not spared else []
        users = readers.get(result, [])
        one = len(users) == 1 or any_layout
        if after and (result in ends or not users or not one or any(k.kind not in reads for k in users)):
            arrays.append(size(result))
        if arrays:
            found[kernel] = tuple(arrays)
    return found


def _layouts(kernel: Kernel, operand: Value, result: Value, machine: Machine) -> tuple[bool, bool]:
    """Whether the operand and the result of a collective are in a layout of its own."""
    params: Mapping[str, Any] = kernel.equation.params
    kind = KINDS[kernel.equation.name]
    if kind == "all_to_all":
        cut, joined = params["split_axis"], params["concat_axis"]
        part = tuple(min(a, b) for a, b in zip(operand.shape, result.shape, strict=True))
        return False, math.prod(operand.shape) > 0 and is_turned(part, cut, joined)
    if kind not in _ALONG or not machine.compiler.copies_for_collectives:
        return False, False
    own = is_strided(operand.shape, params[_ALONG[kind]])
    return own, own
