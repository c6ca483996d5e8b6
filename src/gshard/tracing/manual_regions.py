"""Checks that manual regions do not mix one device's parts with whole arrays.

Between ``auto_to_manual`` and ``manual_to_auto`` a value is one device's part, and values that are computed from parts
are parts. Literals and arrays without operands (a counter) can be used with both. An equation that mixes parts and
whole arrays would silently compute different results on each device, and so would its derivative. gshard refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gshard.core.errors import ShardingError
from gshard.core.program import Block, Equation, Value
from gshard.rules.callback import ONCE

_ENTER, _LEAVE, _INSIDE = "auto_to_manual", "manual_to_auto", "part_index"
_HINT = "Bring it in by gshard.auto_to_manual(x, None, {n}), or parts out by gshard.manual_to_auto."

# The side of a value: None if it can be used on both sides, 0 for a whole array, n for one of n parts.
Side = int | None


def check_manual_regions(block: Block) -> None:
    """Checks a program.

    Raises:
        ShardingError: the program mixes parts and whole arrays, marks parts, or returns parts.
    """
    if not any(e.name in (_ENTER, _LEAVE, _INSIDE) for e in block.walk()):
        return
    sides: dict[Value, Side] = dict.fromkeys(block.inputs, 0)
    for side, last in zip(_run(block, sides), block.outputs, strict=True):
        if side:
            raise ShardingError(
                "the function returns one device's part.",
                got=f"{last}, one of {side} parts",
                hint="Make it whole by gshard.manual_to_auto first.",
            )


def parts_of(block: Block) -> dict[Value, int]:
    """The values that are one device's part, each with the number of parts."""
    sides: dict[Value, Side] = dict.fromkeys(block.inputs, 0)
    if any(e.name in (_ENTER, _INSIDE) for e in block.walk()):
        _run(block, sides)
    return {v: side for v, side in sides.items() if side}


def _run(block: Block, sides: dict[Value, Side]) -> list[Side]:
    """Determines and checks the sides of all values of a block; returns the sides of its outputs."""
    for e in block.equations:
        inputs = [sides[x] if isinstance(x, Value) else None for x in e.inputs]
        if e.blocks:
            _region(e, sides)
            continue
        side = _side_of(e, inputs)
        parts = e.params.get("partitions") if e.name in (_ENTER, _LEAVE, _INSIDE) else None
        if e.name == _ENTER and side:
            raise ShardingError(f"this is one of {side} parts already.", e.line, hint="Take it apart once.")
        if e.name == _LEAVE and side != parts and side is not None:
            what = "is whole" if side == 0 else f"is one of {side} parts"
            raise ShardingError(f"manual_to_auto of {parts} parts on a value that {what}.", e.line)
        if e.mark is not None and side:
            raise ShardingError(
                "one device's part cannot be marked.", e.line, f"one of {side} parts", "Mark it before or afterwards."
            )
        if side and e.name in ONCE and not e.params.get("partitioned"):
            raise ShardingError(
                f"'{e.name}' is called once, and this is one of {side} parts that differ.",
                e.line,
                hint="Say partitioned=True where the callback has it, or call it with whole arrays.",
            )
        if e.name in (_ENTER, _INSIDE):
            result = parts
        else:
            result = 0 if e.name == _LEAVE else side
        sides.update(dict.fromkeys(e.outputs, result))
    return [sides[x] if isinstance(x, Value) else None for x in block.outputs]


def _side_of(e: Equation, inputs: Sequence[Side]) -> Side:
    """The side of an equation, from the sides of its operands."""
    sides = {side for side in inputs if side is not None}
    if len(sides) <= 1:
        return sides.pop() if sides else None
    parts = max(sides)
    what = "whole arrays" if 0 in sides else f"parts of {min(sides)}"
    shapes = ", ".join(
        f"{x.dtype_name}[{','.join(map(str, x.shape))}] {'whole' if side == 0 else f'one of {side} parts'}"
        for x, side in zip(e.inputs, inputs, strict=True)
        if isinstance(x, Value) and side is not None
    )
    raise ShardingError(
        f"'{e.name}' mixes one device's part of {parts} with {what}.", e.line, shapes, _HINT.format(n=parts)
    )


def _region(e: Equation, sides: dict[Value, Side]) -> None:
    """Propagates sides along the edges of a loop or branch to a fixed point."""
    for block in e.blocks:
        sides.update({v: sides.get(v) for v in block.inputs})
    sides.update(dict.fromkeys(e.outputs))
    while True:
        for block in e.blocks:
            _run(block, sides)
        changed = False
        for edge in e.edges:
            for v, other in ((edge.outer, edge.inner), (edge.inner, edge.outer)):
                side, other_side = sides.get(v), sides.get(other)
                if other_side is None and side is not None:
                    sides[other] = side
                    changed = True
                elif side is not None and other_side is not None and side != other_side:
                    raise ShardingError(
                        f"'{e.name}' carries one device's part where it has a whole array elsewhere.",
                        e.line,
                        f"{v} and {other}",
                        _HINT.format(n=max(side, other_side)),
                    )
        if not changed:
            return
