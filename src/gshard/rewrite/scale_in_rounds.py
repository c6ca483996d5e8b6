"""Permits parts of a sum to pass a scaling whose result a loop adds to its carry.

Usually gshard reduces a sum of floats before it is scaled (``rules.elementwise``). In a loop this would send the parts
in every iteration, although one reduction after the loop suffices:

    lax.scan(lambda total, batch: (total + gradient(batch) / 8, None), zeros, batches)

So inside loops a literal of at most one may scale parts. Devices flush scaled parts below the smallest normal number to
zero, which changes the total by at most 1e-38 for each iteration and device. Outside of loops such a sum is read once,
and reducing it before the scaling costs the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.program import Block, Constant, Equation, Value
from gshard.language.traits import sums_in_range, traits_of
from gshard.rewrite.equation_graph import Neighbours

_LOOPS = ("scan", "while")
_SAME = ("convert_element_type", "copy", "name")

# The smallest permitted scale. Smaller ones would flush too many parts to zero.
_LEAST = 2.0**-32


def added_in_rounds(name: str, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The bodies of a region, with rules that permit parts to pass a scaling before they are added to a carry."""
    return tuple(map(_changed, blocks)) if name in _LOOPS else tuple(blocks)


def _changed(block: Block) -> Block:
    graph = Neighbours(block.equations, block.outputs)
    carried = set(block.inputs)
    for e in block.equations:
        if (traits_of(e.name).adds or e.name in _SAME) and not carried.isdisjoint(e.inputs):
            carried.update(e.outputs)

    added: set[Value] = set()  # values that are only scaled and added to a value from the previous iteration
    for e in reversed(block.equations):
        if (traits_of(e.name).adds or _scaled(e) is not None) and (
            e.outputs[0] in added or (e.outputs[0] in graph.outputs and not carried.isdisjoint(e.inputs))
        ):
            added.update(v for v in e.inputs if isinstance(v, Value) and graph.is_read_once(v))

    def changed(e: Equation) -> Equation:
        operand = _scaled(e)
        if operand is None or e.rule is None or e.outputs[0] not in added:
            return e
        linear = (*e.rule.linear, ("add", frozenset((operand,))))
        return dataclasses.replace(e, rule=dataclasses.replace(e.rule, linear=linear))

    equations = tuple(map(changed, block.equations))
    return block if equations == block.equations else Block(block.inputs, equations, block.outputs)


def _scaled(e: Equation) -> int | None:
    """The number of the operand that a product or a division by a literal scales down; None for other equations."""
    if e.name not in ("mul", "div") or not sums_in_range(e.outputs[0].dtype):
        return None
    for scaled, by in ((0, 1), (1, 0)) if e.name == "mul" else ((0, 1),):
        x, literal = e.inputs[scaled], e.inputs[by]
        number = literal.number if isinstance(literal, Constant) else None
        if number and isinstance(x, Value) and _LEAST <= (number if e.name == "mul" else 1 / number) < 1:
            return scaled
    return None
