"""BF16 storage: the values that the TPU compiler stores in bfloat16, or as one byte, between kernels.

Products of float32 run in one bfloat16 pass, so a value that only products read is stored in bfloat16, whatever kernel
writes it, and a collective that only moves it moves half of the bytes. Of a value that is only compared later, the
outcome is stored, one byte an element. A product whose only reader is elementwise is one kernel with it.

    h = x @ w;  y = max(h, 0) @ v;  g = where(h > 0, ...)      h: 4 bytes until y's operand is made, then 1
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax

from gshard.comm.collectives import KINDS
from gshard.core.program import Equation, Value, itemsize
from gshard.core.rule import moves
from gshard.device.fusion_model import COLLECTIVE, FUSED, PRODUCT, Kernel, Kernels, size

_WIDE = "float32"
_BF16, _BOOL = "bfloat16", "bool"
_MOVES = frozenset((monoid, frozenset(operands)) for monoid, operands in moves(0))
_MOVING = ("all_to_all", "collective_permute", "all_gather")


@dataclasses.dataclass(frozen=True, slots=True)
class Narrow:
    """What is kept of a value.

    Attributes:
        whole_until: the last kernel that reads it in float32; before the first one if none does.
        bytes: of what later ones read.
    """

    whole_until: int
    bytes: int


def narrow_forms(program: Kernels) -> dict[Value, Narrow]:
    """What is kept of the float32 values of a block, where that is less than they are."""
    kernels = program.kernels
    leaves = {program.home.get(v, v) for v in program.block.outputs if isinstance(v, Value)}
    readers: dict[Value, list[int]] = {}
    for i, kernel in enumerate(kernels):
        for v in kernel.reads:
            readers.setdefault(v, []).append(i)
    made = {v: i for i, kernel in enumerate(kernels) for v in kernel.writes}
    found: dict[Value, Narrow] = {}
    forms: dict[Value, set[str] | None] = {}  # narrow ones, None where some reader needs float32
    for v in sorted(made, key=lambda v: -made[v]):
        if v in leaves or str(v.dtype) != _WIDE or v not in readers:
            continue
        read_as = [(at, _read_as(kernels[at], v, program.home, forms)) for at in readers[v]]
        whole = max((at for at, form in read_as if form is None), default=-1)
        wanted = {name for at, form in read_as if form is not None and at > whole for name in form}
        forms[v] = wanted if whole < 0 else None
        elements = math.prod(v.shape)
        narrow = sum(itemsize(jax.numpy.dtype(form)) * elements for form in wanted)
        if narrow < size(v) and whole < readers[v][-1]:
            found[v] = Narrow(whole, narrow)
    return found


def _read_as(
    kernel: Kernel, v: Value, home: Mapping[Value, Value], forms: Mapping[Value, set[str] | None]
) -> set[str] | None:
    """The narrow forms in which a kernel can read a value; None if it needs float32."""
    inside = (*kernel.fused, kernel.equation)
    found: set[str] = set()
    pending = [v]
    seen: set[Value] = set()
    while pending:
        x = pending.pop()
        if x in seen:
            continue
        seen.add(x)
        for e in inside:
            if not any(isinstance(y, Value) and home.get(y, y) is x for y in e.inputs):
                continue
            form = _form(e, kernel, forms)
            if form is None:
                return None
            if form:
                found |= form
            else:
                pending += e.outputs
    return found or None


def _form(e: Equation, kernel: Kernel, forms: Mapping[Value, set[str] | None]) -> set[str] | None:
    """The forms in which an equation can read an operand: empty for those of its result, None for float32."""
    if e is kernel.equation:
        if kernel.kind == PRODUCT:
            return {_BF16} if _in_one_pass(e) else None
        if KINDS[e.name] in _MOVING if kernel.kind == COLLECTIVE else _only_moves(e):
            return forms.get(e.outputs[0])
        return None
    if e.rule is not None and all(str(y.dtype) == _BOOL for y in e.outputs) and _compares(e):
        return {_BOOL}
    if _only_moves(e):
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
    """Whether all other operands are numbers, so that the outcome takes the place of the one that is not."""
    return sum(1 for x in e.inputs if isinstance(x, Value) and math.prod(x.shape) > 1) == 1


def _only_moves(e: Equation) -> bool:
    return e.rule is not None and _MOVES.issubset(e.rule.linear)


def joined(program: Kernels) -> list[Kernel]:
    """The kernels, in order; what reads a product element by element is made by it, if nothing else reads that."""
    kernels = list(program.kernels)
    leaves = {program.home.get(v, v) for v in program.block.outputs if isinstance(v, Value)}
    readers: dict[Value, list[int]] = {}
    made: dict[Value, int] = {}
    for i, kernel in enumerate(kernels):
        for v in kernel.reads:
            readers.setdefault(v, []).append(i)
        made.update(dict.fromkeys(kernel.writes, i))
    for i, kernel in enumerate(kernels):
        if kernel.kind != PRODUCT or len(kernel.writes) != 1:
            continue
        (v,) = kernel.writes
        if v in leaves or len(readers.get(v, ())) != 1:
            continue
        (at,) = readers[v]
        reader = kernels[at]
        if reader.kind == FUSED and all(made.get(x, -1) < i for x in reader.reads if x is not v):
            reads = tuple(dict.fromkeys((*kernel.reads, *(x for x in reader.reads if x is not v))))
            kernels[i] = dataclasses.replace(kernel, reads=reads, writes=reader.writes)
            kernels[at] = dataclasses.replace(reader, reads=(), writes=())
    return kernels
