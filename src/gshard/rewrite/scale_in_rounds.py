"""Scaling in loops: lets parts of a sum pass a scaling whose result a loop adds to its carry.

Parts of a sum of floats are added up before they are scaled (``rules.elementwise``). In a loop that would send them in
every round, where they could be added up once, after the loop:

    lax.scan(lambda total, batch: (total + gradient(batch) / 8, None), zeros, batches)

So there, and only there, a number of the program that makes nothing larger may scale parts. Of parts that are smaller
than the least normal number then, which devices flush to zero, the total lacks as much: 1e-38 for each round and
device. Elsewhere such a sum is read once, and costs the same before it is scaled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.program import Block, Constant, Equation, Value
from gshard.language.passing import sums_in_range
from gshard.language.traits import traits_of

_LOOPS = ("scan", "while")
_SAME = ("convert_element_type", "copy", "name")

# Times less, too much that is not zero would become zero.
_LEAST = 2.0**-32


def added_in_rounds(name: str, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The bodies of a region, in which parts may be scaled where they are added to what a loop carries."""
    return tuple(map(_changed, blocks)) if name in _LOOPS else tuple(blocks)


def _changed(block: Block) -> Block:
    readers: dict[Value, list[Equation]] = {}
    carried, results = set(block.inputs), set(block.outputs)
    for e in block.equations:
        if (traits_of(e.name).adds or e.name in _SAME) and not carried.isdisjoint(e.inputs):
            carried.update(e.outputs)
        for v in e.inputs:
            if isinstance(v, Value):
                readers.setdefault(v, []).append(e)

    def is_added(v: Value) -> bool:
        """Whether all that is done with a value is scaling it, and adding it to what came into the round."""
        users = readers.get(v, [])
        if v in results or len(users) != 1 or not (traits_of(users[0].name).adds or _scaled(users[0]) is not None):
            return False
        (total,) = users[0].outputs
        return is_added(total) or (total in results and not carried.isdisjoint(users[0].inputs))

    def changed(e: Equation) -> Equation:
        at = _scaled(e)
        if at is None or e.rule is None or not is_added(e.outputs[0]):
            return e
        linear = (*e.rule.linear, ("add", frozenset((at,))))
        return dataclasses.replace(e, rule=dataclasses.replace(e.rule, linear=linear))

    equations = tuple(map(changed, block.equations))
    return block if equations == block.equations else Block(block.inputs, equations, block.outputs)


def _scaled(e: Equation) -> int | None:
    """The operand that a product, or a division, by a number of the program makes smaller, if it is one."""
    if e.name not in ("mul", "div") or not sums_in_range(e.outputs[0].dtype):
        return None
    for at, by in ((0, 1), (1, 0)) if e.name == "mul" else ((0, 1),):
        x, scale = e.inputs[at], e.inputs[by]
        c = scale.number if isinstance(scale, Constant) else None
        if c and isinstance(x, Value) and _LEAST <= (c if e.name == "mul" else 1 / c) < 1:
            return at
    return None
