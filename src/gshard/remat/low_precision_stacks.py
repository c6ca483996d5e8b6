"""Low-precision stacks: stacks values before a loop's final widening conversion, and widens them after the loop.

    ys = scan(x -> f32(g(x)) stacked); p - ys   ->   ys = scan(x -> g(x) stacked); p - f32(ys)

So it is with gradients of float32 weights that are used in bfloat16. The same numbers take half the memory, and the
widening becomes part of what reads them.
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
    """Stacks of one loop that can be of lower precision.

    Attributes:
        writer: the loop.
        values: the stacks.
        freed: bytes.
        seconds: none, nothing is computed twice.
    """

    writer: Equation
    values: tuple[Value, ...]
    freed: int
    seconds: float = 0.0


def low_precision_over(liveness: Liveness, peak: int, elsewhere: frozenset[Value]) -> list[LowPrecision]:
    """The stacks that are alive at a kernel, or made by it, and could be of lower precision."""
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
    """The operand of an equation that does nothing but make elements wider."""
    if len(e.inputs) != 1 or isinstance(e.inputs[0], Constant) or kind_of(e) != FUSED or e.rule is None:
        return None
    x, y = e.inputs[0], e.outputs[0]
    assert isinstance(x, Value), "told from a constant above"
    same = e.rule.operands[0] == e.rule.results[0] and x.shape == y.shape
    return x if same and itemsize(x.dtype) < itemsize(y.dtype) else None


def with_low_precision_stacks(liveness: Liveness, found: LowPrecision, names: Iterator[int]) -> Block:
    """The block in which the stacks are widened after the loop.

    Args:
        liveness: the block's.
        found: what ``low_precision_over`` found.
        names: numbers for new values.
    """
    writer, block = found.writer, liveness.kernels.block
    body = writer.blocks[0]
    producer = {v: e for e in body.equations for v in e.outputs}
    outputs, inner, wider = [], [], []
    for v, x in zip(writer.outputs, body.outputs, strict=True):
        if v not in found.values:
            outputs.append(v)
            inner.append(x)
            continue
        assert isinstance(x, Value), "a constant is not widened"
        e = producer[x]
        (source,) = e.inputs
        stack = Value(v.shape, source.dtype, next(names))
        call = Call(e.name, e.params, (v.shape,), (v.shape,), (source.dtype,), e.primitive)
        wider.append(dataclasses.replace(e, inputs=(stack,), outputs=(v,), rule=rule_of(call, e.source_info)))
        outputs.append(stack)
        inner.append(source)
    loop = without_dead_code(Block(body.inputs, body.equations, tuple(inner)))
    changed = with_edges(dataclasses.replace(writer, outputs=tuple(outputs), blocks=(loop,)))
    made: list[Equation] = []
    for e in block.equations:
        made += [changed, *wider] if e is writer else [e]
    return Block(block.inputs, tuple(made), block.outputs)
