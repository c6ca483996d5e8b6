"""Models the values that the TPU compiler stores in bfloat16, or as one byte, between kernels.

Products of float32 run in one bfloat16 pass. So a value that only products read is stored in bfloat16, whatever kernel
writes it, and a collective that only moves it moves half of the bytes. If a value is later only compared, the outcome
is stored, one byte an element. A product whose only reader is elementwise is one kernel with it.

    h = x @ w;  y = max(h, 0) @ v;  g = where(h > 0, ...)      h: 4 bytes until y's operand is made, then 1
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax

from gshard.comm.collectives import KINDS
from gshard.core.program import Equation, Value, itemsize
from gshard.device.fusion_model import COLLECTIVE, FUSED, PRODUCT, Kernel, Kernels, only_moves, size

_WIDE = "float32"
_BF16, _BOOL = "bfloat16", "bool"
_MOVING = ("all_to_all", "collective_permute", "all_gather")


@dataclasses.dataclass(frozen=True, slots=True)
class Narrow:
    """The narrow form in which a value is stored."""

    whole_until: int  # the index of the last kernel that reads the value in float32; -1 if none does
    bytes: int  # the bytes that later kernels read


def narrow_forms(program: Kernels) -> dict[Value, Narrow]:
    """The narrow forms of the float32 values of a block that have smaller ones."""
    kernels = program.kernels
    results = program.results
    readers: dict[Value, list[int]] = {}
    for i, kernel in enumerate(kernels):
        for v in kernel.reads:
            readers.setdefault(v, []).append(i)
    written_at = {v: i for i, kernel in enumerate(kernels) for v in kernel.writes}
    narrow: dict[Value, Narrow] = {}
    types_of: dict[Value, set[str] | None] = {}  # narrow forms; None if some reader needs float32
    for v in sorted(written_at, key=lambda v: -written_at[v]):
        if v in results or str(v.dtype) != _WIDE or v not in readers:
            continue
        read_as = [(at, _read_as(kernels[at], v, program.home, types_of)) for at in readers[v]]
        last_whole_read = max((at for at, form in read_as if form is None), default=-1)
        types = {name for at, form in read_as if form is not None and at > last_whole_read for name in form}
        types_of[v] = types if last_whole_read < 0 else None
        elements = math.prod(v.shape)
        narrow_bytes = sum(itemsize(jax.numpy.dtype(form)) * elements for form in types)
        if narrow_bytes < size(v) and last_whole_read < readers[v][-1]:
            narrow[v] = Narrow(last_whole_read, narrow_bytes)
    return narrow


def _read_as(
    kernel: Kernel, v: Value, home: Mapping[Value, Value], forms: Mapping[Value, set[str] | None]
) -> set[str] | None:
    """The narrow types in which a kernel can read a value; None if it needs float32."""
    equations = (*kernel.fused, kernel.equation)
    types: set[str] = set()
    pending = [v]
    seen: set[Value] = set()
    while pending:
        x = pending.pop()
        if x in seen:
            continue
        seen.add(x)
        for e in equations:
            if not any(isinstance(y, Value) and home.get(y, y) is x for y in e.inputs):
                continue
            form = _form(e, kernel, forms)
            if form is None:
                return None
            if form:
                types |= form
            else:
                pending += e.outputs
    return types or None


def _form(e: Equation, kernel: Kernel, forms: Mapping[Value, set[str] | None]) -> set[str] | None:
    """The types in which an equation can read an operand: empty for those of its result, None for float32."""
    if e is kernel.equation:
        if kernel.kind == PRODUCT:
            return {_BF16} if _in_one_pass(e) else None
        if KINDS[e.name] in _MOVING if kernel.kind == COLLECTIVE else only_moves(e):
            return forms.get(e.outputs[0])
        return None
    if e.rule is not None and all(str(y.dtype) == _BOOL for y in e.outputs) and _compares(e):
        return {_BOOL}
    if only_moves(e):
        return set()
    if len(e.inputs) == 1 and itemsize(e.outputs[0].dtype) < 4:
        return {str(e.outputs[0].dtype)}
    return None


def _in_one_pass(e: Equation) -> bool:
    """Whether a product runs in bfloat16: at JAX's default precision."""
    precision = e.params.get("precision")
    every = precision if isinstance(precision, tuple) else (precision,)
    return all(p is None or p == jax.lax.Precision.DEFAULT for p in every)


def _compares(e: Equation) -> bool:
    """Whether all other operands are scalars, so that the outcome can replace the operand."""
    return sum(1 for x in e.inputs if isinstance(x, Value) and math.prod(x.shape) > 1) == 1


def joined(program: Kernels) -> list[Kernel]:
    """The kernels in order, with an elementwise kernel merged into a product if it is the only reader of it."""
    kernels = list(program.kernels)
    results = program.results
    readers: dict[Value, list[int]] = {}
    written_at: dict[Value, int] = {}
    for i, kernel in enumerate(kernels):
        for v in kernel.reads:
            readers.setdefault(v, []).append(i)
        written_at.update(dict.fromkeys(kernel.writes, i))
    for i, kernel in enumerate(kernels):
        if kernel.kind != PRODUCT or len(kernel.writes) != 1:
            continue
        (v,) = kernel.writes
        if v in results or len(readers.get(v, ())) != 1:
            continue
        (reader_index,) = readers[v]
        reader = kernels[reader_index]
        if reader.kind == FUSED and all(written_at.get(x, -1) < i for x in reader.reads if x is not v):
            reads = tuple(dict.fromkeys((*kernel.reads, *(x for x in reader.reads if x is not v))))
            kernels[i] = dataclasses.replace(kernel, reads=reads, writes=reader.writes)
            kernels[reader_index] = dataclasses.replace(reader, reads=(), writes=())
    return kernels
