"""Stacks the values before a loop's final widening conversion, and widens the stack after the loop.

    ys = scan(x -> f32(g(x)) stacked); p - ys   ->   ys = scan(x -> g(x) stacked); p - f32(ys)

Gradients of float32 weights that are used in bfloat16 have this form. The same numbers take half the memory, and the
widening is fused into the readers of the stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Block, Constant, Equation, Value, itemsize
from gshard.device.fusion_model import FUSED, REGION, kind_of, size
from gshard.language.region import with_edges
from gshard.language.registry import Call, rule_of
from gshard.remat.liveness import Liveness
from gshard.remat.straight_line import without_dead_code


@dataclasses.dataclass(frozen=True, eq=False)
class LowPrecision:
    """Stacks of one loop that can have lower precision."""

    writer: Equation  # the loop
    values: tuple[Value, ...]  # the stacks
    freed: int  # bytes that this saves
    seconds: float = 0.0  # 0, because nothing is computed twice


def low_precision_over(liveness: Liveness, peak: int, elsewhere: frozenset[Value]) -> list[LowPrecision]:
    """The stacks that are alive at a kernel, or written by it, and can have lower precision."""
    found = []
    for i, kernel in enumerate(liveness.kernels.kernels[: peak + 1]):
        e = kernel.equation
        if kernel.kind != REGION or len(kernel.bodies) != 1 or e.trip_count < 2 or "reverse" not in e.params:
            continue
        body = e.blocks[0]
        producer = {v: inner for inner in body.equations for v in inner.outputs}
        carry = scan_counts(e.params)[1]
        for v, x in zip(e.outputs[carry:], body.outputs[carry:], strict=True):
            if v in liveness.ends or v in elsewhere or not i <= peak <= liveness.last.get(v, -1):
                continue
            if isinstance(x, Value) and x in producer and (source := _widened_operand(producer[x])) is not None:
                users = (liveness.kernels.kernels[j].kind for j in liveness.users[v])
                if all(kind != REGION for kind in users):
                    wide, thin = itemsize(v.dtype), itemsize(source.dtype)
                    found.append(LowPrecision(e, (v,), size(v) * (wide - thin) // wide))
    return found


def _widened_operand(e: Equation) -> Value | None:
    """The operand of an equation that only widens elements; None for other equations."""
    if len(e.inputs) != 1 or isinstance(e.inputs[0], Constant) or kind_of(e) != FUSED or e.rule is None:
        return None
    x, y = e.inputs[0], e.outputs[0]
    assert isinstance(x, Value), "constants return above"
    same = e.rule.operands[0] == e.rule.results[0] and x.shape == y.shape
    return x if same and itemsize(x.dtype) < itemsize(y.dtype) else None


def with_low_precision_stacks(liveness: Liveness, found: LowPrecision, names: Iterator[int]) -> Block:
    """The block with the stacks widened after the loop."""
    writer, block = found.writer, liveness.kernels.block
    body = writer.blocks[0]
    producer = {v: e for e in body.equations for v in e.outputs}
    outputs, body_outputs, widenings = [], [], []
    for v, x in zip(writer.outputs, body.outputs, strict=True):
        if v not in found.values:
            outputs.append(v)
            body_outputs.append(x)
            continue
        assert isinstance(x, Value), "a constant is not widened"
        e = producer[x]
        (source,) = e.inputs
        stack = Value(v.shape, source.dtype, next(names))
        call = Call(e.name, e.params, (v.shape,), (v.shape,), (source.dtype,), e.primitive)
        widenings.append(dataclasses.replace(e, inputs=(stack,), outputs=(v,), rule=rule_of(call, e.source_info)))
        outputs.append(stack)
        body_outputs.append(source)
    loop = without_dead_code(Block(body.inputs, body.equations, tuple(body_outputs)))
    changed = with_edges(dataclasses.replace(writer, outputs=tuple(outputs), blocks=(loop,)))
    equations: list[Equation] = []
    for e in block.equations:
        equations += [changed, *widenings] if e is writer else [e]
    return Block(block.inputs, tuple(equations), block.outputs)
