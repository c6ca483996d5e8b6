"""Models layout copies: the arrays that XLA copies into another memory layout before or after a collective.

If the network library takes one run of bytes, XLA gives an array that is gathered or scattered along a dimension a
layout with that dimension first; the parts of an all-to-all stand one after the other. XLA copies an operand in another
layout before the collective, and a result whose reader needs another layout after it, each in a kernel. Elementwise
kernels read and write any layout and need no copy; nor do products with ``Compiler.products_take_layouts``.
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
    """For each collective, the bytes of the arrays that are copied into another layout."""
    writers = {v: k for k in program.kernels for v in k.writes}
    readers = readers_of(program)
    results = program.results
    copies: dict[Kernel, tuple[int, ...]] = {}
    for kernel in program.kernels:
        for body in kernel.bodies:
            copies |= layout_copies(body, machine)
        if kernel.kind != COLLECTIVE:
            continue
        operand, (result,) = kernel.equation.inputs[0], kernel.writes[:1]
        assert isinstance(operand, Value)
        before, after = _layouts(kernel, operand, result, machine)
        home = program.home.get(operand, operand)
        writer = writers.get(home)
        any_layout = machine.compiler.products_take_layouts
        writing_kinds = {FUSED, REDUCTION, PRODUCT} if any_layout else {FUSED, REDUCTION}
        reading_kinds = writing_kinds if any_layout else {FUSED}
        is_free = writer is not None and writer.kind in writing_kinds and readers[home] == [kernel]
        arrays = [size(operand)] if before and not is_free else []
        users = readers.get(result, [])
        shares_layout = len(users) == 1 or any_layout
        if after and (
            result in results or not users or not shares_layout or any(k.kind not in reading_kinds for k in users)
        ):
            arrays.append(size(result))
        if arrays:
            copies[kernel] = tuple(arrays)
    return copies


def _layouts(kernel: Kernel, operand: Value, result: Value, machine: Machine) -> tuple[bool, bool]:
    """Whether a collective needs its operand, and makes its result, in a layout of its own."""
    params: Mapping[str, Any] = kernel.equation.params
    kind = KINDS[kernel.equation.name]
    if "split_axis" in params:
        cut, joined = params["split_axis"], params["concat_axis"]
        part = tuple(min(a, b) for a, b in zip(operand.shape, result.shape, strict=True))
        return False, math.prod(operand.shape) > 0 and is_turned(part, cut, joined)
    if kind not in _ALONG or not machine.compiler.copies_for_collectives:
        return False, False
    needs_own_layout = is_strided(operand.shape, params[_ALONG[kind]])
    return needs_own_layout, needs_own_layout
